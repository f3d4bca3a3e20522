"""Launches, on next to nothing, all that a LoRA may need: then one that is loaded later compiles nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fusedit import ops
from fusedit.float8.linear import Float8Linear
from fusedit.float8.products import quantise
from fusedit.ops import _low_rank_sums
from fusedit.ops.add_low_rank import make_ready as add_ready

Tensor = torch.Tensor
WIDE = 512


def widths_of(module: nn.Module) -> set[int]:
    """Of activations that e4m3 layers of this module quantise where they are called as they are."""
    layers = (child for child in module.modules() if isinstance(child, Float8Linear))
    return {layer.weight.shape[1] for layer in layers if layer.activations}


def lora_ready(
    x: Tensor,
    *,
    bias: bool,
    gelu: bool = False,
    swiglu: bool = False,
    codes: bool = False,
    widths: Iterable[int] = (),
) -> None:
    """Every variant for any rank, on the device of x.

    Args:
        x: activations of the dtype that the model computes in.
        bias: whether linear layers have one.
        gelu, swiglu: what is fused into products.
        codes: whether there are products of e4m3 too.
        widths: of activations to quantise, whose kernel is compiled for each: DoRA layers and the check of what was
            loaded call layers as they are.
    """
    for width in widths:
        quantise(x.new_zeros(1, 8, width))
    few, weight = x.new_zeros(1, 8, WIDE), x.new_zeros(WIDE, WIDE)
    vector = x.new_zeros(WIDE) if bias else None
    low = _term(few)
    add_ready(few, few.dtype)
    add_ready(few, few.dtype, scaled=True)  # behind the products of the modulation, where a row may have it already
    ops.linear_low_rank(few, weight, vector, *low)
    if gelu and vector is not None:
        ops.linear_gelu(few, weight, vector, 0, *low)
    if swiglu:
        ops.linear_swiglu(few, weight, *low)
    if codes:
        _codes_ready(few, vector, swiglu, gelu)


def _codes_ready(few: Tensor, vector: Tensor | None, swiglu: bool, gelu: bool) -> None:
    read, weight = (
        torch.zeros(n, WIDE, dtype=torch.float32, device=few.device).to(torch.float8_e4m3fn) for n in (8, WIDE)
    )
    given = (
        read[None],
        torch.ones(1, 8, dtype=torch.float32, device=few.device),
        weight,
        torch.ones(WIDE, dtype=torch.float32, device=few.device),
    )
    dtype = torch.bfloat16 if few.dtype.itemsize == 2 else few.dtype
    low, name = _term(read[None], dtype), str(few.dtype).removeprefix("torch.")
    ops.scaled_linear(*given, vector, name, *low)
    add_ready(few, dtype, scaled=True)
    if gelu:
        ops.scaled_linear_gelu(*given, vector, given[1], 0, name, *low)
    if swiglu:
        ops.scaled_linear_swiglu(*given, given[1], *low)


def _term(x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """A term of 8 ranks in dtype, which is that of x unless x is e4m3; the sums that make it are ready for any rank."""
    kept = x.dtype if dtype is None else dtype
    down, up = torch.zeros(8, WIDE, device=x.device).to(x.dtype), torch.zeros(WIDE, 8, dtype=kept, device=x.device)
    scale = torch.zeros(8, dtype=torch.float32, device=x.device)
    codes = x.dtype is torch.float8_e4m3fn
    op, named = (ops.scaled_low_rank, (str(kept).removeprefix("torch."),)) if codes else (ops.low_rank, ())
    t = op(x, down, scale, *named)
    if op.backend(x, down, scale, *named).name == "triton":
        _low_rank_sums.make_ready(x, down, kept)
    return t, up
