"""The weight of a 3 x 3 convolution, transformed for winograd_conv2d.

    u[T i + j, k, c] = sum_{r,s} G[i,r] weight[k,c,r,s] G[j,s],  T = tile + 2

weight[K, C, 3, 3] and u[T T, K, C] fp16, bf16 or fp32, any strides; all in fp32 (fp64 for fp64), rounded once. Done
once a weight, not at every call. `tile` is the side of a square of outputs: 2 for F(2x2,3x3), 4 for F(4x4,3x3).
Rounding u is one of the two errors that Winograd adds to a direct convolution in half precision.
Bytes: weight read and u written, (9 + T T) K C itemsize. FLOPs: 6 T (3 + T) K C. Exactness: reordered.
Measured on an H200: 46 us for 512 x 512 in bf16.
Source: Lavin and Gray 2015, Fast Algorithms for Convolutional Neural Networks, section 4; Winograd 1980.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
G: Final[Mapping[int, tuple[tuple[float, ...], ...]]] = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
}
"""By tile: interpolation at the points 0, 1, -1 (2, -2) and infinity."""
B: Final[Mapping[int, tuple[tuple[float, ...], ...]]] = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
"""B^T, which winograd_conv2d applies to its input."""
A: Final[Mapping[int, tuple[tuple[float, ...], ...]]] = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
"""A^T, for its output."""


def reference(weight: Tensor, tile: int = 2) -> Tensor:
    weight = wide(weight)
    g = torch.tensor(G[tile], dtype=weight.dtype, device=weight.device)
    return torch.einsum("ir,kcrs,js->ijkc", g, weight, g).reshape(len(g) ** 2, *weight.shape[:2])


def plain(weight: Tensor, tile: int = 2, *, out: Tensor | None = None) -> Tensor:
    u = reference(weight, tile)
    return u.to(weight.dtype) if out is None else out.copy_(u)


def check(weight: Tensor, tile: int = 2) -> tuple[tuple[int, ...]]:
    _check.activation("winograd_weight", "weight", weight, "KCRR")
    K, C, *taps = weight.shape
    if taps != [3, 3]:
        raise OpError(f"winograd_weight: weight must have 3 x 3 taps, not {_check.show(weight)}")
    if type(tile) is not int:
        _check.kind("winograd_weight", "tile", tile, "int")
    if tile not in G:
        raise OpError(f"winograd_weight: tile must be 2 or 4, not {_check.show(tile).removeprefix('int ')}")
    return (((tile + 2) ** 2, K, C),)


def cost(weight: Tensor, tile: int = 2) -> Cost:
    pairs, t = weight.shape[0] * weight.shape[1], tile + 2
    return Cost(pairs * (9 + t * t) * weight.element_size(), pairs * 6 * t * (3 + t))


@kernel
def _three(a: tl.tensor, b: tl.tensor, c: tl.tensor, G: tl.constexpr, i: tl.constexpr) -> tl.tensor:
    return a * G[3 * i] + b * G[3 * i + 1] + c * G[3 * i + 2]


@kernel
def _kernel(
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.tensor,
    C: tl.tensor,
    k_step: tl.tensor,
    c_step: tl.tensor,
    r_step: tl.tensor,
    s_step: tl.tensor,
    G: tl.constexpr,
    TAPS: tl.constexpr,
    KB: tl.constexpr,
    CB: tl.constexpr,
) -> None:
    columns = tl.cdiv(C, CB)
    k = tl.program_id(0) // columns * KB + tl.arange(0, KB)
    c = tl.program_id(0) % columns * CB + tl.arange(0, CB)
    mask = (k < K)[:, None] & (c < C)[None, :]
    source = weight_ptr + k.to(tl.int64)[:, None] * k_step + c.to(tl.int64)[None, :] * c_step
    target = out_ptr + k.to(tl.int64)[:, None] * C + c[None, :]
    w: tl.tuple = ()
    for r in tl.static_range(3):
        for s in tl.static_range(3):
            w += (tl.load(source + r * r_step + s * s_step, mask=mask, other=0.0).to(tl.float32),)
    plane = K.to(tl.int64) * C
    for i in tl.static_range(TAPS):
        a = _three(w[0], w[3], w[6], G, i)
        b = _three(w[1], w[4], w[7], G, i)
        d = _three(w[2], w[5], w[8], G, i)
        for j in tl.static_range(TAPS):
            u = _three(a, b, d, G, j).to(out_ptr.dtype.element_ty)
            tl.store(target + (i * TAPS + j) * plane, u, mask=mask)


_BLOCK: Final = {"KB": 4, "CB": 64}


def flat(rows: Any) -> tuple[float, ...]:
    """A matrix as a kernel takes it: row after row."""
    return tuple(float(value) for row in rows for value in row)


def builds() -> list[Build]:
    made = []
    for name, dtype, tile in (("f2-bf16", torch.bfloat16, 2), ("f4-fp32", torch.float32, 4)):
        types = dict.fromkeys(("weight_ptr", "out_ptr"), _rows.POINTERS[dtype])
        made.append(Build.of(name, _kernel, types, {"G": flat(G[tile]), "TAPS": tile + 2, **_BLOCK}, 4, "no-spill"))
    return made


def limit(weight: Tensor, tile: int = 2) -> str:
    del tile
    K, C = weight.shape[:2]
    return f"{K} x {C} channels are too many" if max(K, C, -(-K // 4) * -(-C // 64)) > 2**31 - 65 else ""


def _case(name: str, K: int, C: int, tile: int, *tags: str, layout: str = "dense") -> Case:
    kwargs = () if tile == 2 else (("tile", tile),)
    return Case(name, (T((K, C, 3, 3), layout, std=(9 * C) ** -0.5),), tags or ("small",), kwargs)


CASES = (
    _case("small", 6, 16, 2),
    _case("tile-4", 6, 16, 4),
    _case("odd", 5, 67, 2, "small", "odd"),
    _case("odd-4", 3, 1, 4, "small", "odd"),
    _case("channels-last", 6, 16, 2, "small", "strided", layout="channels_last"),
    _case("transposed", 6, 16, 4, "small", "strided", layout="transposed"),
    _case("inside", 6, 16, 2, "small", "strided", layout="inside"),
    _case("gapped", 6, 16, 4, "small", "strided", layout="gapped"),
    _case("empty", 0, 16, 2, "small", "empty"),
    _case("vae-512", 512, 512, 2, "real"),
    _case("vae-128-4", 128, 128, 4, "real", layout="channels_last"),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    fits=Tensor.is_contiguous,
)
def winograd_weight(weight: Tensor, tile: int = 2, *, out: Tensor | None = None) -> Tensor:
    """G weight[K,C,3,3] G^T -> [(tile + 2)^2, K, C], what winograd_conv2d takes."""
    assert out is not None
    K, C = weight.shape[:2]
    grid = (_rows.cdiv(K, _BLOCK["KB"]) * _rows.cdiv(C, _BLOCK["CB"]),)
    constexprs: dict[str, Any] = {"G": flat(G[tile]), "TAPS": tile + 2, **_BLOCK}
    _kernel[grid](weight, out, K, C, *weight.stride(), **constexprs, num_warps=4, enable_fp_fusion=True)
    return out
