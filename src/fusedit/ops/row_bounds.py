"""Scales for the rows of a product's result, known before the product, from the lengths of its rows.

    b[..., s] = length[..., s] * bounds[0] + bounds[1]                      and, unless bounds[2] = bounds[3] = 0,
                at least max_t length[..., t] * bounds[2] + bounds[3], over the tokens of the item
    b[..., s] = length[..., s]^2 * bounds[0] + length[..., s] * bounds[1]   where `square`
    scale[..., s] = the smallest power of two that is at least b[..., s] * 1.0625 / 448, and at least 2^-100

S tokens. All fp32; products and sums are rounded one by one, so that a device and torch agree bit for bit, and the
power of two is made on the bits of the exponent. A length or bound that is inf or NaN gives NaN.
Why it bounds: |x . w_n + b_n| <= |x| |w_n| + |b_n| (Cauchy and Schwarz), so bounds[0] = max_n |w_n| and bounds[1] =
max_n |b_n|; |gelu(u)| and |silu(u)| are at most |u|; silu(x . w_n) (x . w'_n) is at most |x|^2 |w_n| |w'_n|, so for
`square` bounds[0] = max_n |w_n| |w'_n|; attention mixes rows, so the item's longest bounds its result. The 1/16 on top
is for fp32 sums, for operands in bf16, and for lengths that are themselves rounded. A scale that is a power of two
costs no precision: a code keeps its three bits.
Bytes: 8 a row (12 with the maximum). FLOPs: about 4 a row.
Exactness: lossy, by what it is for; the scales themselves are exact.
Source: the inequality of Cauchy and Schwarz.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
BLOCK: Final = 1024
PART: Final = 1.0625 / 448
LEAST: Final = 2.0**-100


def _bound(length: Tensor, bounds: Tensor, square: bool) -> Tensor:
    if square:
        return length * length * bounds[0] + length * bounds[1]
    b = length * bounds[0] + bounds[1]
    if length.shape[-1] == 0:
        return b
    longest = length.amax(-1, keepdim=True) * bounds[2] + bounds[3]
    return torch.where((bounds[2] != 0) | (bounds[3] != 0), torch.maximum(b, longest), b)


def reference(length: Tensor, bounds: Tensor, square: bool = False) -> Tensor:
    part = _bound(length, bounds, square) * PART
    mantissa, exponent = part.clamp_min(LEAST).frexp()  # mantissa from 0.5, and 0.5 for a power of two
    scale = torch.ldexp(torch.ones_like(part), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(part.isfinite(), scale, torch.nan)


def plain(length: Tensor, bounds: Tensor, square: bool = False, *, out: Tensor | None = None) -> Tensor:
    part = _bound(length, bounds, square) * PART
    bits = part.clamp_min(LEAST).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32).masked_fill(~part.isfinite(), torch.nan)
    return scale if out is None else out.copy_(scale)


def check(length: Tensor, bounds: Tensor, square: bool = False) -> tuple[torch.Size]:
    _check.activation("row_bounds", "length", length, ".")
    if length.dtype is not torch.float32:
        raise OpError(f"row_bounds: length must be float32, not {_check.show(length)}")
    _check.like("row_bounds", "bounds", bounds, length, (4,))
    _check.kind("row_bounds", "square", square, "bool")
    return (length.shape,)


def cost(length: Tensor, bounds: Tensor, square: bool = False) -> Cost:
    return Cost(length.nbytes * (2 if square else 3) + bounds.nbytes, length.numel() * (6 if square else 5))


@kernel
def _kernel(
    length_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    S: tl.tensor,
    length_batch: tl.tensor,
    scale_batch: tl.tensor,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    own = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + own
    item = length_ptr + b * length_batch
    length = tl.load(item + rows, mask=rows < S, other=0.0)
    first, second = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    if SQUARE:
        bound = length * length * first + length * second
    else:
        bound = length * first + second
        third, fourth = tl.load(bounds_ptr + 2), tl.load(bounds_ptr + 3)
        if (third != 0.0) | (fourth != 0.0):
            # As whole numbers: lengths are not negative, inf is larger than any and NaN than inf.
            longest = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, S, BLOCK):
                known = tl.load(item + start + own, mask=start + own < S, other=0.0)
                longest = tl.maximum(longest, known.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            least = tl.max(longest, axis=0).to(tl.float32, bitcast=True) * third + fourth
            bound = tl.maximum(bound, least, propagate_nan=tl.PropagateNan.ALL)
    part = bound * 0.002371651785714286  # PART
    bits = tl.maximum(part, 7.888609052210118e-31).to(tl.int32, bitcast=True)  # LEAST
    scale = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(part) < float("inf"), scale, float("nan"))
    tl.store(scale_ptr + b * scale_batch + rows, scale, mask=rows < S)


def builds() -> list[Build]:
    types = dict.fromkeys(("length_ptr", "bounds_ptr", "scale_ptr"), "*fp32")
    return [
        Build.of(name, _kernel, types, {"BLOCK": BLOCK, "SQUARE": square}, 4, "no-spill")
        for name, square in (("linear-bf16", False), ("square-bf16", True))
    ]


def reads(length: Tensor, bounds: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return length.new_empty(0), length, bounds  # every program reads all lengths of its item


def fits(t: Tensor) -> bool:
    return t.ndim < 3 and (t.stride(-1) == 1 or t.shape[-1] == 1)


def limit(length: Tensor, *_: Any, **__: Any) -> str:
    items = length.numel() // max(1, length.shape[-1])
    return f"{items} items are more than 65535" if items > 65535 else ""


def _args(shape: tuple[int, ...], bounds: tuple[float, ...], square: bool = False, layout: str = "dense") -> Any:
    return T(shape, layout, torch.float32, "positive", std=20.0), T((4,), dtype=torch.float32), square, bounds


def _with(length: Tensor, like: Tensor, square: bool, bounds: tuple[float, ...]) -> tuple[Any, ...]:
    return length, like.new_tensor(bounds), square


LINEAR, FLOOR, SQUARE = (3.0, 0.5, 0.0, 0.0), (3.0, 0.5, 4.0, 0.25), (2.5, 0.7, 0.0, 0.0)
CASES = (
    Case("small", _args((2, 5), LINEAR), packed=_with),
    Case("maximum", _args((2, 70), FLOOR), packed=_with),
    Case("square", _args((2, 70), SQUARE, True), packed=_with),
    Case("nothing", _args((1, 9), (0.0, 0.0, 0.0, 0.0)), packed=_with),
    Case("several-programs", _args((2, 2050), FLOOR), packed=_with),
    Case("one-dimension", _args((70,), FLOOR), ("small", "odd"), packed=_with),
    Case("three-dimensions", _args((2, 3, 70), FLOOR, layout="joint"), ("small", "odd"), packed=_with),
    Case("sliced", _args((2, 70), FLOOR, layout="sliced"), ("small", "strided"), packed=_with),
    Case("gapped", _args((2, 70), FLOOR, layout="gapped"), ("small", "strided"), packed=_with),
    Case("transposed", _args((2, 70), FLOOR, layout="transposed"), ("small", "strided"), packed=_with),
    Case("empty", _args((2, 0), FLOOR), ("small", "empty"), packed=_with),
    Case("flux", _args((1, 4608), LINEAR), ("real",), packed=_with),
    Case("z-image", _args((1, 4320), SQUARE, True), ("real",), packed=_with),
    Case("long", _args((1, 100_000), FLOOR), ("real",), packed=_with),
)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    reads=reads,
    fits=fits,
    mixed=True,
)
def row_bounds(length: Tensor, bounds: Tensor, square: bool = False, *, out: Tensor | None = None) -> Tensor:
    """length[...,S], bounds[4] -> scales[...,S], powers of two, all fp32; `out` may not lie on length."""
    assert out is not None
    S = length.shape[-1]
    length = _rows.inner(length.reshape(-1, S))
    scale = out if out.ndim == 2 else out.view(-1, S)
    _kernel[(_rows.cdiv(S, BLOCK), length.shape[0])](
        length,
        bounds.contiguous(),
        scale,
        S,
        length.stride(0),
        scale.stride(0),
        BLOCK=BLOCK,
        SQUARE=bool(square),
        num_warps=4,
        enable_fp_fusion=False,  # fp32 as torch rounds it
    )
    return out
