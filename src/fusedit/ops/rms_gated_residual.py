"""RMSNorm of a branch, tanh gate, and addition to the residual stream, in one pass.

    r[b,s,c] = x[b,s,c] + tanh(gate[b,c]) * y[b,s,c] / sqrt(mean_c y[b,s,:]^2 + eps) * y_weight[c]

B batch, S tokens, C channels. x, y, r fp16, bf16 or fp32; y_weight and gate any of them; gate None: plain addition.
All in fp32 in registers, rounded once. tanh is computed in fp32 in the kernel, so the caller passes the raw gate.
Bytes: 3 B S C itemsize, and the vectors. FLOPs: about 6 an element.
Exactness: reordered.
Source: the post-norm residual of the Z-Image transformer block, `x + gate.tanh() * norm2(branch)`.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import load_vector, places, plain_rms, rms_norm, tanh
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.rms_norm_modulate import reference as norm_reference

Tensor = torch.Tensor


def reference(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5) -> Tensor:
    x, gate = wide(x, gate)
    n = norm_reference(y, y_weight, None, eps)
    return x + (n if gate is None else gate[:, None].tanh() * n)


def plain(
    x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    n = plain_rms(y, None, eps)
    row = y_weight.to(n.dtype) if gate is None else gate.to(n.dtype).tanh().mul(y_weight)[:, None]
    if n.dtype is x.dtype:
        return torch.addcmul(x, n, row, out=n if out is None else out)
    r = n.mul_(row).add_(x)
    return r.to(x.dtype) if out is None else out.copy_(r)


def check(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5) -> tuple[torch.Size]:
    _check.activation("rms_gated_residual", "x", x, "BSC")
    B, _S, C = x.shape
    _check.like("rms_gated_residual", "y", y, x)
    _check.vector("rms_gated_residual", "y_weight", y_weight, x, (C,), "C")
    if gate is not None:
        _check.vector("rms_gated_residual", "gate", gate, x, (B, C), "BC")
    _check.eps("rms_gated_residual", eps)
    return (x.shape,)


def cost(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, *_: Any, **__: Any) -> Cost:
    rows = y_weight.nbytes + (0 if gate is None else gate.nbytes)
    return Cost(2 * x.nbytes + y.nbytes + rows, x.numel() * (5 if gate is None else 6))


@kernel
def _kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    S: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    y_batch: tl.tensor,
    y_row: tl.tensor,
    gate_batch: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    GATE: tl.constexpr,
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
    tl.store(places(out_ptr, b, rows, cols, out_batch, out_row, VEC), r.to(out_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel, flags={"GATE": True}, C=3840)


def _args(x: tuple[int, ...], row: str = "dense", vec: str = "dense", y: str = "dense", gate: bool = True) -> Any:
    return (T(x, row), T(x, y), T((x[2],)), T((x[0], x[2]), vec) if gate else None)


CASES = (
    Case("small", _args((2, 5, 64)), alias=lambda x, *_: x),
    Case("no-gate", _args((2, 5, 64), gate=False), alias=lambda x, *_: x),
    Case("onto-y", _args((2, 5, 64)), ("small", "alias"), alias=lambda _x, y, *_: y),
    Case("small-gate", (T((1, 5, 64)), T((1, 5, 64)), T((64,)), T((1, 64), std=0.05))),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd"), alias=lambda x, *_: x),
    Case("wide", _args((1, 3, 2560))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided"), alias=lambda x, *_: x),
    Case("joint", _args((2, 5, 96), "joint", "dense", "sliced"), ("small", "strided"), alias=lambda x, *_: x),
    Case("offset", _args((2, 5, 96), "offset"), ("small", "strided"), alias=lambda x, *_: x),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed", "gapped"), ("small", "strided")),
    Case("fp32-weight", (*_args((2, 5, 96))[:2], T((96,), dtype=torch.float32), T((2, 96))), ("small", "mixed")),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("z-image", _args((1, 4320, 3840)), ("real",), alias=lambda x, *_: x),
    Case("z-image-refiner", _args((2, 224, 3840), gate=False), ("real",)),
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
def rms_gated_residual(
    x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """x + tanh(gate[B,C]) * RMS(y) * y_weight[C] -> [B,S,C] (gate None: plain addition); `out` may lie on x or y."""
    assert out is not None
    B, S, C = x.shape
    x, y, weight = _rows.inner(x), _rows.inner(y), _rows.inner(y_weight)
    g = y[:, 0] if gate is None else _rows.inner(gate)
    vec = _rows.vector(C, x, y, weight, g, out)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        y,
        weight,
        g,
        out,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(y, vec),
        *_rows.steps(g, vec),
        *_rows.steps(out, vec),
        eps,
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        GATE=gate is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    return out
