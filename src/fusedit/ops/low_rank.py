"""The first half of low-rank terms: what LoRA's small matrices make of activations, for all layers that read them.

    t[..., p] = scale[p] * sum_k x[..., k] down[p, k]

x[..., K] fp16, bf16, fp32 or e4m3 (codes, whose own scales are left to the product that takes t); down[P, K], the
matrices of several layers and adapters one below the other; scale[P] fp32; t[..., P] in the dtype of down, which is
that of x unless x is e4m3. Accumulated in fp32, scaled, rounded once.
Few columns of a long sum: x is read once, in tiles of 64 rows; where these are too few for the multiprocessors, the sum
is cut into pieces, whose fp32 results a second pass adds in a fixed order. In fp32 itself every PART numbers have a sum
of their own: one chain of thousands would be further from the truth than cuBLAS is.
Bytes: x and down read, t written. FLOPs: 2 M P K. Memory: 4 M P a piece; several, which only few rows make (`pieces`),
are 17 MB together at most on an H200, and stay in L2.
Exactness: reordered.
Source: Hu et al. 2021 (LoRA), whose A is `down`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _fp8, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import E4M3, from_e4m3
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import cdiv, places
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
ROWS: Final = 64
WIDTHS: Final = (32, 128)
"""Columns of a tile: variants of the kernel, both of which `make_ready` compiles."""
PART: Final = 256
"""Products of fp32 in a chain."""
ADD: Final = 1024
"""Elements of a program of the second pass."""


def reference(x: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    x, down, scale = wide(x, down, scale)
    return (x @ down.T) * scale


def plain(x: Tensor, down: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    made = F.linear(x, down).mul_(scale) if x.dtype is down.dtype else reference(x, down, scale).to(down.dtype)
    return made if out is None else out.copy_(made)


def check(x: Tensor, down: Tensor, scale: Tensor) -> tuple[tuple[int, ...]]:
    codes = getattr(x, "dtype", None) is E4M3
    (_check.fp8 if codes else _check.activation)("low_rank", "x", x, "..")
    if x.ndim > 3:
        raise OpError(f"low_rank: x must be [S, K] or [B, S, K], not {_check.show(x)}; flatten its first dimensions")
    _check.activation("low_rank", "down", down, "PK")
    P = down.shape[0]
    _check.like("low_rank", "down", down, x, (P, x.shape[-1]), down.dtype if codes else None)
    _check.like("low_rank", "scale", scale, x, (P,), torch.float32)
    return ((*x.shape[:-1], P),)


def cost(x: Tensor, down: Tensor, scale: Tensor) -> Cost:
    count, P = x.numel() // max(1, x.shape[-1]), down.shape[0]
    return Cost(x.nbytes + down.nbytes + scale.nbytes + count * P * down.element_size(), 2 * count * down.numel())


def dtypes(x: Tensor, down: Tensor, scale: Tensor) -> tuple[torch.dtype]:
    del x, scale
    return (down.dtype,)


def limit(x: Tensor, down: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and down.dtype is torch.bfloat16:
        return "triton's interpreter cannot multiply bfloat16"
    if down.dtype is torch.float64:
        return "no kernels for float64"
    return (_fp8.limit(x) if x.dtype is E4M3 else "") or _rows_limit(x)


def _rows_limit(x: Tensor) -> str:
    """Rows and pieces are numbers of 32 bits."""
    return f"{x.numel()} elements are more than {2**40}" if x.numel() > 2**40 else ""


def reads(x: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return x[:0], x, down, scale  # the result may lie on none


@kernel
def _pieces(
    x_ptr: tl.tensor,
    down_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    B: tl.tensor,
    S: tl.tensor,
    K: tl.tensor,
    P: tl.tensor,
    each: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    down_item: tl.tensor,
    down_row: tl.tensor,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    CODES: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """sums [pieces, B, S, P]: of `each` steps of BK a piece; K and strides in units of VEC; down_item is 0, which the
    compiler must not know, or it would forget how addresses are aligned."""
    per_item = tl.cdiv(S, BM)
    b = (tl.program_id(0) // per_item).to(tl.int64)
    rows = tl.program_id(0) % per_item * BM + tl.arange(0, BM)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    piece = tl.program_id(2)
    acc = tl.zeros((BM, BP), tl.float32)
    whole = tl.zeros((BM, BP), tl.float32)
    first = piece * each
    for step in range(first, tl.minimum(first + each, tl.cdiv(K * VEC, BK))):
        cols = step * BK + tl.arange(0, BK)
        inside = (cols < K * VEC)[None, :]
        x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=(rows < S)[:, None] & inside, other=0.0)
        w = tl.load(places(down_ptr, b, p, cols, down_item, down_row, VEC), mask=(p < P)[:, None] & inside, other=0.0)
        if CODES:
            x = from_e4m3(x).to(w.dtype)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if PART:
            ends = (step - first + 1) % (PART // BK) == 0
            whole += tl.where(ends, acc, 0.0)
            acc = tl.where(ends, 0.0, acc)
    if PART:
        acc += whole
    at = ((piece * B + b) * S + rows.to(tl.int64)) * P
    tl.store(sums_ptr + at[:, None] + p[None, :], acc, mask=(rows < S)[:, None] & (p < P)[None, :])


@kernel
def _sum(
    sums_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    t_ptr: tl.tensor,
    pieces: tl.tensor,
    B: tl.tensor,
    S: tl.tensor,
    P: tl.tensor,
    t_batch: tl.tensor,
    t_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    count = B.to(tl.int64) * S * P
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(sums_ptr + piece * count + at, mask=inside, other=0.0)
    p, row = at % P, at // P
    total *= tl.load(scale_ptr + p, mask=inside, other=0.0)
    to = row // S * t_batch + row % S * t_row + p
    tl.store(t_ptr + to, total.to(t_ptr.dtype.element_ty), mask=inside)


def _constexprs(x: torch.dtype, width: int, vec: int) -> dict[str, Any]:
    step = 64 if width > WIDTHS[0] else 128 // x.itemsize  # 128 bytes of a row, where shared memory allows
    flags = {"CODES": x is E4M3, "PART": PART if x is torch.float32 else 0}
    return {"BM": ROWS, "BP": width, "BK": min(step, 128 // x.itemsize), "VEC": vec, **flags}


def builds() -> list[Build]:
    made = []
    for name, dtype, width, vec in (
        ("bf16", torch.bfloat16, 32, 8),
        ("wide-bf16", torch.bfloat16, 128, 8),
        ("bf16-unaligned", torch.bfloat16, 32, 1),
        ("fp32", torch.float32, 32, 4),
        ("wide-fp32", torch.float32, 128, 4),
        ("e4m3-bf16", E4M3, 32, 16),
        ("e4m3-wide-bf16", E4M3, 128, 16),
        ("e4m3-unaligned", E4M3, 32, 1),
    ):
        other = torch.bfloat16 if dtype is E4M3 else dtype
        types = {
            "x_ptr": "*fp8e4nv" if dtype is E4M3 else _rows.POINTERS[dtype],
            "down_ptr": _rows.POINTERS[other],
            "sums_ptr": "*fp32",
        }
        least = _fp8.CAPABILITY if dtype is E4M3 else 0
        traits, flags = ("no-spill",) if vec == 8 else (), _constexprs(dtype, width, vec)
        made.append(
            Build.of(name, _pieces, types, flags, _warps(width), *traits, num_stages=_stages(dtype), capability=least)
        )
    types = {"sums_ptr": "*fp32", "scale_ptr": "*fp32", "t_ptr": "*bf16"}
    return [*made, Build.of("sum-bf16", _sum, types, {"BLOCK": ADD}, 4, "no-spill")]


def _warps(width: int) -> int:
    return 4 if width == WIDTHS[0] else 8


def _stages(x: torch.dtype) -> int:
    """Three steps of 24 KiB at most: they fit where a program may have 99 KiB, and two programs into 227."""
    return 2 if x is torch.float32 else 3


_REAL = ("real",)


def _args(shape: tuple[int, ...], P: int, layout: str = "dense", down: str = "dense") -> tuple[T, ...]:
    return T(shape, layout), T((P, shape[-1]), down, std=shape[-1] ** -0.5), _scale(P)


def _coded(shape: tuple[int, ...], P: int, layout: str = "dense", down: torch.dtype = torch.float32) -> tuple[T, ...]:
    matrix = T((P, shape[-1]), dtype=down, std=shape[-1] ** -0.5)
    return T(shape, layout, dtype=E4M3, std=100.0), matrix, _scale(P)


def _scale(P: int) -> T:
    return T((P,), dtype=torch.float32, mean=0.5)


CASES = (
    Case("small", _args((2, 5, 64), 8)),
    Case("rows", _args((7, 64), 24)),
    Case("pieces", _args((1, 70, 640), 40)),
    Case("wide", _args((1, 3, 64), 264)),
    Case("one-rank", _args((2, 5, 64), 1), ("small", "odd")),
    Case("odd", _args((1, 3, 50), 11), ("small", "odd")),
    Case("one-input", _args((5, 1), 8), ("small", "odd")),
    Case("joint", _args((2, 5, 64), 16, "joint"), ("small", "strided")),
    Case("sliced", _args((2, 5, 64), 16, "sliced", "sliced"), ("small", "strided")),
    Case("offset", _args((2, 5, 64), 16, "offset", "offset"), ("small", "strided")),
    Case("transposed", _args((2, 5, 64), 16, "transposed", "transposed"), ("small", "strided")),
    Case("codes", _coded((2, 5, 64), 8)),
    Case("codes-pieces", _coded((1, 70, 1300), 40)),
    Case("codes-half", _coded((2, 5, 64), 8, down=torch.float16)),
    Case("codes-odd", _coded((1, 3, 50), 11), ("small", "odd")),
    Case("codes-joint", _coded((2, 5, 64), 16, "joint"), ("small", "strided")),
    Case("codes-sliced", _coded((2, 5, 64), 16, "sliced"), ("small", "strided")),
    Case("empty", _args((2, 0, 64), 8), ("small", "empty")),
    Case("empty-ranks", _args((2, 5, 64), 0), ("small", "empty")),
    Case("flux-qkv", _args((1, 4096, 3072), 96, "joint"), _REAL),
    Case("flux-text", _args((2, 512, 3072), 96, "joint"), _REAL),
    Case("flux-single", _args((1, 4608, 3072), 128), _REAL),
    Case("flux-single-out", _args((1, 4608, 15360), 32), _REAL),
    Case("flux-single-128", _args((1, 4608, 3072), 512), _REAL),
    Case("flux-single-fp8", _coded((1, 4608, 3072), 128, down=torch.bfloat16), _REAL),
    Case("flux-single-out-fp8", _coded((1, 4608, 15360), 32, down=torch.bfloat16), _REAL),
    Case("flux-text-out-fp8", _coded((1, 512, 12288), 32, down=torch.bfloat16), _REAL),
    Case("z-image-qkv", _args((1, 4320, 3840), 96), _REAL),
    Case("z-image-out-fp8", _coded((1, 4320, 10240), 32, down=torch.bfloat16), _REAL),
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
    reads=reads,
    dtypes=dtypes,
    mixed=True,
)
def low_rank(x: Tensor, down: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[..., K] @ down[P, K]^T * scale[P] -> t[..., P] in the dtype of down; x may be e4m3."""
    assert out is not None
    run(x, down, scale, out, width_for(down))
    return out


