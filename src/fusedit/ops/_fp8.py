"""Rows of e4m3 codes with one scale each: what they are, in torch and on the device.

    x[..., k] = q[..., k] * s[...]                        q e4m3 (torch.float8_e4m3fn), s fp32
    s[...] = max_k |x[..., k]| / 448                      1 where the whole row is below TINY
    length[...] = sqrt(sum_k (q[..., k] * s[...])^2)      fp32: the L2 norm of the row as it is kept

Every cast clamps to +-448 first, since what lies beyond becomes NaN on one device and 448 on another. So that the clamp
hides nothing, the scale of a row that holds an inf or NaN is NaN, and with it every value of the row and its length.
x is multiplied by 1 / s in fp32, both rounded to nearest, in torch and on the device: the same bits in, the same codes
out. Source: OCP 8-bit Floating Point Specification 1.0 (E4M3: no inf, NaN 0x7f, largest 448, smallest step 2^-9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from fusedit.ops import _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._rows import places
from fusedit.ops._triton import INTERPRETING, kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
TINY: Final = 2.0**-91
"""A row that is smaller everywhere counts as zeros, so that 1 / s is a normal fp32 number."""
ROWS: Final = (E4M3, torch.float32, torch.float32)
"""Dtypes of codes, scales and lengths."""
SLACK: Final = (1e-5, 1e-6, 2e-3)
"""How far codes (before rounding), scales and lengths may be off beside the 2x rule, see `op`: where fp32 arithmetic in
another order sees a value on the other side of the middle between two codes, the length moves by that whole step."""
CAPABILITY: Final = 89
"""Lowest compute capability whose instructions convert to e4m3."""


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 of each value, to even where two are as near; +-448 beyond, inf included; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[..., K] / s before rounding, at most 448, and s[...]; both fp32 (fp64 for fp64). K is at least 1."""
    t: Tensor = wide(x)
    amax: Tensor = t.abs().amax(-1)
    s = torch.where(amax.isfinite(), amax / E4M3_MAX, torch.nan)
    s = s.masked_fill(amax < TINY, 1.0)
    return torch.clamp(t * s.reciprocal()[..., None], -E4M3_MAX, E4M3_MAX), s


def scaled_by(x: Tensor, s: Tensor) -> Tensor:
    """x[..., K] / s[...] before rounding, at most 448; NaN where x is inf, for which no scale is right."""
    t, s = wide(x, s)
    t = t.masked_fill(t.isinf(), torch.nan) * s.reciprocal()[..., None]
    clamped: Tensor = t.clamp(-E4M3_MAX, E4M3_MAX)
    return clamped


def length_of(q: Tensor, s: Tensor) -> Tensor:
    """L2 norm of each row of the values that q[..., K] and s[...] stand for, in the dtype of s."""
    norm: Tensor = torch.linalg.vector_norm(q.to(s.dtype), dim=-1)
    return norm * s


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x[..., K] -> (q e4m3 [..., K], s [...], length [...]), the last two fp32 (fp64 for fp64)."""
    t, s = scaled(x)
    q = t.to(E4M3)
    return q, s, length_of(q, s)


def ideal(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the references of ops return: `quantized`, but for the codes the values that they are rounded from."""
    t, s = scaled(x)
    return t, s, length_of(to_e4m3(t), s)


