"""The floor of one step: its matrix products and attention alone, back to back in one CUDA graph.

Counted are the products of all blocks on all tokens, merged where they read the same input, and attention. Left out are
what a step does for one row only (time embedding, modulation), the first and last product, and what runs once a run.
In fp8 the products are torch's row-wise scaled ones, on e4m3 factors that need not be made; attention stays bf16.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import gpu

Tensor = torch.Tensor


@dataclass(frozen=True)
class Product:
    """[rows, inputs] times [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Full attention among `tokens` of each of `batch` items."""

    batch: int
    heads: int
    tokens: int
    width: int

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.tokens**2 * self.width


Part = Product | Attention


def flux_parts(config: Any, batch: int, image: int, text: int) -> list[Part]:
    """One step of FluxTransformer2DModel with `image` and `text` tokens an item."""
    heads, width = config.num_attention_heads, config.attention_head_dim
    c, joint = heads * width, batch * (image + text)
    attention = Attention(batch, heads, image + text, width)
    streams = (batch * image, batch * text)
    double: list[Part] = [Product(rows, c, 3 * c) for rows in streams] + [attention]
    for rows in streams:
        double += [Product(rows, c, c), Product(rows, c, 4 * c), Product(rows, 4 * c, c)]
    single: list[Part] = [Product(joint, c, 7 * c), attention, Product(joint, 5 * c, c)]
    return double * int(config.num_layers) + single * int(config.num_single_layers)


def z_image_parts(config: Any, batch: int, image: int, caption: int) -> list[Part]:
    """One step of ZImageTransformer2DModel; tokens are padded to whole multiples of 32, as stock does."""
    image, caption = image + -image % 32, caption + -caption % 32
    c, heads = config.dim, config.n_heads
    wide = int(c / 3 * 8)
    parts: list[Part] = []
    for tokens in [image] * config.n_refiner_layers + [image + caption] * config.n_layers:
        rows = batch * tokens
        parts += [Product(rows, c, 3 * c), Attention(batch, heads, tokens, c // heads), Product(rows, c, c)]
        parts += [Product(rows, c, 2 * wide), Product(rows, wide, c)]
    return parts


def step_of(parts: Iterable[Part], *, fp8: bool = False) -> tuple[Callable[[], None], str]:
    """A function that runs the parts once on random numbers, and the name of the attention it uses.

    Two copies of each weight in turn are enough that none is still in the cache when its turn comes.
    """
    calls: list[Callable[[], Tensor]] = []
    weights: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
    inputs: dict[Any, Any] = {}
    attend: Callable[..., Tensor] | None = None
    library = ""
    factor, product = (_rows_fp8, _scaled_linear) if fp8 else (_rows, F.linear)
    for part in parts:
        if isinstance(part, Product):
            turn = weights.setdefault((part.inputs, part.outputs), [])
            if len(turn) < 2:
                turn.append(factor(part.outputs, part.inputs))
            else:
                turn.append(turn.pop(0))
            key = (part.rows, part.inputs)
            if key not in inputs:
                inputs[key] = factor(*key)
            calls.append(_bind(product, *inputs[key], *turn[-1]))
        else:
            if part not in inputs:
                inputs[part] = [_random(part.batch, part.heads, part.tokens, part.width) for _ in range(3)]
            if attend is None:
                attend, library = _attention(*inputs[part])
            calls.append(_bind(attend, *inputs[part]))

    def step() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    return step, library


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=gpu.DEVICE)


def _rows(number: int, width: int) -> tuple[Tensor, ...]:
    return (_random(number, width),)


def _rows_fp8(number: int, width: int) -> tuple[Tensor, ...]:
    """Codes, and a scale a row."""
    return _random(number, width).to(torch.float8_e4m3fn), torch.ones(number, 1, device=gpu.DEVICE)


def _scaled_linear(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    product: Tensor = torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product


def _bind(function: Callable[..., Tensor], *args: Tensor) -> Callable[[], Tensor]:
    return lambda: function(*args)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[..., Tensor], str]:
    """cuDNN's attention where it takes these tensors, else torch's choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def cudnn(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(*qkv)

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns why, and then raises
            cudnn(q, k, v)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return attend, "torch's choice"
    return cudnn, "cuDNN"
