"""The picture that was cut into tiles (see pack_tiles), whole again and in channels_last memory.

    y[n, c k + d, 8 i + r, 8 j + s] = t[n, i, j, k, r, s, d]

t[N, ceil(H/8), ceil(W/8), ceil(C/c), 8, 8, c], c = 32 or 64, at any strides, fp16, bf16 or fp32 -> y[N,C,H,W]; what
pads the last tiles is left out. `out` may lie in any way, so in NCHW too.
Bytes: y read and written. FLOPs: none. Exactness: bitwise.
Source: the inverse of pack_tiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _rows, _transpose
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._conv import channels_last
from fusedit.ops._op import Cost, op
from fusedit.ops._transpose import ALONG_CHANNELS, SIDE, TILES, build
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(t: Tensor, C: int, H: int, W: int) -> Tensor:
    side, channels = SIDE, t.shape[6]
    c = torch.arange(C, device=t.device).view(C, 1, 1)
    h = torch.arange(H, device=t.device).view(1, H, 1)
    w = torch.arange(W, device=t.device).view(1, 1, W)
    y: Tensor = wide(t)[:, h // side, w // side, c // channels, h % side, w % side, c % channels]
    return y


def plain(t: Tensor, C: int, H: int, W: int, *, out: Tensor | None = None) -> Tensor:
    y = channels_last(t, (t.shape[0], C, H, W)) if out is None else out
    whole = t.permute(0, 3, 6, 1, 4, 2, 5).flatten(5).flatten(3, 4).flatten(1, 2)
    return y.copy_(whole[:, :C, :H, :W])


def check(t: Tensor, C: int, H: int, W: int) -> tuple[tuple[int, ...]]:
    name = "unpack_tiles"
    _check.activation(name, "t", t, "." * 7)
    for letter, size in (("C", C), ("H", H), ("W", W)):
        _check.kind(name, letter, size, "int")
    channels = t.shape[6]
    if channels not in _transpose.CHANNELS:
        raise OpError(f"{name}: t must have tiles of 32 or 64 channels, not {_check.show(t)}")
    want = _transpose.tile_shape((t.shape[0], C, H, W), channels)
    if min(C, H, W) < 0 or t.shape != want:
        raise OpError(f"{name}: t must be {list(want)} for C, H, W = {C}, {H}, {W}, not {_check.show(t)}")
    return ((t.shape[0], C, H, W),)


def cost(t: Tensor, C: int, H: int, W: int) -> Cost:
    return Cost(2 * math.prod((t.shape[0], C, H, W)) * t.element_size(), 0)


def builds() -> list[Build]:
    return [
        build("bf16", TILES, ALONG_CHANNELS, 32, torch.bfloat16),
        build("bf16-unaligned", TILES, ALONG_CHANNELS, 32, torch.bfloat16, aligned=False),
        build("bf16-of-64", TILES, ALONG_CHANNELS, 64, torch.bfloat16),
        build("fp32", TILES, ALONG_CHANNELS, 32, torch.float32),
    ]


def limit(t: Tensor, C: int, H: int, W: int) -> str:
    del C
    return _rows.too_many(t.shape[0], H, W)


def _args(N: int, C: int, H: int, W: int, channels: int = 32, layout: str = "dense") -> tuple[Any, ...]:
    return T(_transpose.tile_shape((N, C, H, W), channels), layout), C, H, W


CASES = (
    Case("small", _args(2, 64, 8, 16)),
    Case("tiles-of-64", _args(2, 128, 8, 16, 64)),
    Case("three-channels", _args(1, 3, 16, 16), ("small", "odd")),
    Case("odd", _args(3, 75, 5, 9, 64), ("small", "odd")),
    Case("wide", _args(1, 8, 3, 200)),
    Case("one-pixel", _args(2, 24, 1, 1), ("small", "odd")),
    Case("sliced", _args(1, 24, 4, 8, 32, "sliced"), ("small", "strided")),
    Case("joint", _args(2, 40, 9, 8, 32, "joint"), ("small", "strided")),
    Case("inside", _args(1, 40, 9, 8, 32, "inside"), ("small", "strided")),
    Case("offset", _args(1, 40, 9, 8, 32, "offset"), ("small", "strided")),
    Case("transposed", _args(2, 40, 9, 8, 64, "transposed"), ("small", "strided")),
    Case("gapped", _args(1, 40, 9, 8, 32, "gapped"), ("small", "strided")),
    Case("empty-batch", _args(0, 32, 4, 4), ("small", "empty")),
    Case("vae-128x1024", _args(1, 128, 1024, 1024), ("real",)),
    Case("vae-512x128", _args(1, 512, 128, 128, 64), ("real",)),
    Case("picture", _args(1, 3, 1024, 1024), ("real",)),
    Case("latents", _args(1, 16, 128, 128), ("real",)),
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
    fits=lambda _: True,
    allocate=channels_last,
)
def unpack_tiles(t: Tensor, C: int, H: int, W: int, *, out: Tensor | None = None) -> Tensor:
    """t[N, ceil(H/8), ceil(W/8), ceil(C/c), 8, 8, c] -> y[N,C,H,W] in channels_last memory."""
    assert out is not None
    assert tuple(out.shape[1:]) == (C, H, W)
    t = _rows.inner(t)
    return _transpose.move(t, _transpose.tiles(t), out, _transpose.strided(out, flat=False), t.shape[6])
