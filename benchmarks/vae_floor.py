"""The floor of a decode or an encode: its convolutions and the products of attention alone, in one CUDA graph.

Convolutions are those of the module that is measured, found by running it without data: NHWC, bf16, no bias, by cuDNN.
One that follows a doubling of the picture counts as the four convolutions 2x2 on the picture before it that give the
same result with 4/9 of the products. Of attention count its linear layers, merged where they share an input, and its
two matrix products, without the softmax between them: no library's attention takes heads as wide as these at the speed
of its products. It is no bound for an algorithm with fewer products, as Winograd's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmarks import floor, gpu
from benchmarks.floor import Attention, Product

Tensor = torch.Tensor
ATTENTION: Final = "two products"
LOGITS: Final = 2**29
"""Logits at a time: 1 GiB of them, and enough rows that the second product fills the card."""


@dataclass(frozen=True)
class Conv:
    """`taps` x `taps` on a picture [batch, inputs, height, width]."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    taps: int
    stride: int = 1
    padding: int = 0

    @property
    def flops(self) -> int:
        rows, columns = ((n + 2 * self.padding - self.taps) // self.stride + 1 for n in (self.height, self.width))
        return 2 * self.batch * rows * columns * self.inputs * self.outputs * self.taps**2


Part = Conv | Product | Attention


def parts_of(module: Any, shape: tuple[int, ...]) -> list[Part]:
    """The convolutions and attentions of a decoder or encoder of an AutoencoderKL, for an input of this shape."""
    model = copy.deepcopy(module).to("meta")
    doubled = {up.conv for up in model.modules() if type(up).__name__ == "Upsample2D"}
    parts: list[Part] = []

    def convolution(conv: Any, args: tuple[Any, ...], _made: Tensor) -> None:
        n, c, h, w = args[0].shape
        if conv in doubled:  # a row and a column more, which pad the small picture
            parts.extend([Conv(n, c, conv.out_channels, h // 2 + 1, w // 2 + 1, 2)] * 4)
        else:
            taps, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
            parts.append(Conv(n, c, conv.out_channels, h, w, taps, stride, padding))

    def attention(attn: Any, args: tuple[Any, ...], _made: Tensor) -> None:
        n, c, h, w = args[0].shape
        wide = attn.to_q.out_features
        parts.append(Product(n * h * w, c, 3 * wide))
        parts.append(Attention(n, attn.heads, h * w, wide // attn.heads))
        parts.append(Product(n * h * w, wide, c))

    for part in model.modules():
        if isinstance(part, torch.nn.Conv2d):
            part.register_forward_hook(convolution)
        elif type(part).__name__ == "Attention":
            part.register_forward_hook(attention)
    with torch.no_grad():
        model(torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta"))
    return parts


def step_of(parts: Iterable[Part]) -> Callable[[], None]:
    """A function that runs the parts once on random numbers.

    Equal parts share their input and weight. Pictures are larger than the cache, or lie in it in the decoder too; the
    largest weight is read in a hundredth of the time of its layer.
    """
    calls: dict[Part, Callable[[], Any]] = {}
    turns: list[Callable[[], Any]] = []
    for part in parts:
        if part not in calls:
            calls[part] = _call(part)
        turns.append(calls[part])

    def step() -> None:
        with torch.no_grad():
            for call in turns:
                call()

    return step


def _call(part: Part) -> Callable[[], Any]:
    if isinstance(part, Conv):
        return _convolution(part)
    return _two_products(part) if isinstance(part, Attention) else floor.step_of([part])[0]


def _convolution(part: Conv) -> Callable[[], Any]:
    x = _picture(part.batch, part.inputs, part.height, part.width)
    weight = _picture(part.outputs, part.inputs, part.taps, part.taps)
    return lambda: F.conv2d(x, weight, None, part.stride, part.padding)


def _picture(*shape: int) -> Tensor:
    empty = torch.empty(shape, dtype=torch.bfloat16, device=gpu.DEVICE, memory_format=torch.channels_last)
    return empty.normal_()


def _two_products(part: Attention) -> Callable[[], Tensor]:
    """q k^T and its product with v, some queries at a time, so that the logits of a large picture fit."""
    heads = range(part.batch * part.heads)
    rows = max(1, min(part.tokens, LOGITS // part.tokens))
    q, k, v = (_random(part.batch * part.heads, part.tokens, part.width) for _ in range(3))
    logits, y = _random(rows, part.tokens), torch.empty_like(q)

    def products() -> Tensor:
        for head in heads:
            for start in range(0, part.tokens, rows):
                some = slice(start, start + rows)
                made = logits[: len(q[head, some])]
                torch.mm(q[head, some], k[head].T, out=made)
                torch.mm(made, v[head], out=y[head, some])
        return y

    return products


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=gpu.DEVICE)
