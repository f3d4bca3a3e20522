"""Gated residual: adds a gated branch to the residual stream.

    r[b,s,c] = x[b,s,c] + gate[b,c] * y[b,s,c]

B batch, S tokens, C channels. x, y and the result fp16, bf16 or fp32; gate any of them. Product and sum in fp32,
rounded once. Bytes: 3 B S C itemsize, and the gate. FLOPs: 2 an element.
Exactness: reordered; stock rounds the product too.
Source: the adaptive-zero gate of DiT (Peebles and Xie 2022, section 3.2), as in every FLUX block.
"""

from __future__ import annotations

import torch

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import load_vector, places
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    x, y, gate = wide(x, y, gate)
    return x + gate[:, None] * y


def plain(x: Tensor, y: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.addcmul(x, y, gate[:, None], out=out)


def check(x: Tensor, y: Tensor, gate: Tensor) -> tuple[torch.Size]:
    _check.activation("gated_residual", "x", x, "BSC")
    _check.like("gated_residual", "y", y, x)
    _check.vector("gated_residual", "gate", gate, x, (x.shape[0], x.shape[2]), "BC")
    return (x.shape,)


def cost(x: Tensor, y: Tensor, gate: Tensor) -> Cost:
    return Cost(2 * x.nbytes + y.nbytes + gate.nbytes, 2 * x.numel())


@kernel
def _kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    y = tl.load(places(y_ptr, b, rows, cols, y_batch, y_row, VEC), mask=mask, other=0.0).to(tl.float32)
    r = x + load_vector(gate_ptr, b, cols, gate_batch, C, VEC) * y
    tl.store(places(out_ptr, b, rows, cols, out_batch, out_row, VEC), r.to(out_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel)


_X, _V = (2, 5, 96), (2, 96)
CASES = (
    Case("small", (T((2, 5, 64)), T((2, 5, 64)), T((2, 64))), alias=lambda x, *_: x),
    Case("onto-y", (T((2, 5, 64)), T((2, 5, 64)), T((2, 64))), ("small", "alias"), alias=lambda _x, y, *_: y),
    Case("odd-channels", (T((2, 3, 75)), T((2, 3, 75)), T((2, 75))), ("small", "odd"), alias=lambda x, *_: x),
    Case("sliced", (T(_X, "sliced"), T(_X), T(_V, "sliced")), ("small", "strided"), alias=lambda x, *_: x),
    Case("joint", (T(_X, "joint"), T(_X, "sliced"), T(_V)), ("small", "strided"), alias=lambda x, *_: x),
    Case("offset", (T(_X, "offset"), T(_X), T(_V, "offset")), ("small", "strided"), alias=lambda x, *_: x),
    Case("transposed", (T(_X, "transposed"), T(_X, "gapped"), T(_V, "transposed")), ("small", "strided")),
    Case("fp32-gate", (T(_X), T(_X), T(_V, dtype=torch.float32)), ("small", "mixed")),
    Case("empty-tokens", (T((2, 0, 64)), T((2, 0, 64)), T((2, 64))), ("small", "empty")),
    Case("flux", (T((1, 4608, 3072)), T((1, 4608, 3072)), T((1, 3072))), ("real",), alias=lambda x, *_: x),
    Case("flux-sliced", (T((2, 512, 3072), "joint"), T((2, 512, 3072)), T((2, 3072), "sliced")), ("real",)),
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
def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[B,S,C] + gate[B,C] * y[B,S,C] -> [B,S,C]; `out` may lie on x or y."""
    assert out is not None
    B, S, C = x.shape
    x, y, gate = _rows.inner(x), _rows.inner(y), _rows.inner(gate)
    vec = _rows.vector(C, x, y, gate, out)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        y,
        gate,
        out,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(y, vec),
        *_rows.steps(gate, vec),
        *_rows.steps(out, vec),
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    return out
