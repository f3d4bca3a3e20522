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

from typing import Any, Final

import torch

from fusedit.ops._triton import INTERPRETING, kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
TINY: Final = 2.0**-91
"""A row that is smaller everywhere counts as zeros, so that 1 / s is a normal fp32 number."""
ROWS: Final = (E4M3, torch.float32, torch.float32)
"""Dtypes of codes, scales and lengths."""
CAPABILITY: Final = 89
"""Lowest compute capability whose instructions convert to e4m3."""


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 of each value, to even where two are as near; +-448 beyond, inf included; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[..., K] / s before rounding, at most 448, and s[...]; both fp32 (fp64 for fp64). K is at least 1."""
    x = wide(x)
    amax = x.abs().amax(-1)
    s = torch.where(amax.isfinite(), amax / E4M3_MAX, torch.nan)
    s = s.masked_fill(amax < TINY, 1.0)
    return (x * s.reciprocal()[..., None]).clamp(-E4M3_MAX, E4M3_MAX), s


def length_of(q: Tensor, s: Tensor) -> Tensor:
    """L2 norm of each row of the values that q[..., K] and s[...] stand for, in the dtype of s."""
    return torch.linalg.vector_norm(q.to(s.dtype), dim=-1) * s


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x[..., K] -> (q e4m3 [..., K], s [...], length [...]), the last two fp32 (fp64 for fp64)."""
    t, s = scaled(x)
    q = t.to(E4M3)
    return q, s, length_of(q, s)


def ideal(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the references of ops return: `quantized`, but for the codes the values that they are rounded from."""
    t, s = scaled(x)
    return t, s, length_of(to_e4m3(t), s)


# -- device functions ----------------------------------------------------------------------------------------------

# The interpreter of triton 3.6 to 3.9 rounds halves up, loses the carry into the exponent, and takes NaN for a number,
# both ways. There the codes are made of the bits.
BY_HAND: Any = None if tl is None else tl.constexpr(INTERPRETING)


@kernel
def e4m3(x: tl.tensor) -> tl.tensor:
    """fp32 to e4m3 as `to_e4m3` does it."""
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
