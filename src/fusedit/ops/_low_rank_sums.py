"""The sums of the first half of low-rank terms: t[..., p] = scale[p] * sum_k x[..., k] down[p, k], few columns p.

x [B, S, K] and down [P, K] of one dtype: fp16, bf16, fp32 or e4m3. x is read in tiles of 64 rows. Where these are too
few for the multiprocessors the sum is cut into pieces, whose fp32 results a second pass adds in a fixed order.
Codes are multiplied as they are, at twice the rate of bf16 and without a conversion, and added with about 14 bits in
the tensor cores of compute capability 8.9 and 9.0. In fp32 itself every PART numbers have a sum of their own: one chain
of thousands would be further from the truth than cuBLAS is.
On an H200, of codes [1, 4608, 3072] 128 columns take 9 us and of [1, 4608, 15360] 32 take 22, where reading x takes 15.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _fp8, _rows
from fusedit.ops._build import Build
from fusedit.ops._fp8 import BY_HAND, E4M3, from_e4m3
from fusedit.ops._rows import cdiv, places
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
ROWS: Final = 64
WIDTHS: Final = (32, 64)
"""Columns of a tile: variants of the kernel, both of which `make_ready` compiles."""
STEP: Final = 128
"""Bytes of a row of x that are multiplied at once."""
PART: Final = 256
"""Products of fp32 in a chain."""
LEAST: Final = 16
"""Steps of a piece, below which the second pass takes longer than is gained."""
ADD: Final = 1024
"""Elements of a program of the second pass."""
_POINTERS: Final = {**_rows.POINTERS, E4M3: "*fp8e4nv"}


def limit(x: Tensor) -> str:
    """Rows and pieces are numbers of 32 bits."""
    return f"{x.numel()} elements are more than {2**40}" if x.numel() > 2**40 else ""


@kernel
def _pieces(
    x_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    to_ptr: tl.tensor,
    B: tl.tensor,
    S: tl.tensor,
    K: tl.tensor,
    P: tl.tensor,
    each: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    down_item: tl.tensor,
    down_row: tl.tensor,
    to_batch: tl.tensor,
    to_row: tl.tensor,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
    CODES: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """WHOLE: t of all of K; else sums fp32 [pieces, B, S, P], of `each` steps of BK a piece.

    K and strides of x and down in units of VEC; down_item is 0, which the compiler must not know, or it would forget
    how addresses are aligned.
    """
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
        if CODES and BY_HAND:
            x, w = from_e4m3(x), from_e4m3(w)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if PART:
            ends = (step - first + 1) % (PART // BK) == 0
            whole += tl.where(ends, acc, 0.0)
            acc = tl.where(ends, 0.0, acc)
    if PART:
        acc += whole
    mask = (rows < S)[:, None] & (p < P)[None, :]
    if WHOLE:
        acc *= tl.load(scale_ptr + p, mask=p < P, other=0.0)[None, :]
        tl.store(places(to_ptr, b, rows, p, to_batch, to_row, 1), acc.to(to_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(to_ptr + (((piece * B + b) * S + rows.to(tl.int64)) * P)[:, None] + p[None, :], acc, mask=mask)


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


def width_for(P: int) -> int:
    """Columns of a tile for P of them: wider tiles read x less often, but what is beyond P is computed for nothing."""
    return WIDTHS[-1] if P % WIDTHS[-1] == 0 else WIDTHS[0]


def pieces(x: Tensor, P: int) -> int:
    """How many the sums of x [B, S, K] are cut into: up to two programs a multiprocessor, LEAST steps in each."""
    B, S, K = x.shape
    tiles = B * cdiv(S, ROWS) * cdiv(P, width_for(P))
    count = _rows.multiprocessors(x.device.index or 0) if x.is_cuda else 4
    return max(1, min(2 * count // max(1, tiles), cdiv(K * x.element_size(), STEP) // LEAST))


def run(
    x: Tensor, down: Tensor, scale: Tensor, out: Tensor, width: int | None = None, count: int | None = None
) -> None:
    """x [B, S, K] or [S, K] -> out [..., P].

    Args:
        width: columns of a tile; None: what fits P.
        count: of pieces; None: what fills the device.
    """
    if x.ndim == 2:
        x, out = x[None], out[None]
    B, S, K = x.shape
    P = down.shape[0]
    x, down, scale = _rows.inner(x), _rows.inner(down), scale.contiguous()
    vec = _rows.vector(K, x, down)
    width = width or width_for(P)
    count = count or pieces(x, P)
    constexprs = _constexprs(x.dtype, width, vec, count == 1)
    steps = cdiv(K, constexprs["BK"])
    t_steps = _rows.steps(out, 1)
    to = out if count == 1 else torch.empty(count * B * S * P, dtype=torch.float32, device=x.device)
    _pieces[(B * cdiv(S, ROWS), cdiv(P, width), count)](
        x,
        down,
        scale,
        to,
        B,
        S,
        K // vec,
        P,
        cdiv(steps, count),
        *_rows.steps(x, vec),
        *_rows.steps(down[None], vec),
        *t_steps,
        **constexprs,
        num_warps=4,
        num_stages=_stages(x.dtype),
        enable_fp_fusion=True,
    )
    if count == 1:
        return
    _sum[(cdiv(B * S * P, ADD),)](
        to,
        scale,
        out,
        count,
        B,
        S,
        P,
        *t_steps,
        BLOCK=ADD,
        num_warps=4,
        enable_fp_fusion=True,
    )


def make_ready(x: Tensor, down: Tensor, dtype: torch.dtype) -> None:
    """Compile all that sums of x [1, S, K] and down [P, K], like these in dtype, may need at any size and rank."""
    scale = torch.zeros(down.shape[0], dtype=torch.float32, device=x.device)
    out = torch.empty((*x.shape[:-1], down.shape[0]), dtype=dtype, device=x.device)
    for width in WIDTHS:
        for count in (1, 2):
            run(x, down, scale, out, width, count)


def builds(dtype: torch.dtype) -> list[Build]:
    """Of x and down in this dtype; t in bf16 where that is e4m3."""
    codes = dtype is E4M3
    to = torch.bfloat16 if codes else dtype
    vec = 16 // dtype.itemsize
    types = dict.fromkeys(("x_ptr", "down_ptr"), _POINTERS[dtype]) | {"scale_ptr": "*fp32"}
    word = "e4m3-bf16" if codes else _rows.POINTERS[dtype].removeprefix("*")
    made = []
    for name, width, aligned, whole in (
        (word, WIDTHS[0], vec, True),
        (f"{word}-pieces", WIDTHS[0], vec, False),
        (f"wide-{word}", WIDTHS[1], vec, True),
        (f"{word}-unaligned", WIDTHS[0], 1, False),
    ):
        kept = {**types, "to_ptr": _rows.POINTERS[to] if whole else "*fp32"}
        traits = ("no-spill",) if aligned > 1 and dtype is not torch.float32 else ()
        least = _fp8.CAPABILITY if codes else 0
        flags = _constexprs(dtype, width, aligned, whole)
        made.append(Build.of(name, _pieces, kept, flags, 4, *traits, num_stages=_stages(dtype), capability=least))
    return made


def sum_build(dtype: torch.dtype) -> Build:
    """Of the second pass."""
    types = {"sums_ptr": "*fp32", "scale_ptr": "*fp32", "t_ptr": _rows.POINTERS[dtype]}
    return Build.of(f"sum-{_rows.POINTERS[dtype].removeprefix('*')}", _sum, types, {"BLOCK": ADD}, 4, "no-spill")


def _constexprs(x: torch.dtype, width: int, vec: int, whole: bool) -> dict[str, Any]:
    flags = {"WHOLE": whole, "CODES": x is E4M3, "PART": PART if x is torch.float32 else 0}
    return {"BM": ROWS, "BP": width, "BK": STEP // x.itemsize, "VEC": vec, **flags}


def _stages(x: torch.dtype) -> int:
    """Five steps of 16 KiB: they hide the way to memory where K is long, and fit where a program may have 99 KiB."""
    return 2 if x is torch.float32 else 5
