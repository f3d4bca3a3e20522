"""What the ops on layouts share: one kernel that moves tiles of channels x pixels from any layout into any other.

A program takes BLOCK_C channels of BLOCK_P pixels: at least 128 bytes in a row on both sides, wherever there are as
many channels. It loads along what is dense in the source and stores along what is dense in the result; where these
differ, the compiler turns the tile through shared memory.

Two kinds of memory: strided [N, C, H, W], and tiles [N, ceil(H/8), ceil(W/8), ceil(C/c), 8, 8, c], in which a block of
8 x 8 pixels with c channels is one piece of 64 c elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from fusedit.ops import _rows
from fusedit.ops._build import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
SIDE: Final = 8
"""Pixels of a tile in either direction."""
CHANNELS: Final = (32, 64)
"""Channels that a tile may have."""
ELEMENTS: Final = 4096
"""Elements of one program; 4 warps hold them in 16 (bf16) or 32 (fp32) registers a thread."""
NEITHER: Final = 0
ALONG_CHANNELS: Final = 1
ALONG_PIXELS: Final = 2
TILES: Final = 3
"""What is dense in a side's memory: neither dimension, channels, pixels, or the channels of a tile."""


@kernel
def _places(
    base_ptr: tl.tensor,
    n: tl.tensor,
    h: tl.tensor,
    block: tl.tensor,
    p: tl.tensor,
    batch: tl.tensor,
    row: tl.tensor,
    pixel: tl.tensor,
    channel: tl.tensor,
    down: tl.tensor,
    right: tl.tensor,
    BLOCK_C: tl.constexpr,
    DENSE: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Addresses [BLOCK_C, BLOCK_P] of pixels p in row h, channels from BLOCK_C * block on; steps in units of VEC."""
    base = base_ptr + n * batch * VEC
    within = tl.arange(0, BLOCK_C)
    if DENSE == 3:
        base += ((h // 8).to(tl.int64) * down + (h % 8).to(tl.int64) * row + block.to(tl.int64) * channel) * VEC
        if VEC > 1:
            base = tl.multiple_of(base, 16)
        return base + (((p // 8).to(tl.int64) * right + (p % 8).to(tl.int64) * pixel) * VEC)[None, :] + within[:, None]
    base += h.to(tl.int64) * row * VEC
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    c = block * BLOCK_C + within
    if DENSE == 1:
        return base + (p.to(tl.int64) * pixel * VEC)[None, :] + c[:, None]
    if DENSE == 2:
        return base + (c.to(tl.int64) * channel * VEC)[:, None] + p[None, :]
    return base + (c.to(tl.int64) * channel)[:, None] + (p.to(tl.int64) * pixel)[None, :]


@kernel
def _inside(
    c: tl.tensor, p: tl.tensor, C: tl.tensor, P: tl.tensor, DENSE: tl.constexpr, VEC: tl.constexpr
) -> tl.tensor:
    """c < C and p < P; the size of the dense dimension comes in units of VEC, so that no vector is cut."""
    if DENSE == 2:
        return (c < C)[:, None] & (p < P * VEC)[None, :]
    return (c < C * VEC)[:, None] & (p < P)[None, :]


@kernel
def _kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    blocks: tl.tensor,
    parts: tl.tensor,
    x_H: tl.tensor,
    x_C: tl.tensor,
    x_P: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    x_pixel: tl.tensor,
    x_channel: tl.tensor,
    x_down: tl.tensor,
    x_right: tl.tensor,
    out_C: tl.tensor,
    out_P: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    out_pixel: tl.tensor,
    out_channel: tl.tensor,
    out_down: tl.tensor,
    out_right: tl.tensor,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    X_DENSE: tl.constexpr,
    X_VEC: tl.constexpr,
    OUT_DENSE: tl.constexpr,
    OUT_VEC: tl.constexpr,
) -> None:
    # Blocks of channels first: programs side by side then write whole pixels and read neighbouring rows.
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    n = tl.program_id(1).to(tl.int64)
    h = part // parts
    p = part % parts * BLOCK_P + tl.arange(0, BLOCK_P)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    at = _places(x_ptr, n, h, block, p, x_batch, x_row, x_pixel, x_channel, x_down, x_right, BLOCK_C, X_DENSE, X_VEC)
    x_C = tl.where(h < x_H, x_C, 0)  # tiles may have more rows than the picture
    x = tl.load(at, mask=_inside(c, p, x_C, x_P, X_DENSE, X_VEC), other=0.0)
    to = _places(
        out_ptr,
        n,
        h,
        block,
        p,
        out_batch,
        out_row,
        out_pixel,
        out_channel,
        out_down,
        out_right,
        BLOCK_C,
        OUT_DENSE,
        OUT_VEC,
    )
    tl.store(to, x, mask=_inside(c, p, out_C, out_P, OUT_DENSE, OUT_VEC))


class Side(NamedTuple):
    """One side of a move as the kernel takes it.

    Attributes:
        sizes: rows, channels, and pixels of a row.
        steps: from item to item, row to row, pixel to pixel, channel to channel (tiles: block to block), and from tile
            to tile downwards and to the right, in elements.
        dense: what lies side by side.
        vec: elements of one access.
    """

    sizes: tuple[int, int, int]
    steps: tuple[int, int, int, int, int, int]
    dense: int
    vec: int

    def numbers(self) -> tuple[int, ...]:
        """Sizes and steps as the kernel wants them, so that it can prove what is aligned."""
        rows, channels, pixels = self.sizes
        if self.dense == ALONG_PIXELS:
            pixels //= self.vec
        else:
            channels //= self.vec
        return rows, channels, pixels, *(step // self.vec for step in self.steps)


def foldable(t: Tensor) -> bool:
    """Whether the pixels of [N, C, H, W] are one run with one step."""
    _, _, H, W = t.shape
    return H == 1 or W == 1 or t.stride(2) == W * t.stride(3)


def strided(t: Tensor, flat: bool) -> Side:
    """[N, C, H, W] at any strides; `flat`: as one row of H W pixels."""
    C, H, W = t.shape[1:]
    batch, channel = (t.stride(axis) if t.shape[axis] > 1 else 0 for axis in (0, 1))
    row, pixel = (t.stride(axis) if t.shape[axis] > 1 else 0 for axis in (2, 3))
    if flat:
        row, pixel, H, W = 0, pixel if W > 1 else row, 1, H * W
    dense = ALONG_CHANNELS if channel == 1 else ALONG_PIXELS if pixel == 1 else NEITHER
    across = (pixel, C) if dense == ALONG_CHANNELS else (channel, W)
    vec = 1 if dense == NEITHER else _vec(t, (batch, row, *across))
    return Side((H, C, W), (batch, row, pixel, channel, 0, 0), dense, vec)


def tiles(t: Tensor) -> Side:
    """[N, ceil(H/8), ceil(W/8), ceil(C/c), 8, 8, c], its channels dense, at any other strides."""
    steps = [s if n > 1 else 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    batch, down, right, block, row, pixel = steps
    sizes = (SIDE * t.shape[1], t.shape[3] * t.shape[6], SIDE * t.shape[2])
    return Side(sizes, (batch, row, pixel, block, down, right), TILES, _vec(t, steps))


def _vec(t: Tensor, multiples: Sequence[int]) -> int:
    """Elements in 16 bytes, where every run starts on 16 bytes and is whole ones long; else 1."""
    vec = 16 // t.element_size()
    return 1 if t.data_ptr() % 16 or any(n % vec for n in multiples) else vec


def block_of(C: int) -> int:
    """Channels of a program: four variants for all sizes."""
    return next((block for block in (4, 16, 32) if block >= C), 64)


def move(x: Tensor, source: Side, out: Tensor, target: Side, block: int) -> Tensor:
    """Every element of `target` becomes the one of `source` at its place, or 0 where there is none."""
    rows, channels, pixels = target.sizes
    blocks, parts = _rows.cdiv(channels, block), _rows.cdiv(pixels, ELEMENTS // block)
    _kernel[(rows * parts * blocks, out.shape[0])](
        x,
        out,
        blocks,
        parts,
        *source.numbers(),
        *target.numbers()[1:],
        **_constexprs(block, source.dense, source.vec, target.dense, target.vec),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def transpose(x: Tensor, out: Tensor) -> Tensor:
    """x[N, C, H, W] into `out` of that shape, both at any strides."""
    flat = foldable(x) and foldable(out)
    return move(x, strided(x, flat), out, strided(out, flat), block_of(x.shape[1]))


def _constexprs(block: int, x_dense: int, x_vec: int, out_dense: int, out_vec: int) -> dict[str, Any]:
    return {
        "BLOCK_C": block,
        "BLOCK_P": ELEMENTS // block,
        "X_DENSE": x_dense,
        "X_VEC": x_vec,
        "OUT_DENSE": out_dense,
        "OUT_VEC": out_vec,
    }


def build(name: str, x_dense: int, out_dense: int, block: int, dtype: torch.dtype, aligned: bool = True) -> Build:
    """The variant that moves whole vectors on both sides, or none."""
    whole = 16 // dtype.itemsize if aligned else 1
    # Pixels of 3 channels start anywhere.
    x_vec, out_vec = (1 if block == 4 and dense == ALONG_CHANNELS else whole for dense in (x_dense, out_dense))
    types = dict.fromkeys(("x_ptr", "out_ptr"), _rows.POINTERS[dtype])
    traits = [*(["vector"] if min(x_vec, out_vec) > 1 else []), *(["no-spill"] if aligned else [])]
    return Build.of(name, _kernel, types, _constexprs(block, x_dense, x_vec, out_dense, out_vec), 4, *traits)


def transposing_builds(x_dense: int, out_dense: int) -> list[Build]:
    """Many, few and 3 channels, unaligned ones, and fp32."""
    return [
        build("bf16", x_dense, out_dense, 64, torch.bfloat16),
        build("bf16-unaligned", x_dense, out_dense, 64, torch.bfloat16, aligned=False),
        build("bf16-16-channels", x_dense, out_dense, 16, torch.bfloat16),
        build("bf16-3-channels", x_dense, out_dense, 4, torch.bfloat16),
        build("fp32", x_dense, out_dense, 64, torch.float32),
    ]


def tile_shape(shape: Sequence[int], channels: int) -> tuple[int, int, int, int, int, int, int]:
    """That of a packed [N, C, H, W]."""
    N, C, H, W = shape
    return N, -(-H // SIDE), -(-W // SIDE), -(-C // channels), SIDE, SIDE, channels
