"""Attention as two products and exponentials, for head sizes that no fused kernel takes.

    p[s, t] = exp(scale q[s] . k[t] - a level of row s)            o[s] = sum_t p[s, t] v[t] / sum_t p[s, t]

Logits in fp32 as the first product leaves them; p rounded to the dtype for the second product, and not for the sum, as
in every fused kernel. On Hopper in bf16 the first product's own epilogue takes the exponentials (_attention_scores);
elsewhere the library's writes its logits, and a kernel reads them again. The second product is the library's.
H200, one head of 512 and 16,384 tokens in bf16: 0.92 ms (1.33 the other way); the memory-efficient kernel 3.66. A tile
of a fused kernel would have to hold 512 columns of the result besides the logits: half of a multiprocessor's registers
for 64 queries.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from fusedit.ops import _attention_scores, _rows
from fusedit.ops._build import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
_QUERIES: Final = 4096
"""Queries at a time, so that the second product fills the chip: with 1024 of them it has 32 tiles for 132
multiprocessors. Before the merged product an H200 took 1.75, 1.61, 1.50 and 1.45 ms with 1024, 2048, 4096 and 8192 of
16,384."""
_VEC: Final = 8
_CONSTEXPRS: Final = {"BLOCK": 16384, "PART": 4096, "VEC": _VEC}


@kernel
def _exponentials(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    T: tl.tensor,
    x_row: tl.tensor,
    y_row: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """y[row, :T] = 2^(scale * x[row, :T] - its maximum) and inverse[row] = 1 / their sum; strides in units of VEC."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = tl.multiple_of(x_ptr + row * x_row * VEC, 16)
    y_ptr = tl.multiple_of(y_ptr + row * y_row * VEC, 16)
    if T <= BLOCK:  # read once, and kept in registers
        at = tl.arange(0, BLOCK)
        x = _logits(x_ptr, at, T, scale, VEC)
        y = tl.exp2(x - tl.max(x, axis=0))
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < tl.cdiv(T, VEC) * VEC)
        total = tl.sum(y, axis=0)
    else:
        most = tl.full((PART,), float("-inf"), tl.float32)
        for start in range(0, T, PART):
            most = tl.maximum(most, _logits(x_ptr, start + tl.arange(0, PART), T, scale, VEC))
        highest = tl.max(most, axis=0)
        sums = tl.zeros((PART,), tl.float32)
        for start in range(0, T, PART):
            at = start + tl.arange(0, PART)
            y = tl.exp2(_logits(x_ptr, at, T, scale, VEC) - highest)
            sums += y
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < tl.cdiv(T, VEC) * VEC)
        total = tl.sum(sums, axis=0)
    tl.store(inverse_ptr + row, 1.0 / total)


@kernel
def _logits(x_ptr: tl.tensor, at: tl.tensor, T: tl.tensor, scale: tl.tensor, VEC: tl.constexpr) -> tl.tensor:
    """-inf behind the last; the mask of the load ends at a multiple of VEC, so that 16 bytes are read at once."""
    x = tl.load(x_ptr + at, mask=at < tl.cdiv(T, VEC) * VEC, other=0.0) * scale
    return tl.where(at < T, x, float("-inf"))


def exponentials(x: Tensor, scale: float, y: Tensor, inverse: Tensor) -> None:
    """exp(scale * x - maximum of its row) for x[rows, T] in fp32 into y of any dtype, both in rows that hold eights;
    inverse[rows] of their sums, in fp32."""
    rows, T = x.shape
    strides = x.stride(0) // _VEC, y.stride(0) // _VEC
    scale *= math.log2(math.e)
    _exponentials[(rows,)](x, y, inverse, T, *strides, scale, **_CONSTEXPRS, num_warps=16, enable_fp_fusion=True)


def _matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, each row on 16 bytes and with room for a multiple of eight."""
    return torch.empty((rows, _rows.cdiv(columns, _VEC) * _VEC), dtype=dtype, device=device)[:, :columns]


def products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for q[B,S,H,D], k, v[B,T,H,D] of half precision -> [B,S,H,D] dense."""
    B, S, H, _ = q.shape
    T = k.shape[1]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = min(S, _QUERIES)
    merged = not _attention_scores.reason(q, k, scale)
    kept = _matrix(step, T, q.dtype, q.device)
    inverses = torch.empty((step, 1), dtype=torch.float32, device=q.device)
    logits = None if merged else _matrix(step, T, torch.float32, q.device)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, :, h], v[b, :, h]
            for start in range(0, S, step):
                queries = q[b, start : start + step, h]
                count = queries.shape[0]
                weights, inverse = kept[:count], inverses[:count]
                if logits is None:
                    _attention_scores.weights(queries, keys, scale, weights, inverse)
                else:
                    torch.mm(queries, keys.t(), out_dtype=torch.float32, out=logits[:count])
                    exponentials(logits[:count], scale, weights, inverse)
                rounded = o[b, start : start + step, h]
                torch.mul(torch.mm(weights, values, out_dtype=torch.float32), inverse, out=rounded)
    return o


def builds() -> list[Build]:
    types = {"x_ptr": "*fp32", "y_ptr": "*bf16", "inverse_ptr": "*fp32", "scale": "fp32"}
    own = Build.of("exponentials-bf16", _exponentials, types, _CONSTEXPRS, 16, "no-spill")
    return [own, *_attention_scores.builds()]
