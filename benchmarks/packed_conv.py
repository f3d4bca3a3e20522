"""One convolution kernel that reads pixels or tiles, so that the layout is all that differs between two timings.

    y[n,k,h,w] = sum_{c,r,s} x[n, c, h + r - R//2, w + s - R//2] weight[k,c,r,s]

An implicit matrix product for measuring only, of 8 x 16 pixels x 128 outputs a program, as its like are usually
written: for each tap and each block of `step` channels, 128 rows of x and the weights go through shared memory into the
tensor cores, with fp32 accumulation. x lies in NHWC or in the tiles of ops.pack_tiles, of `step` channels; what a tap
needs beyond the border comes from the neighbouring tiles. y lies in NHWC either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from fusedit.ops import _conv, _rows
from fusedit.ops._build import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
STEPS: Final = (32, 64)
"""Channels of one product, and of a tile."""
HEIGHT: Final = 8
WIDTH: Final = 16
COLUMNS: Final = 128
WARPS: Final = 8
STAGES: Final = {32: 4, 64: 3}
"""Of loads under way: two programs fit into a multiprocessor of Hopper."""


@kernel
def _kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    C: tl.tensor,
    K: tl.tensor,
    blocks: tl.tensor,
    R: tl.constexpr,
    TILES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    # C and K come in units of 8, so that the compiler can prove the alignment of every row; blocks = 8 C / STEP.
    parts = tl.cdiv(8 * K, COLUMNS)
    down, across = tl.cdiv(H, HEIGHT), tl.cdiv(W, WIDTH)
    place = tl.program_id(0) // parts
    n = (place // (down * across)).to(tl.int64)
    pixel = tl.arange(0, HEIGHT * WIDTH)
    h = place // across % down * HEIGHT + pixel // WIDTH
    w = place % across * WIDTH + pixel % WIDTH
    first = tl.program_id(0) % parts * COLUMNS
    k = tl.arange(0, COLUMNS)
    known = (first + k < 8 * K)[None, :]
    lane = tl.arange(0, STEP)
    if TILES:
        x_base = x_ptr + n * tl.cdiv(H, 8) * tl.cdiv(W, 8) * blocks * (64 * STEP)
    else:
        x_base = x_ptr + n * H * W * C * 8
    x_base = tl.multiple_of(x_base, 16)
    weight_base = tl.multiple_of(weight_ptr + first * C * 8, 16)
    out_base = tl.multiple_of(out_ptr + n * H * W * K * 8 + first, 16)
    y = tl.zeros((HEIGHT * WIDTH, COLUMNS), tl.float32)
    for i in range(0, R * R * blocks):
        tap = i // blocks
        block = i % blocks
        row = h + tap // R - R // 2
        column = w + tap % R - R // 2
        if TILES:
            tile = ((row >> 3) * tl.cdiv(W, 8) + (column >> 3)) * blocks + block
            start = (tile.to(tl.int64) * 64 + (row & 7) * 8 + (column & 7)) * STEP
        else:
            start = (row * W + column).to(tl.int64) * C * 8 + block * STEP
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        x = tl.load(x_base + start[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
        at = (tap * 8 * K + k) * C * 8 + block * STEP
        weight = tl.load(weight_base + at[None, :] + lane[:, None], mask=known, other=0.0)
        y = tl.dot(x, weight, y)
    to = out_base + (h * W + w).to(tl.int64)[:, None] * K * 8 + k[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=((h < H) & (w < W))[:, None] & known)


def pack_weight(weight: Tensor) -> Tensor:
    """weight[K,C,R,R] -> [R R, K, C], which the kernel reads."""
    return weight.permute(2, 3, 0, 1).flatten(0, 1).contiguous()


def convolve(x: Tensor, weight: Tensor, shape: Sequence[int], step: int) -> Tensor:
    """x of shape [N,C,H,W], dense channels_last, or packed into dense tiles of `step` channels; weight as `pack_weight`
    makes it. C is a multiple of `step`, the outputs are of 8. The result is channels_last."""
    N, C, H, W = shape
    taps, K, _ = weight.shape
    if C % step or K % 8:
        raise ValueError(f"{C} channels are no multiple of {step}, or {K} outputs none of 8")
    out = _conv.channels_last(x, (N, K, H, W))
    grid = (N * _rows.cdiv(H, HEIGHT) * _rows.cdiv(W, WIDTH) * _rows.cdiv(K, COLUMNS),)
    made = _constexprs(3 if taps == 9 else 1, x.ndim == 7, step)
    options: dict[str, Any] = {"num_warps": WARPS, "num_stages": STAGES[step], "enable_fp_fusion": True}
    _kernel[grid](x, weight, out, H, W, C // 8, K // 8, C // step, **made, **options)
    return out


def _constexprs(R: int, tiles: bool, step: int) -> dict[str, Any]:
    return {"R": R, "TILES": tiles, "HEIGHT": HEIGHT, "WIDTH": WIDTH, "COLUMNS": COLUMNS, "STEP": step}


def builds() -> list[Build]:
    """Every variant that is measured, to be compiled without a GPU."""
    types = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    return [
        Build.of(
            f"{'tiles' if tiles else 'nhwc'}-{step}-{R}x{R}",
            _kernel,
            types,
            _constexprs(R, tiles, step),
            WARPS,
            "no-spill",
            num_stages=STAGES[step],
        )
        for R in (3, 1)
        for tiles in (False, True)
        for step in STEPS
    ]
