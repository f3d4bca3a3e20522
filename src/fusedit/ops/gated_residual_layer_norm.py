"""Gated residual, then the LayerNorm and modulation of the next branch, in one pass.

    r[b,s,c] = x[b,s,c] + gate[b,c] * y[b,s,c]
    n[b,s,c] = (r[b,s,c] - mean_c r[b,s,:]) / sqrt(var_c r[b,s,:] + eps) * (1 + scale[b,c]) + shift[b,c]

B batch, S tokens, C channels. x, y, r, n fp16, bf16 or fp32; gate, scale, shift any of them. All in fp32 in registers;
n is made of the r before rounding, each result is rounded once.
Bytes: 4 B S C itemsize (x, y read, r, n written), and the vectors: one read of r less than two ops. FLOPs: about 10 an
element. Exactness: reordered.
Source: gated_residual and layer_norm_modulate, as they follow each other in a FLUX block.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import store_rows
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import layer_norm, load_vector, places
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.layer_norm_modulate import plain as plain_norm
from fusedit.ops.layer_norm_modulate import reference as norm_reference

Tensor = torch.Tensor


def reference(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    x, y, gate = wide(x, y, gate)
    r = x + gate[:, None] * y
    return r, norm_reference(r, scale, shift, eps)


def plain(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r = torch.addcmul(x, y, gate[:, None], out=None if out is None else out[0])
    return r, plain_norm(r, scale, shift, eps, out=None if out is None else out[1])


def check(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[torch.Size, torch.Size]:
    accept("gated_residual_layer_norm", x, y, gate, scale, shift, eps)
    return x.shape, x.shape


def accept(name: str, x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float) -> None:
    _check.activation(name, "x", x, "BSC")
    _check.like(name, "y", y, x)
    for label, t in (("gate", gate), ("scale", scale), ("shift", shift)):
        _check.vector(name, label, t, x, (x.shape[0], x.shape[2]), "BC")
    _check.eps(name, eps)


def cost(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(3 * x.nbytes + y.nbytes + gate.nbytes + scale.nbytes + shift.nbytes, 10 * x.numel())


@kernel
def _kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    r_ptr: tl.tensor,
    n_ptr: tl.tensor,
    s_ptr: tl.tensor,
    length_ptr: tl.tensor,
    S: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    y_batch: tl.tensor,
    y_row: tl.tensor,
    gate_batch: tl.tensor,
    scale_batch: tl.tensor,
    shift_batch: tl.tensor,
    r_batch: tl.tensor,
    r_row: tl.tensor,
    n_batch: tl.tensor,
    n_row: tl.tensor,
    s_batch: tl.tensor,
    length_batch: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    QUANT: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    y = tl.load(places(y_ptr, b, rows, cols, y_batch, y_row, VEC), mask=mask, other=0.0).to(tl.float32)
    r = x + load_vector(gate_ptr, b, cols, gate_batch, C, VEC) * y
    tl.store(places(r_ptr, b, rows, cols, r_batch, r_row, VEC), r.to(r_ptr.dtype.element_ty), mask=mask)
    n = layer_norm(r, mask, eps, C) * (1.0 + load_vector(scale_ptr, b, cols, scale_batch, C, VEC))
    n += load_vector(shift_ptr, b, cols, shift_batch, C, VEC)
    if QUANT:
        q = (n_ptr, n_batch, n_row, s_ptr, s_batch, length_ptr, length_batch)
        store_rows(n, mask, b, rows, cols, S, *q, VEC)
    else:
        tl.store(places(n_ptr, b, rows, cols, n_batch, n_row, VEC), n.to(n_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel, flags={"QUANT": False})


def _args(x: tuple[int, ...], row: str = "dense", vec: str = "dense", y: str = "dense") -> tuple[T, ...]:
    v = (x[0], x[2])
    return (T(x, row), T(x, y), T(v, vec), T(v, vec), T(v, vec))


def _onto(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.full_like(x, float("nan"))


CASES = (
    Case("small", _args((2, 5, 64)), alias=_onto),
    Case("both-onto", _args((2, 5, 64)), ("small", "alias"), alias=lambda x, y, *_: (x, y)),
    Case("crossed", _args((2, 5, 64)), ("small", "alias"), alias=lambda x, y, *_: (y, x)),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd"), alias=_onto),
    Case("wide", _args((1, 3, 2304))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("joint", _args((2, 5, 96), "joint", "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("offset", _args((2, 5, 96), "offset", "dense"), ("small", "strided"), alias=_onto),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed", "gapped"), ("small", "strided")),
    Case(
        "fp32-vectors",
        (T((2, 5, 96)), T((2, 5, 96)), *(T((2, 96), dtype=torch.float32),) * 3),
        ("small", "mixed"),
    ),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("flux-image", _args((1, 4096, 3072), "dense", "sliced"), ("real",), alias=_onto),
    Case("flux", _args((1, 4608, 3072)), ("real",), alias=_onto),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=_rows.limit,
)
def gated_residual_layer_norm(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """r = x + gate * y and n = LN(r) * (1 + scale) + shift -> (r, n), each [B,S,C]; each may lie on x or y."""
    assert out is not None
    run(x, y, gate, scale, shift, eps, *out)
    return out


def run(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    r: Tensor,
    n: Tensor,
    s: Tensor | None = None,
    length: Any = None,
) -> None:
    """Launches the kernel; with `s` and `length` n is e4m3 rows."""
    B, S, C = x.shape
    x, y, gate, scale, shift = (_rows.inner(t) for t in (x, y, gate, scale, shift))
    vec = _rows.vector(C, x, y, gate, scale, shift, r, n)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        y,
        gate,
        scale,
        shift,
        r,
        n,
        x if s is None else s,
        x if s is None else length,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(y, vec),
        *_rows.steps(gate, vec),
        *_rows.steps(scale, vec),
        *_rows.steps(shift, vec),
        *_rows.steps(r, vec),
        *_rows.steps(n, vec),
        0 if s is None else s.stride(0),
        0 if s is None else length.stride(0),
        eps,
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        QUANT=s is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
