"""A picture cut into tiles of 8 x 8 pixels with some channels, each of them one piece of memory.

    t[n, i, j, k, r, s, d] = x[n, c k + d, 8 i + r, 8 j + s],  0 where x ends before

x[N,C,H,W] -> t[N, ceil(H/8), ceil(W/8), ceil(C/c), 8, 8, c], c = `channels` = 32 or 64. x at any strides, fp16, bf16 or
fp32. The layout that is said to make convolutions fast, since what a program of one reads lies together; what it does
and does not bring is measured by `python -m benchmarks layouts`.
Bytes: x read and t written. FLOPs: none. Exactness: bitwise.
Source: blocked layouts of CPU libraries (nChw16c of oneDNN), with pixels blocked too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _rows, _transpose
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._transpose import ALONG_CHANNELS, ALONG_PIXELS, SIDE, TILES, build
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor, channels: int = 32) -> Tensor:
    _, i, j, k, *_ = _transpose.tile_shape(x.shape, channels)
    x = F.pad(wide(x), (0, j * SIDE - x.shape[3], 0, i * SIDE - x.shape[2], 0, k * channels - x.shape[1]))
    h = torch.arange(i * SIDE, device=x.device).view(i, 1, 1, SIDE, 1, 1)
    w = torch.arange(j * SIDE, device=x.device).view(1, j, 1, 1, SIDE, 1)
    c = torch.arange(k * channels, device=x.device).view(1, 1, k, 1, 1, channels)
    return x[:, c, h, w]


def plain(x: Tensor, channels: int = 32, *, out: Tensor | None = None) -> Tensor:
    shape = _transpose.tile_shape(x.shape, channels)
    N, i, j, k, *_ = shape
    padding = (j * SIDE - x.shape[3], i * SIDE - x.shape[2], k * channels - x.shape[1])
    if any(padding):
        x = F.pad(x, (0, padding[0], 0, padding[1], 0, padding[2]))
    cut = x.view(N, k, channels, i, SIDE, j, SIDE).permute(0, 3, 5, 1, 4, 6, 2)
    return (x.new_empty(shape) if out is None else out).copy_(cut)


def check(x: Tensor, channels: int = 32) -> tuple[tuple[int, ...]]:
    _check.activation("pack_tiles", "x", x, "NCHW")
    _check.kind("pack_tiles", "channels", channels, "int")
    if channels not in _transpose.CHANNELS:
        raise OpError(f"pack_tiles: channels must be 32 or 64, not {_check.show(channels)}")
    return (_transpose.tile_shape(x.shape, channels),)


def cost(x: Tensor, channels: int = 32) -> Cost:
    return Cost(x.nbytes + math.prod(_transpose.tile_shape(x.shape, channels)) * x.element_size(), 0)


def builds() -> list[Build]:
    return [
        build("bf16", ALONG_CHANNELS, TILES, 32, torch.bfloat16),
        build("bf16-unaligned", ALONG_CHANNELS, TILES, 32, torch.bfloat16, aligned=False),
        build("bf16-of-64", ALONG_CHANNELS, TILES, 64, torch.bfloat16),
        build("bf16-from-nchw", ALONG_PIXELS, TILES, 32, torch.bfloat16),
        build("fp32-from-nchw-of-64", ALONG_PIXELS, TILES, 64, torch.float32),
    ]


def limit(x: Tensor, channels: int = 32) -> str:
    del channels
    return _rows.too_many(x.shape[0], *x.shape[2:])


CASES = (
    Case("small", (T((2, 64, 8, 16)),)),
    Case("tiles-of-64", (T((2, 128, 8, 16)), 64)),
    Case("channels-last", (T((2, 64, 8, 16), "channels_last"),), ("small", "strided")),
    Case("three-channels", (T((1, 3, 16, 16)),), ("small", "odd")),
    Case("odd", (T((3, 75, 5, 9)), 64), ("small", "odd")),
    Case("odd-channels-last", (T((1, 40, 5, 9), "channels_last"),), ("small", "odd")),
    Case("wide", (T((1, 8, 3, 200)),)),
    Case("one-pixel", (T((2, 24, 1, 1)),), ("small", "odd")),
    Case("sliced", (T((1, 24, 4, 8), "sliced"),), ("small", "strided")),
    Case("inside", (T((1, 24, 4, 8), "inside"),), ("small", "strided")),
    Case("offset", (T((2, 32, 8, 8), "offset"),), ("small", "strided")),
    Case("transposed", (T((2, 24, 6, 8), "transposed"), 64), ("small", "strided")),
    Case("gapped", (T((1, 24, 4, 8), "gapped"),), ("small", "strided")),
    Case("empty-batch", (T((0, 32, 4, 4)),), ("small", "empty")),
    Case("vae-128x1024", (T((1, 128, 1024, 1024), "channels_last"),), ("real",)),
    Case("vae-128x1024-nchw", (T((1, 128, 1024, 1024)), 64), ("real",)),
    Case("vae-512x128", (T((1, 512, 128, 128), "channels_last"), 64), ("real",)),
    Case("picture", (T((1, 3, 1024, 1024)),), ("real",)),
    Case("latents", (T((1, 16, 128, 128)),), ("real",)),
)


@op(
    exactness="bitwise",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
)
def pack_tiles(x: Tensor, channels: int = 32, *, out: Tensor | None = None) -> Tensor:
    """x[N,C,H,W] at any strides -> t[N, ceil(H/8), ceil(W/8), ceil(C/channels), 8, 8, channels], padded with zeros."""
    assert out is not None
    return _transpose.move(x, _transpose.strided(x, flat=False), out, _transpose.tiles(out), channels)
