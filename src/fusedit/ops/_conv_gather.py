"""Convolution to few outputs: one product of each pixel with the weights of all taps, then sums over neighbours.

For up to 32 / R^2 outputs. The picture is read once instead of R^2 times, and products stay in fp32 until they are
added. On the way in the picture can be normalised, so that its norm is never written. H200, [1,128,1024,1024] to 3
channels in bf16: 168 us, cuDNN with its bias 326.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from fusedit.ops._build import Build
from fusedit.ops._conv import ACTIVATIONS, activate, pixels, vector
from fusedit.ops._conv_direct import rows_of
from fusedit.ops._elementwise import sigmoid
from fusedit.ops._rows import cdiv, power_of_2
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
COLUMNS: Final = 32
"""Taps times outputs at most."""
_BAND: Final = 2**20
"""Pixels at once: 113 MB of products for three outputs of 3 x 3 taps."""


@kernel
def _taps(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    center_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    P: tl.tensor,
    W: tl.tensor,
    x_h: tl.tensor,
    x_w: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """sums[tap, k, p] = sum_c x[p, c] weight[k, tap, c] for the P pixels of a band of one picture; with NORM, of
    silu((x - center[c]) * factor[c] + shift[c]) instead of x, rounded as it would be in memory."""
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, BN)
    lane = tl.arange(0, BK)
    rows = x_ptr + ((p // W).to(tl.int64) * x_h + (p % W).to(tl.int64) * x_w) * VEC
    if VEC > 1:
        rows = tl.multiple_of(rows, 16)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, C, BK):
        c = k + lane
        x = tl.load(rows[:, None] + c[None, :], mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
        if NORM:
            center = tl.load(center_ptr + c, mask=c < C, other=0.0)
            factor = tl.load(factor_ptr + c, mask=c < C, other=0.0)
            shift = tl.load(shift_ptr + c, mask=c < C, other=0.0).to(tl.float32)
            y = (x.to(tl.float32) - center[None, :]) * factor[None, :] + shift[None, :]
            x = (y * sigmoid(y)).to(x.dtype)
        at = weight_ptr + (j % K * TAPS + j // K)[None, :] * C + c[:, None]
        weight = tl.load(at, mask=(j < K * TAPS)[None, :] & (c < C)[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    to = sums_ptr + j.to(tl.int64)[None, :] * P + p[:, None]
    tl.store(to, acc, mask=(p < P)[:, None] & (j < K * TAPS)[None, :])


@kernel
def _add_taps(
    sums_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    above: tl.tensor,
    plane: tl.tensor,
    residual_h: tl.tensor,
    residual_w: tl.tensor,
    residual_c: tl.tensor,
    y_h: tl.tensor,
    y_w: tl.tensor,
    y_c: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """One output channel of H rows of a picture; `sums` has `plane` pixels, `above` rows of them before these."""
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1)
    h = p // W
    w = p % W
    acc = tl.zeros((BM,), tl.float32)
    for tap in tl.static_range(R * R):
        up, left = h + above + tap // R - R // 2, w + tap % R - R // 2
        inside = (p < H * W) & (up >= 0) & (up * W < plane) & (left >= 0) & (left < W)
        acc += tl.load(sums_ptr + (tap * K + k).to(tl.int64) * plane + up * W + left, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + k).to(tl.float32)
    acc = activate(acc, ACT)
    mask = p < H * W
    if RESIDUAL:
        at = residual_ptr + h.to(tl.int64) * residual_h + w.to(tl.int64) * residual_w + k.to(tl.int64) * residual_c
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    to = y_ptr + h.to(tl.int64) * y_h + w.to(tl.int64) * y_w + k.to(tl.int64) * y_c
    tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=mask)


class Norm(NamedTuple):
    """What turns x into its norm: centers and factors [N, C] in fp32, shift [C]."""

    centers: Tensor
    factors: Tensor
    shift: Tensor


def gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    y: Tensor,
    norm: Norm | None = None,
) -> None:
    """For K R^2 <= COLUMNS; x with dense channels, residual and y in any layout; with a norm, x is what it is of."""
    N, C, H, W = x.shape
    K, _, R, _ = weight.shape
    vec = vector(C, x)
    halo, step = R // 2, max(1, _BAND // W)
    rows = rows_of(weight)
    sums = torch.empty((R * R * K, min(H, step + 2 * halo) * W), dtype=torch.float32, device=x.device)
    bias_ = weight if bias is None else bias.contiguous()
    common: dict[str, Any] = {"K": K, "num_warps": 4, "enable_fp_fusion": True}
    flags = {"ACT": ACTIVATIONS.index(act), "BIAS": bias is not None, "RESIDUAL": residual is not None}
    sizes = {"TAPS": R * R, "BM": 128, "BN": COLUMNS, "BK": min(64, max(16, power_of_2(C)))}
    for n in range(N):
        for start in range(0, H, step):
            end = min(H, start + step)
            first, last = max(0, start - halo), min(H, end + halo)
            plane = (last - first) * W
            _taps[(cdiv(plane, 128),)](
                x[n, :, first:],
                rows,
                sums,
                *((sums, sums, sums) if norm is None else (norm.centers[n], norm.factors[n], norm.shift)),
                plane,
                W,
                *pixels(x, vec)[1:],
                C=C,
                **sizes,
                VEC=vec,
                NORM=norm is not None,
                num_stages=3,
                **common,
            )
            target = y[n, :, start:]
            other = target if residual is None else residual[n, :, start:]
            steps = (*(other.stride(d) for d in (1, 2, 0)), *(target.stride(d) for d in (1, 2, 0)))
            _add_taps[(cdiv((end - start) * W, 512), K)](
                sums, bias_, other, target, end - start, W, start - first, plane, *steps, R=R, BM=512, **flags, **common
            )


def builds(norm: bool) -> list[Build]:
    types = dict.fromkeys(("x_ptr", "weight_ptr", "shift_ptr"), "*bf16")
    types |= dict.fromkeys(("sums_ptr", "center_ptr", "factor_ptr"), "*fp32")
    sizes = {"C": 128, "K": 3, "TAPS": 9, "BM": 128, "BN": COLUMNS, "BK": 64, "VEC": 8, "NORM": norm}
    if norm:  # which spills 16 bytes on 12.0; the other kernel is that of the op without
        return [Build.of("taps-bf16", _taps, types, sizes, 4)]
    made = [Build.of("taps-bf16", _taps, types, sizes, 4, "no-spill")]
    types = {"sums_ptr": "*fp32", "bias_ptr": "*bf16", "residual_ptr": "*bf16", "y_ptr": "*bf16"}
    flags = {"K": 3, "R": 3, "BM": 512, "ACT": 0, "BIAS": True, "RESIDUAL": False}
    made.append(Build.of("add-taps-bf16", _add_taps, types, flags, 4, "no-spill"))
    return made
