"""Rows of activations as e4m3 codes with one scale a row.

    x[b,s,k] ~ q[b,s,k] * s[b,s]                s[b,s] = max_k |x[b,s,:]| / 448, as ops/_fp8.py says
    length[b,s] = sqrt(sum_k (q[b,s,k] * s[b,s])^2)

B batch (may be missing), S tokens, K channels. x fp16, bf16 or fp32; q e4m3, s and length fp32. In fp32 in registers:
the largest value of a row, its reciprocal scale, the codes, and the sum of their squares, all from one read.
Bytes: x read, codes written, (1 + itemsize) B S K, and 8 a row. FLOPs: about 5 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small.
Source: row-wise (per token) quantisation as scaled products take it (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _fp8, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import e4m3, store_rows
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import places
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor) -> Rows:
    return _fp8.ideal(x)


def plain(x: Tensor, *, out: Rows | None = None) -> Rows:
    return cast(Rows, _fp8.delivered(_fp8.quantized(x), x, out))


def check(x: Tensor) -> tuple[torch.Size, ...]:
    accept("quantize_rows", x)
    return _fp8.shapes(x)


def accept(name: str, x: Tensor) -> None:
    _check.activation(name, "x", x, "..")
    if x.ndim > 3:
        raise OpError(f"{name}: x must be [S, K] or [B, S, K], not {_check.show(x)}; flatten its first dimensions")
    _check.filled(name, "x", x)


def cost(x: Tensor) -> Cost:
    return Cost(x.nbytes + x.numel() + 8 * x[..., 0].numel(), 5 * x.numel())


@kernel
def _kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    s_ptr: tl.tensor,
    length_ptr: tl.tensor,
    S: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    s_batch: tl.tensor,
    length_batch: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    if GIVEN:
        s = tl.load(s_ptr + b * s_batch + rows, mask=rows < S, other=1.0)
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
        q = e4m3(x * tl.div_rn(1.0, s)[:, None])
        tl.store(places(q_ptr, b, rows, cols, q_batch, q_row, VEC), q, mask=mask)
    else:
        to = (q_ptr, q_batch, q_row, s_ptr, s_batch, length_ptr, length_batch)
        store_rows(x, mask, b, rows, cols, S, *to, VEC)


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "q_ptr", {"GIVEN": False})


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    return _fp8.row_limit(x if x.ndim == 3 else x[None])


CASES = (
    Case("small", (T((2, 5, 64)),)),
    Case("two-dimensions", (T((7, 64), std=1e-4),)),
    Case("zeros", (T((1, 3, 64), std=0.0),)),
    Case("odd-channels", (T((2, 3, 75), std=100.0),), ("small", "odd")),
    Case("one-channel", (T((5, 1)),), ("small", "odd")),
    Case("wide", (T((1, 3, 2304)),)),
    Case("sliced", (T((2, 5, 96), "sliced"),), ("small", "strided")),
    Case("sliced-rows", (T((5, 96), "sliced"),), ("small", "strided")),
    Case("joint", (T((2, 5, 96), "joint"),), ("small", "strided")),
    Case("offset", (T((2, 5, 96), "offset"),), ("small", "strided")),
    Case("transposed", (T((2, 5, 96), "transposed"),), ("small", "strided")),
    Case("empty-tokens", (T((2, 0, 64)),), ("small", "empty")),
    Case("flux-attention", (T((1, 4608, 3072)),), ("real",)),
    Case("flux-single", (T((1, 4608, 15360), "joint"),), ("real",)),
    Case("z-image-attention", (T((1, 4320, 3840)),), ("real",)),
    Case("z-image-feed-forward", (T((4320, 10240), std=30.0),), ("real",)),
)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    dtypes=_fp8.ROWS,
    slack=_fp8.SLACK,
    mixed=True,
)
def quantize_rows(x: Tensor, *, out: Rows | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x[S,K] or [B,S,K] -> (q e4m3 like x, s [B,S], length [B,S]), fp32; x ~ q * s."""
    assert out is not None
    run(x, *out)
    return out


def run(x: Tensor, q: Tensor, s: Tensor, length: Tensor | None) -> None:
    """Launches the kernel; without `length` the scales are given."""
    norm = s if length is None else length
    if x.ndim == 2:
        x, q, s, norm = x[None], q[None], s[None], norm[None]
    B, S, C = x.shape
    x, s = _rows.inner(x), _rows.inner(s)
    vec = _rows.vector(C, x, q)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        q,
        s,
        norm,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(q, vec),
        s.stride(0),
        norm.stride(0),
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        GIVEN=length is None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
