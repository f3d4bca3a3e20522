"""RMSNorm of a branch, tanh gate, addition to the residual stream, then the next RMSNorm and scale, in one pass.

    r[b,s,c] = x[b,s,c] + tanh(gate[b,c]) * y[b,s,c] / sqrt(mean_c y[b,s,:]^2 + eps) * y_weight[c]
    n[b,s,c] = r[b,s,c] / sqrt(mean_c r[b,s,:]^2 + eps) * next_weight[c] * (1 + next_scale[b,c])

B batch, S tokens, C channels. x, y, r, n fp16, bf16 or fp32; the vectors any of them; gate None: plain addition;
next_scale None: no scale. All in fp32 in registers; n is made of the r before rounding, each result is rounded once.
Bytes: 4 B S C itemsize (x, y read, r, n written), and the vectors. FLOPs: about 11 an element.
Exactness: reordered.
Source: rms_gated_residual and rms_norm_modulate, as they follow each other in a Z-Image block.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import store_rows
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import load_vector, places, rms_norm, tanh
from fusedit.ops._triton import kernel, tl
from fusedit.ops.rms_gated_residual import plain as plain_residual
from fusedit.ops.rms_gated_residual import reference as residual_reference
from fusedit.ops.rms_norm_modulate import plain as plain_norm
from fusedit.ops.rms_norm_modulate import reference as norm_reference

Tensor = torch.Tensor


def reference(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    r = residual_reference(x, y, y_weight, gate, eps)
    return r, norm_reference(r, next_weight, next_scale, eps)


def plain(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r = plain_residual(x, y, y_weight, gate, eps, out=None if out is None else out[0])
    return r, plain_norm(r, next_weight, next_scale, eps, out=None if out is None else out[1])


def check(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
) -> tuple[torch.Size, torch.Size]:
    accept("rms_gated_residual_rms_norm", x, y, y_weight, gate, next_weight, next_scale, eps)
    return x.shape, x.shape


def accept(
    name: str,
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float,
) -> None:
    _check.activation(name, "x", x, "BSC")
    B, _S, C = x.shape
    _check.like(name, "y", y, x)
    _check.vector(name, "y_weight", y_weight, x, (C,), "C")
    _check.vector(name, "next_weight", next_weight, x, (C,), "C")
    for label, t in (("gate", gate), ("next_scale", next_scale)):
        if t is not None:
            _check.vector(name, label, t, x, (B, C), "BC")
    _check.eps(name, eps)


def cost(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    *_: Any,
    **__: Any,
) -> Cost:
    rows = sum(t.nbytes for t in (y_weight, gate, next_weight, next_scale) if t is not None)
    return Cost(3 * x.nbytes + y.nbytes + rows, x.numel() * (9 + (gate is not None) + (next_scale is not None)))


@kernel
def _kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    next_weight_ptr: tl.tensor,
    next_scale_ptr: tl.tensor,
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
    GATE: tl.constexpr,
    SCALE: tl.constexpr,
    QUANT: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    y = tl.load(places(y_ptr, b, rows, cols, y_batch, y_row, VEC), mask=mask, other=0.0).to(tl.float32)
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    branch = rms_norm(y, eps, C) * load_vector(weight_ptr, b, cols, 0, C, VEC)
    if GATE:
        branch *= tanh(load_vector(gate_ptr, b, cols, gate_batch, C, VEC))
    r = x + branch
    tl.store(places(r_ptr, b, rows, cols, r_batch, r_row, VEC), r.to(r_ptr.dtype.element_ty), mask=mask)
    n = rms_norm(r, eps, C) * load_vector(next_weight_ptr, b, cols, 0, C, VEC)
    if SCALE:
        n *= 1.0 + load_vector(next_scale_ptr, b, cols, scale_batch, C, VEC)
    if QUANT:
        q = (n_ptr, n_batch, n_row, s_ptr, s_batch, length_ptr, length_batch)
        store_rows(n, mask, b, rows, cols, S, *q, VEC)
    else:
        tl.store(places(n_ptr, b, rows, cols, n_batch, n_row, VEC), n.to(n_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel, flags={"GATE": True, "SCALE": True, "QUANT": False}, C=3840)


def _args(
    x: tuple[int, ...], row: str = "dense", vec: str = "dense", y: str = "dense", gate: bool = True, scale: bool = True
) -> Any:
    v, w = T((x[0], x[2]), vec), T((x[2],))
    return (T(x, row), T(x, y), w, v if gate else None, w, v if scale else None)


def _onto(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.full_like(x, float("nan"))


CASES = (
    Case("small", _args((2, 5, 64)), alias=_onto),
    Case("no-gate", _args((2, 5, 64), gate=False)),
    Case("no-scale", _args((2, 5, 64), scale=False)),
    Case("bare", _args((2, 5, 64), gate=False, scale=False), alias=_onto),
    Case("both-onto", _args((2, 5, 64)), ("small", "alias"), alias=lambda x, y, *_: (x, y)),
    Case("crossed", _args((2, 5, 64)), ("small", "alias"), alias=lambda x, y, *_: (y, x)),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd"), alias=_onto),
    Case("wide", _args((1, 3, 2560))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("joint", _args((2, 5, 96), "joint", "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("offset", _args((2, 5, 96), "offset"), ("small", "strided"), alias=_onto),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed", "gapped"), ("small", "strided")),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("z-image", _args((1, 4320, 3840)), ("real",), alias=_onto),
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
def rms_gated_residual_rms_norm(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """r = x + tanh(gate) * RMS(y) * y_weight, n = RMS(r) * next_weight * (1 + next_scale) -> (r, n); r may lie on x."""
    assert out is not None
    run(x, y, y_weight, gate, next_weight, next_scale, eps, *out)
    return out


def run(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float,
    r: Tensor,
    n: Tensor,
    s: Tensor | None = None,
    length: Any = None,
) -> None:
    """Launches the kernel; with `s` and `length` n is e4m3 rows."""
    B, S, C = x.shape
    x, y = _rows.inner(x), _rows.inner(y)
    weight, next_weight = _rows.inner(y_weight), _rows.inner(next_weight)
    g = y[:, 0] if gate is None else _rows.inner(gate)
    v = y[:, 0] if next_scale is None else _rows.inner(next_scale)
    vec = _rows.vector(C, x, y, weight, g, next_weight, v, r, n)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        y,
        weight,
        g,
        next_weight,
        v,
        r,
        n,
        x if s is None else s,
        x if s is None else length,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(y, vec),
        *_rows.steps(g, vec),
        *_rows.steps(v, vec),
        *_rows.steps(r, vec),
        *_rows.steps(n, vec),
        0 if s is None else s.stride(0),
        0 if s is None else length.stride(0),
        eps,
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        GATE=gate is not None,
        SCALE=next_scale is not None,
        QUANT=s is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
