"""The second half of low-rank terms, for products that do not take them: added to what the product gave.

    z[..., n] = y[..., n] + x_scale[...] weight_scale[n] low[..., n]        without scales: y + low
    low[..., n] = sum_r t[..., p R + r] up[n, r]                            parts p of columns as _low_rank.py says

y[..., N], z like y fp16, bf16 or fp32; t[..., P R], up[N, R] of one floating dtype; x_scale[...] and weight_scale[N]
fp32, both or neither: those of a product of e4m3, whose term lies before its scales. z may lie on y. Accumulated in
fp32, rounded once, one pass for all layers that are packed in y.
Bytes: y read and written, t, up and scales read. FLOPs: 2 M N R.
Exactness: reordered.
Source: Hu et al. 2021 (LoRA), whose B is `up`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _low_rank, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import cdiv, places
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
BM: Final = 64
BN: Final = 64
BR: Final = 32
WARPS: Final = (4, 8)
"""Where rows are on 16 bytes, and where they are not, which takes more registers an element."""


def reference(
    y: Tensor,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:
    y, t, up, x_scale, weight_scale = wide(y, t, up, x_scale, weight_scale)
    low = _low_rank.low_rank(t, up, part)
    if x_scale is not None and weight_scale is not None:
        low = low * x_scale[..., None] * weight_scale
    return y + low


def plain(
    y: Tensor,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    made = reference(y, t, up, part, x_scale, weight_scale)
    return made.to(y.dtype) if out is None else out.copy_(made)


def check(
    y: Tensor,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[torch.Size]:
    _check.activation("add_low_rank", "y", y, "." * max(2, getattr(y, "ndim", 2)))
    N = y.shape[-1]
    if t is None or up is None:
        raise OpError("add_low_rank: t and up must be tensors, not None")
    _low_rank.check("add_low_rank", y, N, t, up, part)
    if (x_scale is None) is not (weight_scale is None):
        raise OpError("add_low_rank: x_scale and weight_scale are given together or not at all")
    if x_scale is not None:
        _check.like("add_low_rank", "x_scale", x_scale, y, y.shape[:-1], torch.float32)
        _check.like("add_low_rank", "weight_scale", weight_scale, y, (N,), torch.float32)
    return (y.shape,)


def cost(
    y: Tensor,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Cost:
    del part
    return Cost(2 * y.nbytes + _low_rank.nbytes(t, up, x_scale, weight_scale), _low_rank.flops(y, up))


def limit(y: Tensor, t: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and t.dtype is torch.bfloat16:
        return "triton's interpreter cannot multiply bfloat16"
    if t.dtype is torch.float64:
        return "no kernels for float64"
    if y.ndim > 3:
        return f"takes two or three dimensions, not {y.ndim}"
    return f"{y.shape[-1]} columns are more than {BN * 65535}" if y.shape[-1] > BN * 65535 else ""


@kernel
def _kernel(
    y_ptr: tl.tensor,
    t_ptr: tl.tensor,
    up_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    z_ptr: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    R: tl.tensor,
    part: tl.tensor,
    last: tl.tensor,
    y_batch: tl.tensor,
    y_row: tl.tensor,
    z_batch: tl.tensor,
    z_row: tl.tensor,
    t_batch: tl.tensor,
    t_row: tl.tensor,
    up_item: tl.tensor,
    up_row: tl.tensor,
    scale_batch: tl.tensor,
    scale_row: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    VEC: tl.constexpr,
    LOW: tl.constexpr,
    SCALED: tl.constexpr,
    SHORT: tl.constexpr,
) -> None:
    """SHORT: no more than BR ranks, and a tile's columns are of one part: all loads are on their way at once.

    N and strides of y and z in units of VEC, R and strides of t and up in units of LOW; up_item is 0, which the
    compiler must not know, or it would forget how addresses are aligned."""
    per_item = tl.cdiv(S, BM)
    b = (tl.program_id(0) // per_item).to(tl.int64)
    rows = tl.program_id(0) % per_item * BM + tl.arange(0, BM)
    start = tl.program_id(1) * BN
    cols = start + tl.arange(0, BN)
    mask = (rows < S)[:, None] & (cols < N * VEC)[None, :]
    y = tl.load(places(y_ptr, b, rows, cols, y_batch, y_row, VEC), mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros((BM, BN), tl.float32)
    if SHORT:
        r = tl.arange(0, BR)
        inside = (r < R * LOW)[None, :]
        first = t_ptr + tl.minimum(start // part, last) * R * LOW
        t = tl.load(places(first, b, rows, r, t_batch, t_row, LOW), mask=(rows < S)[:, None] & inside, other=0.0)
        up = tl.load(
            places(up_ptr, b, cols, r, up_item, up_row, LOW), mask=(cols < N * VEC)[:, None] & inside, other=0.0
        )
        acc = tl.dot(t, up.T, acc, input_precision="ieee")
    else:
        own = tl.minimum(cols // part, last)
        for p in range(tl.minimum(start // part, last), tl.minimum((start + BN - 1) // part, last) + 1):
            mine = ((own == p) & (cols < N * VEC))[:, None]
            for step in range(tl.cdiv(R * LOW, BR)):
                r = step * BR + tl.arange(0, BR)
                inside = (r < R * LOW)[None, :]
                t = tl.load(
                    places(t_ptr + p * R * LOW, b, rows, r, t_batch, t_row, LOW),
                    mask=(rows < S)[:, None] & inside,
                    other=0.0,
                )
                up = tl.load(places(up_ptr, b, cols, r, up_item, up_row, LOW), mask=mine & inside, other=0.0)
                acc = tl.dot(t, up.T, acc, input_precision="ieee")
    if SCALED:
        x_scale = tl.load(x_scale_ptr + b * scale_batch + rows.to(tl.int64) * scale_row, mask=rows < S, other=0.0)
        acc *= x_scale[:, None] * tl.load(weight_scale_ptr + cols, mask=cols < N * VEC, other=0.0)[None, :]
    z = (y + acc).to(z_ptr.dtype.element_ty)
    tl.store(places(z_ptr, b, rows, cols, z_batch, z_row, VEC), z, mask=mask)


def _constexprs(vec: int, low: int, scaled: bool, short: bool) -> dict[str, Any]:
    return {"BM": BM, "BN": BN, "BR": BR, "VEC": vec, "LOW": low, "SCALED": scaled, "SHORT": short}


def builds() -> list[Build]:
    made = []
    for name, dtype, vec, scaled, short in (
        ("short-bf16", torch.bfloat16, 8, False, True),
        ("scaled-short-bf16", torch.bfloat16, 8, True, True),
        ("bf16", torch.bfloat16, 8, False, False),
        ("scaled-bf16-long", torch.bfloat16, 8, True, False),
        ("bf16-unaligned", torch.bfloat16, 1, False, False),
        ("fp32", torch.float32, 4, False, False),
    ):
        types = dict.fromkeys(("y_ptr", "t_ptr", "up_ptr", "z_ptr"), _rows.POINTERS[dtype])
        types |= {"x_scale_ptr": "*fp32", "weight_scale_ptr": "*fp32"}
        traits = ("no-spill",) if dtype is torch.bfloat16 else ()
        made.append(
            Build.of(name, _kernel, types, _constexprs(vec, vec, scaled, short), WARPS[vec == 1], *traits, num_stages=2)
        )
    return made


_Y, _REAL = (2, 5, 96), ("real",)
_low = _low_rank.rank


def _scales(*shape: int, layout: str = "dense") -> tuple[T, T]:
    made = (
        T(s, kind, dtype=torch.float32, fill="positive") for s, kind in ((shape[:-1], layout), (shape[-1:], "dense"))
    )
    return next(made), next(made)


def _on_y(y: Tensor, *_: Any) -> Tensor:
    return y


CASES = (
    Case("small", (T(_Y), *_low(_Y, 96, 8)), alias=_on_y),
    Case("rows", (T((7, 96)), *_low((7, 96), 96, 40))),
    Case("many-ranks", (T((2, 5, 512)), *_low((2, 5, 512), 512, 40, 3), 128), alias=_on_y),
    Case("parts", (T((2, 5, 512)), *_low((2, 5, 512), 512, 8, 3), 128), alias=_on_y),
    Case("parts-in-a-tile", (T(_Y), *_low(_Y, 96, 8, 3), 16)),
    Case("scaled", (T(_Y), *_low(_Y, 96, 8), 0, *_scales(*_Y)), alias=_on_y),
    Case("scaled-parts", (T(_Y), *_low(_Y, 96, 8, 2), 48, *_scales(*_Y, layout="joint"))),
    Case("odd", (T((1, 3, 35)), *_low((1, 3, 35), 35, 3, 2), 11), ("small", "odd")),
    Case("joint", (T(_Y, "joint"), *_low(_Y, 96, 8)), ("small", "strided")),
    Case("sliced", (T(_Y, "sliced"), *_low(_Y, 96, 8)), ("small", "strided")),
    Case("offset", (T(_Y, "offset"), *_low(_Y, 96, 8)), ("small", "strided")),
    Case("transposed", (T(_Y, "transposed"), T((2, 5, 8), "transposed"), T((96, 8), "gapped")), ("small", "strided")),
    Case("fp32-term", (T(_Y), *_low(_Y, 96, 8, dtype=torch.float32)), ("small", "mixed")),
    Case("empty", (T((2, 0, 96)), *_low((2, 0, 96), 96, 8)), ("small", "empty")),
    Case("flux-text", (T((1, 512, 3072), "joint"), *_low((1, 512, 3072), 3072, 32)), _REAL),
    Case("flux-single-out", (T((1, 4608, 3072)), *_low((1, 4608, 3072), 3072, 32)), _REAL),
    Case("flux-qkv-fp8", (T((1, 512, 9216)), *_low((1, 512, 9216), 9216, 32, 3), 3072, *_scales(1, 512, 9216)), _REAL),
    Case("z-image-128", (T((2, 4128, 3840)), *_low((2, 4128, 3840), 3840, 128)), _REAL),
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
    reads=lambda y, *args, **kwargs: (y, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))),
    mixed=True,
)
def add_low_rank(
    y: Tensor,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """y[..., N] + t[..., P R] @ up[N, R]^T part by part, times x_scale[...] and weight_scale[N] where given -> z."""
    assert out is not None
    z = out
    if y.ndim == 2:
        y, t, z = y[None], t[None], z[None]
        x_scale = None if x_scale is None else x_scale[None]
    B, S, N = y.shape
    R = up.shape[1]
    y, t, up = _rows.inner(y), _rows.inner(t), _rows.inner(up)
    vec, low = _rows.vector(N, y, z), _rows.vector(R, t, up)
    if min(vec, low) == 1:
        vec = low = 1
    scales = (y, y) if x_scale is None or weight_scale is None else (x_scale, weight_scale.contiguous())
    parts = t.shape[2] // R
    _kernel[(B * cdiv(S, BM), cdiv(N, BN))](
        y,
        t,
        up,
        *scales,
        z,
        S,
        N // vec,
        R // low,
        part if parts > 1 else N,
        parts - 1,
        *_rows.steps(y, vec),
        *_rows.steps(z, vec),
        *_rows.steps(t, low),
        *_rows.steps(up[None], low),
        *((0, 0) if x_scale is None else _rows.steps(x_scale[..., None], 1)),
        **_constexprs(vec, low, x_scale is not None, R <= BR and (parts == 1 or part % BN == 0)),
        num_warps=WARPS[vec == 1],
        num_stages=2,
        enable_fp_fusion=True,
    )
    return out


def make_ready(y: Tensor, dtype: torch.dtype, *, scaled: bool = False) -> None:
    """Compile what terms in dtype need beside results [..., N] like y, at any rank; with scales or without."""
    y = y.new_zeros(1, 1, BN)
    scales = [torch.ones(shape, dtype=torch.float32, device=y.device) if scaled else None for shape in ((1, 1), (BN,))]
    for ranks in (8, BR + 8):
        t, up = (torch.zeros(shape, dtype=dtype, device=y.device) for shape in ((1, 1, ranks), (BN, ranks)))
        add_low_rank(y, t, up, 0, *scales, out=y)