def delivered(made: tuple[Tensor, ...], x: Tensor, out: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """What a plain returns: its rows in the dtypes of ROWS and what comes before them in that of x, or all in `out`."""
    if out is None:
        kept = (x.dtype,) * (len(made) - len(ROWS)) + ROWS
        return tuple(t.to(dtype) for t, dtype in zip(made, kept, strict=True))
    for target, t in zip(out, made, strict=True):
        target.copy_(t)
    return out


def shapes(x: Tensor) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Of the codes, scales and lengths of x[..., K]."""
    return x.shape, x.shape[:-1], x.shape[:-1]


def unwritten(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and lengths for x[..., K], all NaN: for cases whose other results lie on an input."""
    made = (torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in zip(shapes(x), ROWS, strict=True))
    q, s, length = (t.fill_(torch.nan) for t in made)
    return q, s, length


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    """Why no kernel can make e4m3 where x lies."""
    least = divmod(CAPABILITY, 10)
    if x.device.type != "cuda" or _triton.capability(x.device.index or 0) >= least:
        return ""
    found = ".".join(map(str, _triton.capability(x.device.index or 0)))
    return f"e4m3 needs compute capability {'.'.join(map(str, least))}, not {found}"


def row_limit(x: Tensor, *_: Any, **__: Any) -> str:
    """Why the kernels cannot make e4m3 rows of x[B, S, K]."""
    return limit(x) or _rows.limit(x)


def row_builds(kernel: Any, q: str, flags: Mapping[str, bool] | None = None, C: int = 3072) -> list[Build]:
    """Variants of a kernel on rows that the models need, where it writes e4m3; `q`: the pointer to the codes."""
    types = {q: "*fp8e4nv", "s_ptr": "*fp32", "length_ptr": "*fp32"}
    made = _rows.row_builds(kernel, flags, C)
    return [
        replace(b, signature={**b.signature, **types}, traits=b.traits | {"codes"}, capability=CAPABILITY) for b in made
    ]


# -- device functions ----------------------------------------------------------------------------------------------

# The interpreter of triton 3.6 to 3.9 rounds halves up, loses the carry into the exponent, and takes NaN for a number,
# both ways. There the codes are made of the bits.
BY_HAND: Any = None if tl is None else tl.constexpr(INTERPRETING)


@kernel
def e4m3(x: tl.tensor) -> tl.tensor:
    """fp32 to e4m3 as `to_e4m3` does it. For compute capability 8.9 triton 3.6 goes through fp16: what lies within a
    2^-12th of the middle between two codes may become the other there."""
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return _code(x) if BY_HAND else x.to(tl.float8e4nv)


@kernel
def from_e4m3(q: tl.tensor) -> tl.tensor:
    """e4m3 to fp32, exactly."""
    x = q.to(tl.float32)
    if BY_HAND:
        x = tl.where((q.to(tl.uint8, bitcast=True) & 127) == 127, float("nan"), x)
    return x


@kernel
def _code(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True)
    a = tl.where(x == x, tl.abs(x), 0.0)
    exponent = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # from 2^-6 down the step is 2^-9
    ruler = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)  # 1.5 * 2^23 steps
    rounded = (a + ruler) - ruler  # to nearest even, as fp32 adds
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    code = tl.where(rounded < 0.015625, (rounded * 512.0).to(tl.int32), normal)
    code = tl.where(x == x, code, 127) | ((bits >> 24) & 128)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@kernel
def quantize(x: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Rows of fp32 in registers, [ROWS, BLOCK], masked lanes anything -> codes, scales and lengths as `quantized`."""
    x = tl.where(mask, x, 0.0)
    # As whole numbers NaN is larger than inf and inf than any number, so that the maximum loses neither.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    s = tl.where(amax < float("inf"), tl.div_rn(amax, 448.0), float("nan"))
    s = tl.where(amax < 4.0389678347315804e-28, 1.0, s)  # TINY
    q = e4m3(x * tl.div_rn(1.0, s)[:, None])
    kept = from_e4m3(q)
    return q, s, tl.sqrt_rn(tl.sum(kept * kept, axis=1)) * s


@kernel
def store_rows(
    x: tl.tensor,
    mask: tl.tensor,
    b: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    S: tl.tensor,
    q_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    s_ptr: tl.tensor,
    s_batch: tl.tensor,
    length_ptr: tl.tensor,
    length_batch: tl.tensor,
    VEC: tl.constexpr,
) -> None:
    """Quantises rows of one batch item and stores them; scales and lengths lie side by side within an item."""
    q, s, length = quantize(x, mask)
    tl.store(places(q_ptr, b, rows, cols, q_batch, q_row, VEC), q, mask=mask)
    tl.store(s_ptr + b * s_batch + rows, s, mask=rows < S)
    tl.store(length_ptr + b * length_batch + rows, length, mask=rows < S)
