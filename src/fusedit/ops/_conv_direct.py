"""Convolutions by pointers, on any chip: an implicit product for any channels, and another way for few outputs.

`direct` treats the R x R x C inputs of an output pixel as one row of a product and finds each where it lies: pictures
in any layout and with 3 channels need no copy. `gather`, for up to 32 / R^2 outputs, multiplies each pixel with the
weights of all taps at once, which reads the picture once instead of R^2 times, and adds what belongs together
afterwards; the sums stay in fp32. H200, [1,128,1024,1024] to 3 channels, bf16: 172 us,
cuDNN 336 us.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _rows
from fusedit.ops._conv import ACTIVATIONS, activate
from fusedit.ops._op import Build
from fusedit.ops._rows import cdiv, power_of_2
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
COLUMNS: Final = 32
"""Taps times outputs that `gather` takes at most."""
_BAND: Final = 2**20
"""Pixels that `gather` treats at once: 113 MB of sums for three outputs of 3 x 3 taps."""


@kernel
def _direct(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    P: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    x_n: tl.tensor,
    x_h: tl.tensor,
    x_w: tl.tensor,
    x_c: tl.tensor,
    residual_n: tl.tensor,
    residual_h: tl.tensor,
    residual_w: tl.tensor,
    y_n: tl.tensor,
    y_h: tl.tensor,
    y_w: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    OUT: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """y[p, :] of BM pixels and BN outputs; steps of x are in units of VEC but for x_c, of residual and y of OUT."""
    across: tl.constexpr = (K + BN - 1) // BN  # all outputs of a pixel beside each other, so that x stays in L2
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    p = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n = (p // (H * W)).to(tl.int64)
    h = p // W % H
    w = p % W
    lane = tl.arange(0, BK)
    at = x_ptr + n * x_n * VEC
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, R * R * C, BK):
        if C % BK == 0:  # all of one tap
            tap = k // C
            up, left = h + tap // R - R // 2, w + tap % R - R // 2
            rows = at + (up.to(tl.int64) * x_h + left.to(tl.int64) * x_w) * VEC + k % C * x_c
            if VEC > 1:
                rows = tl.multiple_of(rows, 16)
            inside = ((p < P) & (up >= 0) & (up < H) & (left >= 0) & (left < W))[:, None]
            if VEC > 1:
                x = tl.load(rows[:, None] + lane[None, :], mask=inside, other=0.0)
            else:
                x = tl.load(rows[:, None] + (lane * x_c)[None, :], mask=inside, other=0.0)
        else:
            j = k + lane
            down, right = j // C // R - R // 2, j // C % R - R // 2
            up, left = h[:, None] + down[None, :], w[:, None] + right[None, :]
            inside = (p < P)[:, None] & (j < R * R * C)[None, :]
            inside &= (up >= 0) & (up < H) & (left >= 0) & (left < W)
            rows = at + (h.to(tl.int64) * x_h + w.to(tl.int64) * x_w) * VEC
            moved = (down.to(tl.int64) * x_h + right.to(tl.int64) * x_w) * VEC + j % C * x_c
            x = tl.load(rows[:, None] + moved[None, :], mask=inside, other=0.0)
        j = k + lane
        mask = (j < R * R * C)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + columns[None, :] * (R * R * C) + j[:, None], mask=mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACT)
    mask = (p < P)[:, None] & (columns < K)[None, :]
    if RESIDUAL:
        from_ = residual_ptr + (n * residual_n + h.to(tl.int64) * residual_h + w.to(tl.int64) * residual_w) * OUT
        if OUT > 1:
            from_ = tl.multiple_of(from_, 16)
        acc += tl.load(from_[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    to = y_ptr + (n * y_n + h.to(tl.int64) * y_h + w.to(tl.int64) * y_w) * OUT
    if OUT > 1:
        to = tl.multiple_of(to, 16)
    tl.store(to[:, None] + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _taps(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sums_ptr: tl.tensor,
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
) -> None:
    """sums[tap, k, p] = sum_c x[p, c] weight[k, tap, c] for the P pixels of a band of one picture."""
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


def rows_of(weight: Tensor) -> Tensor:
    """weight[K,C,R,R] as [K, R * R * C]; a copy unless it lies channels_last."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _pixels(t: Tensor, vec: int) -> tuple[int, int, int]:
    """Steps of a picture from image to image, row to row and pixel to pixel, in units of vec."""
    return t.stride(0) // vec, t.stride(2) // vec, t.stride(3) // vec


