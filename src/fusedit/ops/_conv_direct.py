"""Convolution by pointers, on any chip: an implicit product for any number of channels.

The R x R x C inputs of an output pixel are one row of a product, each found where it lies: pictures in any layout and
with 3 channels need no copy.
"""

from __future__ import annotations

import torch

from fusedit.ops._build import Build
from fusedit.ops._conv import ACTIVATIONS, activate, pixels, places, vector
from fusedit.ops._rows import cdiv, power_of_2
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor


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
            rows = at + (up.to(tl.int64) * x_h + left.to(tl.int64) * x_w) * VEC
            inside = ((p < P) & (up >= 0) & (up < H) & (left >= 0) & (left < W))[:, None]
            if VEC > 1:  # channels are dense
                rows = tl.multiple_of(rows + k % C, 16)
                x = tl.load(rows[:, None] + lane[None, :], mask=inside, other=0.0)
            else:
                x = tl.load(rows[:, None] + ((k % C + lane).to(tl.int64) * x_c)[None, :], mask=inside, other=0.0)
        else:
            j = k + lane
            down, right = j // C // R - R // 2, j // C % R - R // 2
            up, left = h[:, None] + down[None, :], w[:, None] + right[None, :]
            inside = (p < P)[:, None] & (j < R * R * C)[None, :]
            inside &= (up >= 0) & (up < H) & (left >= 0) & (left < W)
            rows = at + (h.to(tl.int64) * x_h + w.to(tl.int64) * x_w) * VEC
            moved = (down.to(tl.int64) * x_h + right.to(tl.int64) * x_w) * VEC + (j % C).to(tl.int64) * x_c
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
        from_ = places(residual_ptr, n, h, w, columns, residual_n, residual_h, residual_w, OUT)
        acc += tl.load(from_, mask=mask, other=0.0).to(tl.float32)
    tl.store(places(y_ptr, n, h, w, columns, y_n, y_h, y_w, OUT), acc.to(y_ptr.dtype.element_ty), mask=mask)


def rows_of(weight: Tensor) -> Tensor:
    """weight[K,C,R,R] as [K, R * R * C], dense; a copy unless it lies so: channels_last, without gaps."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1).contiguous()


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
    vec = vector(C, x) if C % blocks["BK"] == 0 else 1
    other = y if residual is None else residual
    wide = vector(K, other, y)
    _direct[(cdiv(K, blocks["BN"]) * cdiv(N * H * W, blocks["BM"]),)](
        x,
        rows_of(weight),
        weight if bias is None else bias.contiguous(),
        other,
        y,
        N * H * W,
        H,
        W,
        *pixels(x, vec),
        x.stride(1),
        *pixels(other, wide),
        *pixels(y, wide),
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


def builds() -> list[Build]:
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "y_ptr")
    made = []
    for name, C, K, vec in (("wide-bf16", 512, 512, 8), ("first-bf16", 3, 128, 1)):
        types = dict.fromkeys(pointers, "*bf16")
        flags = {"VEC": vec, "OUT": 8, "ACT": 0, "BIAS": True, "RESIDUAL": vec > 1}
        blocks = _blocks(C, K, 3, torch.bfloat16)
        constexprs = {"C": C, "K": K, "R": 3, **blocks, **flags}
        made.append(Build.of(name, _direct, types, constexprs, _warps(blocks), "no-spill"))
    return made
