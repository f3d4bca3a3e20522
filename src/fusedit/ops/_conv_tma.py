"""Convolutions written for Hopper: an implicit product whose tiles come by TMA, epilogue in registers.

A tile of the product is 128 pixels of one picture row by 256 (or 128) outputs. For each tap the same 128 pixels are
fetched again, moved by one: TMA fills what lies outside of the picture with zeros, so the border costs nothing.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _hopper, _rows, _triton
from fusedit.ops._conv import ACTIVATIONS, activate
from fusedit.ops._hopper import place
from fusedit.ops._op import Build
from fusedit.ops._rows import cdiv
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
BM: Final = 128
"""Pixels of a tile, side by side in one row: a tile over two rows would pass through registers (10 to 20 % slower)."""
BK: Final = 64
_GROUP: Final = 16
_STAGES: Final = 3


def columns(K: int) -> int:
    """Outputs of a tile."""
    return 256 if K > 128 else 128


@kernel
def _conv(
    x_d: tl.tensor,
    weight_d: tl.tensor,
    residual_d: tl.tensor,
    y_d: tl.tensor,
    bias_ptr: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    C: tl.tensor,
    K: tl.tensor,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    across = tl.cdiv(W, BM)
    r, c = place(tl.program_id(0), N * H * across, tl.cdiv(K, BN), GROUP)
    n, h, w, column = r // (H * across), r // across % H, r % across * BM, c * BN
    steps = tl.cdiv(C, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(R * R * steps):
        tap, channel = i // steps, i % steps * BK
        x = x_d.load([n, h + tap // R - R // 2, w + tap % R - R // 2, channel]).reshape(BM, BK)
        # Past the last channel the next tap's weights follow, for which x has zeros.
        acc = tl.dot(x, weight_d.load([column, tap * C + channel]).T, acc)
    HALF: tl.constexpr = BN // 2
    left, right = acc.reshape(BM, 2, HALF).permute(0, 2, 1).split()
    _finish(left, residual_d, y_d, bias_ptr, n, h, w, column, K, BM, HALF, ACT, BIAS, RESIDUAL)
    _finish(right, residual_d, y_d, bias_ptr, n, h, w, column + HALF, K, BM, HALF, ACT, BIAS, RESIDUAL)


@kernel
def _finish(
    u: tl.tensor,
    residual_d: tl.tensor,
    y_d: tl.tensor,
    bias_ptr: tl.tensor,
    n: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    column: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    HALF: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    at = column + tl.arange(0, HALF)
    if BIAS:
        u += tl.load(bias_ptr + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
    u = activate(u, ACT)
    if RESIDUAL:
        u += residual_d.load([n, h, w, column]).reshape(BM, HALF).to(tl.float32)
    y_d.store([n, h, w, column], u.to(y_d.dtype).reshape(1, 1, BM, HALF))


def reason(x: Tensor, K: int, *others: Tensor | None) -> str:
    """Why the kernels cannot take x[N,C,H,W], the other pictures of the call and K outputs, or nothing."""
    if x.is_cuda and _triton.capability(x.device.index or 0) != (9, 0):
        return f"written for compute capability 9.0, not {_triton.capability(x.device.index or 0)}"
    if x.is_cuda and x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes half precision, not {str(x.dtype).removeprefix('torch.')}"
    pictures = [t.permute(0, 2, 3, 1) for t in (x, *others) if t is not None]
    if any(t.stride(3) != 1 for t in pictures):
        return "channels do not lie side by side"
    if x.shape[1] % 8 or K % 8 or _rows.vector(8, *pictures) == 1:
        return "needs pixels on 16 bytes"
    return ""


def _descriptor(t: Tensor, block: list[int]) -> Any:
    """Tiles of a picture [N,C,H,W] as it lies, [N,H,W,C]."""
    return _hopper.descriptor(t.permute(0, 2, 3, 1), block)


def conv(x: Tensor, rows: Tensor, R: int, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor) -> None:
    """x, residual and y with dense channels on 16 bytes; rows[K, R R C], the weight of _conv_direct.rows_of."""
    N, C, H, W = x.shape
    K = y.shape[1]
    bn = columns(K)
    out = _descriptor(y, [1, 1, BM, bn // 2])
    _conv[(N * H * cdiv(W, BM) * cdiv(K, bn),)](
        _descriptor(x, [1, 1, BM, BK]),
        _hopper.descriptor(rows, [bn, BK]),
        out if residual is None else _descriptor(residual, [1, 1, BM, bn // 2]),
        out,
        rows if bias is None else bias.contiguous(),
        N,
        H,
        W,
        C,
        K,
        R=R,
        BM=BM,
        BN=bn,
        BK=BK,
        GROUP=_GROUP,
        ACT=ACTIVATIONS.index(act),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=8 if bn == 256 else 4,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )


def builds() -> list[Build]:
    made = []
    for name, K in (("bf16-hopper", 256), ("bf16-hopper-narrow", 128)):
        bn = columns(K)
        tile = f"tensordesc<bf16[1,1,{BM},{bn // 2}]>"
        types = {"x_d": f"tensordesc<bf16[1,1,{BM},{BK}]>", "weight_d": f"tensordesc<bf16[{bn},{BK}]>"}
        types |= {"residual_d": tile, "y_d": tile, "bias_ptr": "*bf16"}
        flags = {"ACT": 0, "BIAS": True, "RESIDUAL": True}
        constexprs = {"R": 3, "BM": BM, "BN": bn, "BK": BK, "GROUP": _GROUP, **flags}
        warps = 8 if bn == 256 else 4
        made.append(Build.of(name, _conv, types, constexprs, warps, "no-spill", "descriptors", num_stages=_STAGES))
    return made