def width_for(down: Tensor) -> int:
    """Columns of a tile for down[P, K]."""
    return WIDTHS[0] if down.shape[0] <= WIDTHS[0] else WIDTHS[1]


def run(x: Tensor, down: Tensor, scale: Tensor, out: Tensor, width: int) -> None:
    """Both passes, in tiles of so many columns."""
    if x.ndim == 2:
        x, out = x[None], out[None]
    B, S, K = x.shape
    P = down.shape[0]
    x, down = _rows.inner(x), _rows.inner(down)
    vec = _rows.vector(K, x, down)
    constexprs = _constexprs(x.dtype, width, vec)
    count = pieces(x, down, width)
    each = cdiv(cdiv(K, constexprs["BK"]), count)
    sums = torch.empty(count * B * S * P, dtype=torch.float32, device=x.device)
    _pieces[(B * cdiv(S, ROWS), cdiv(P, width), count)](
        x,
        down,
        sums,
        B,
        S,
        K // vec,
        P,
        each,
        *_rows.steps(x, vec),
        *_rows.steps(down[None], vec),
        **constexprs,
        num_warps=_warps(width),
        num_stages=_stages(x.dtype),
        enable_fp_fusion=True,
    )
    t_batch, t_row = _rows.steps(out, 1)
    _sum[(cdiv(B * S * P, ADD),)](
        sums,
        scale.contiguous(),
        out,
        count,
        B,
        S,
        P,
        t_batch,
        t_row,
        BLOCK=ADD,
        num_warps=4,
        enable_fp_fusion=True,
    )


def pieces(x: Tensor, down: Tensor, width: int) -> int:
    """How many the sums of x [B, S, K] are cut into: two programs a multiprocessor, four steps or more in each."""
    B, S, K = x.shape
    tiles = B * cdiv(S, ROWS) * cdiv(down.shape[0], width)
    steps = cdiv(K, _constexprs(x.dtype, width, 1)["BK"])
    wanted = cdiv(2 * (_rows.multiprocessors(x.device.index or 0) if x.is_cuda else 4), max(1, tiles))
    return max(1, min(wanted, steps // 4))
