"""How long the rows of codes are, and how far rows of two agree: what bounds products with them (see row_bounds).

    y[0, n] = sum_k w[n, k]^2           and with v:  y[1, n] = sum_k v[n, k]^2,  y[2, n] = sum_k w[n, k] v[n, k]

w = weight[N, K], v = other[N, K] or None, e4m3; y fp32 [1, N], [3, N] with v. The scales of the codes are left to the
caller. Summed in fp32; a row that holds a NaN gives NaN.
A transformer's weights are read for it at the start of each run, so it reads them once: torch, which has no sums of
e4m3, writes and reads them in bf16 or fp32 first, 13 ms a run of FLUX.1-dev on an H200.
Bytes: w and v read. FLOPs: 2 N K, 6 N K with v. Exactness: reordered.
Source: the inequality of Cauchy and Schwarz, which needs the first, and what is left of it where rows differ.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _check, _fp8, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case
from fusedit.ops._fp8 import from_e4m3
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import cdiv, places
from fusedit.ops._scaled import codes
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
ROWS: Final = 8
BLOCK: Final = 512
_AT_ONCE: Final = 4096
"""Rows that plain torch widens at once: what it takes stays small beside a model."""


def reference(weight: Tensor, other: Tensor | None = None) -> Tensor:
    weight = wide(weight)
    if other is None:
        return (weight * weight).sum(1)[None]
    other = wide(other)
    return torch.stack([(weight * weight).sum(1), (other * other).sum(1), (weight * other).sum(1)])


def plain(weight: Tensor, other: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    parts = [torch.split(t, _AT_ONCE) for t in (weight, other) if t is not None]
    made = torch.cat([reference(*each) for each in zip(*parts, strict=True)], dim=1)
    return made if out is None else out.copy_(made)


def check(weight: Tensor, other: Tensor | None = None) -> tuple[tuple[int, ...]]:
    _check.fp8("row_dots", "weight", weight, "NK")
    if other is not None:
        _check.like("row_dots", "other", other, weight)
    return ((1 if other is None else 3, weight.shape[0]),)


def cost(weight: Tensor, other: Tensor | None = None) -> Cost:
    N, K = weight.shape
    if other is None:
        return Cost(weight.nbytes + 4 * N, 2 * N * K)
    return Cost(weight.nbytes + other.nbytes + 12 * N, 6 * N * K)


def reads(weight: Tensor, other: Tensor | None = None) -> tuple[Tensor, ...]:
    return (weight[:0], weight) if other is None else (weight[:0], weight, other)  # the result may lie on none


@kernel
def _kernel(
    w_ptr: tl.tensor,
    v_ptr: tl.tensor,
    y_ptr: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    w_item: tl.tensor,
    w_row: tl.tensor,
    v_item: tl.tensor,
    v_row: tl.tensor,
    y_row: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    BOTH: tl.constexpr,
) -> None:
    """K and strides of w and v in units of VEC."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ww = tl.zeros((ROWS, BLOCK), tl.float32)
    vv = tl.zeros((ROWS, BLOCK), tl.float32)
    wv = tl.zeros((ROWS, BLOCK), tl.float32)
    zero = tl.program_id(1).to(tl.int64)
    for start in range(0, K * VEC, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = (rows < N)[:, None] & (cols < K * VEC)[None, :]
        w = from_e4m3(tl.load(places(w_ptr, zero, rows, cols, w_item, w_row, VEC), mask=mask, other=0.0))
        ww += w * w
        if BOTH:
            v = from_e4m3(tl.load(places(v_ptr, zero, rows, cols, v_item, v_row, VEC), mask=mask, other=0.0))
            vv += v * v
            wv += w * v
    y = y_ptr + rows
    tl.store(y, tl.sum(ww, axis=1), mask=rows < N)
    if BOTH:
        tl.store(y + y_row, tl.sum(vv, axis=1), mask=rows < N)
        tl.store(y + 2 * y_row, tl.sum(wv, axis=1), mask=rows < N)


def builds() -> list[Build]:
    types = {"w_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", "y_ptr": "*fp32"}
    made = []
    for name, vec, both in (("one-bf16", 16, False), ("two-bf16", 16, True), ("unaligned", 1, True)):
        flags = {"ROWS": ROWS, "BLOCK": BLOCK, "VEC": vec, "BOTH": both}
        made.append(Build.of(name, _kernel, types, flags, 4, "no-spill", capability=_fp8.CAPABILITY))
    return made


def limit(weight: Tensor, *_: Any, **__: Any) -> str:
    return _fp8.limit(weight)


def fits(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


CASES = (
    Case("small", (codes(9, 64),)),
    Case("both", (codes(9, 64), codes(9, 64))),
    Case("long", (codes(3, 1300), codes(3, 1300))),
    Case("odd", (codes(11, 50), codes(11, 50)), ("small", "odd")),
    Case("one-input", (codes(5, 1),), ("small", "odd")),
    Case("sliced", (codes(9, 64, layout="sliced"), codes(9, 64)), ("small", "strided")),
    Case("offset", (codes(9, 64, layout="offset"), codes(9, 64)), ("small", "strided")),
    Case("transposed", (codes(9, 64, layout="transposed"), codes(9, 64)), ("small", "strided")),
    Case("empty", (codes(0, 64), codes(0, 64)), ("small", "empty")),
    Case("flux", (codes(12288, 3072),), ("real",)),
    Case("z-image", (codes(10240, 3840), codes(10240, 3840)), ("real",)),
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
    fits=fits,
    dtypes=(torch.float32,),
    mixed=True,
)
def row_dots(weight: Tensor, other: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """weight[N,K], other[N,K] e4m3 -> squared lengths of the rows of weight [1,N]; with other theirs too, and their
    products [3,N]."""
    assert out is not None
    N, K = weight.shape
    w = _rows.inner(weight)
    v = w if other is None else _rows.inner(other)
    vec = _rows.vector(K, w, v)
    _kernel[(cdiv(N, ROWS),)](
        w,
        v,
        out,
        N,
        K // vec,
        *_rows.steps(w[None], vec),
        *_rows.steps(v[None], vec),
        out.stride(0),
        ROWS=ROWS,
        BLOCK=BLOCK,
        VEC=vec,
        BOTH=other is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