def _vector(*tensors: Tensor) -> int:
    """_rows.vector of pictures with dense channels; 1 where one has others."""
    if any(t.stride(1) != 1 for t in tensors):
        return 1
    return _rows.vector(8, *(t.permute(0, 2, 3, 1) for t in tensors))


def _blocks(C: int, K: int, R: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes of `direct`. 3 -> 128 channels at 1024x1024 on an H200: 128 x 64 takes 137 us, 64 x 64 190, 64 x 128
    191, cuDNN 700."""
    bk = 32 if R * R * C <= 32 or C % 64 or dtype == torch.float32 else 64
    return {"BM": 128, "BN": max(16, min(64 if C % bk else 128, power_of_2(K))), "BK": bk}


def _warps(blocks: dict[str, int]) -> int:
    return 8 if blocks["BN"] == 128 else 4


def direct(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor) -> None:
    """y and residual with dense channels; x in any layout."""
    N, C, H, W = x.shape
    K, _, R, _ = weight.shape
    blocks = _blocks(C, K, R, x.dtype)
    vec = _vector(x) if C % blocks["BK"] == 0 else 1
    other = y if residual is None else residual
    wide = _vector(other, y) if K % 8 == 0 else 1
    _direct[(cdiv(K, blocks["BN"]) * cdiv(N * H * W, blocks["BM"]),)](
        x,
        rows_of(weight),
        weight if bias is None else bias.contiguous(),
        other,
        y,
        N * H * W,
        H,
        W,
        *_pixels(x, vec),
        x.stride(1),
        *_pixels(other, wide),
        *_pixels(y, wide),
        C=C,
        K=K,
        R=R,
        **blocks,
        VEC=vec,
        OUT=wide,
        ACT=ACTIVATIONS.index(act),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=_warps(blocks),
        num_stages=3,
        enable_fp_fusion=True,
    )


def gather(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor) -> None:
    """For K R^2 <= COLUMNS; x with dense channels, residual and y in any layout."""
    N, C, H, W = x.shape
    K, _, R, _ = weight.shape
    vec = _vector(x) if C % 8 == 0 else 1
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
                plane,
                W,
                *_pixels(x, vec)[1:],
                C=C,
                **sizes,
                VEC=vec,
                num_stages=3,
                **common,
            )
            target = y[n, :, start:]
            other = target if residual is None else residual[n, :, start:]
            steps = (*(other.stride(d) for d in (1, 2, 0)), *(target.stride(d) for d in (1, 2, 0)))
            _add_taps[(cdiv((end - start) * W, 512), K)](
                sums, bias_, other, target, end - start, W, start - first, plane, *steps, R=R, BM=512, **flags, **common
            )


def builds() -> list[Build]:
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "y_ptr")
    made = []
    for name, C, K, vec in (("wide-bf16", 512, 512, 8), ("first-bf16", 3, 128, 1)):
        types = dict.fromkeys(pointers, "*bf16")
        flags = {"VEC": vec, "OUT": 8, "ACT": 0, "BIAS": True, "RESIDUAL": vec > 1}
        blocks = _blocks(C, K, 3, torch.bfloat16)
        constexprs = {"C": C, "K": K, "R": 3, **blocks, **flags}
        made.append(Build.of(name, _direct, types, constexprs, _warps(blocks), "no-spill"))
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "sums_ptr": "*fp32"}
    sizes = {"C": 128, "K": 3, "TAPS": 9, "BM": 128, "BN": COLUMNS, "BK": 64, "VEC": 8}
    made.append(Build.of("taps-bf16", _taps, types, sizes, 4, "no-spill"))
    types = {"sums_ptr": "*fp32", "bias_ptr": "*bf16", "residual_ptr": "*bf16", "y_ptr": "*bf16"}
    flags = {"K": 3, "R": 3, "BM": 512, "ACT": 0, "BIAS": True, "RESIDUAL": False}
    made.append(Build.of("add-taps-bf16", _add_taps, types, flags, 4, "no-spill"))
    return made
