"""A copy and a GELU in one launch: what the closing product of a parallel block reads, made adjacent.

    c[b,s,i] = a[b,s,i]
    g[b,s,j] = gelu_tanh(u[b,s,j])

B batch, S tokens; a[B,S,A] and u[B,S,M], c and g fp16, bf16 or fp32, any strides: c and g are neighbouring columns of
one buffer, and g may lie on u. In fp32, rounded once (see gelu_tanh for the form). The copy is exact.
A library's attention chooses where it writes, so its output has to be moved once: torch's strided copy took 36 us for
[1,4608,3072] in bf16 on an H200 (1.6 TB/s); here it rides along.
Bytes: 2 B S (A + M) itemsize. FLOPs: about 10 an element of u. Exactness: reordered.
Source: the single blocks of FLUX (parallel attention and feed-forward, Dehghani et al. 2023).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _elementwise, _rows
from fusedit.ops._cases import Case, T
from fusedit.ops._elementwise import places, tile
from fusedit.ops._op import Build, Cost, op, wide
from fusedit.ops._triton import kernel, tl
from fusedit.ops.gelu_tanh import gelu
from fusedit.ops.gelu_tanh import reference as gelu_reference

Tensor = torch.Tensor


def reference(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return wide(a), gelu_reference(u)


def plain(a: Tensor, u: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    if out is None:
        return a.clone(), F.gelu(u, approximate="tanh")
    # The copy first: out[1] may lie on u, and u is not read by it.
    return out[0].copy_(a), cast(Tensor, torch.ops.aten.gelu.out(u, approximate="tanh", out=out[1]))


def check(a: Tensor, u: Tensor) -> tuple[torch.Size, torch.Size]:
    _check.activation("copy_gelu", "a", a, "BSA")
    _check.activation("copy_gelu", "u", u, "BSM")
    if u.shape[:2] != a.shape[:2] or u.dtype is not a.dtype or u.device != a.device:
        raise OpError(f"copy_gelu: u must have the rows, dtype and device of a {_check.show(a)}, not {_check.show(u)}")
    if bool(a.shape[2]) != bool(u.shape[2]):
        raise OpError(f"copy_gelu: a and u must both have columns, not {a.shape[2]} and {u.shape[2]}")
    return a.shape, u.shape


def cost(a: Tensor, u: Tensor) -> Cost:
    return Cost(2 * (a.nbytes + u.nbytes), 10 * u.numel())


@kernel
def _kernel(
    a_ptr: tl.tensor,
    u_ptr: tl.tensor,
    c_ptr: tl.tensor,
    g_ptr: tl.tensor,
    S: tl.tensor,
    A: tl.tensor,
    M: tl.tensor,
    a_parts: tl.tensor,
    parts: tl.tensor,
    a_batch: tl.tensor,
    a_row: tl.tensor,
    u_batch: tl.tensor,
    u_row: tl.tensor,
    c_batch: tl.tensor,
    c_row: tl.tensor,
    g_batch: tl.tensor,
    g_row: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % parts
    if part < a_parts:
        rows, start, cols, mask = tile(S, A, part, parts, BLOCK, ROWS, VEC)
        a = tl.load(places(a_ptr, b, rows, start, cols, a_batch, a_row, VEC), mask=mask, other=0.0)
        tl.store(places(c_ptr, b, rows, start, cols, c_batch, c_row, VEC), a, mask=mask)
    else:
        rows, start, cols, mask = tile(S, M, part - a_parts, parts, BLOCK, ROWS, VEC)
        u = tl.load(places(u_ptr, b, rows, start, cols, u_batch, u_row, VEC), mask=mask, other=0.0).to(tl.float32)
        y = gelu(u).to(g_ptr.dtype.element_ty)
        tl.store(places(g_ptr, b, rows, start, cols, g_batch, g_row, VEC), y, mask=mask)


def builds() -> list[Build]:
    return _elementwise.builds(_kernel)


def limit(a: Tensor, _: Tensor) -> str:
    return f"batch {a.shape[0]} is larger than 65535" if a.shape[0] > 65535 else ""


def _columns(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbouring columns of one buffer, the second on u where u is a slice of a wider one."""
    buffer = u.new_full((*u.shape[:2], a.shape[2] + u.shape[2]), float("nan"))
    return buffer[..., : a.shape[2]], buffer[..., a.shape[2] :]


def _onto(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(a, float("nan")), u


CASES = (
    Case("small", (T((2, 5, 64)), T((2, 5, 256))), alias=_columns),
    Case("onto", (T((2, 5, 64)), T((2, 5, 256), "sliced")), ("small", "strided", "alias"), alias=_onto),
    Case("range", (T((1, 3, 40)), T((1, 3, 257), std=8.0)), ("small", "odd"), alias=_columns),
    Case("wide", (T((1, 2, 2304)), T((1, 2, 4104)))),
    Case("joint", (T((2, 5, 96), "joint"), T((2, 5, 96), "offset")), ("small", "strided")),
    Case("transposed", (T((2, 5, 96), "transposed"), T((2, 5, 32), "gapped")), ("small", "strided")),
    Case("empty", (T((2, 0, 64)), T((2, 0, 64))), ("small", "empty")),
    Case("flux", (T((1, 4608, 3072)), T((1, 4608, 12288), "sliced")), ("real",), alias=_columns),
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
)
def copy_gelu(a: Tensor, u: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(a[B,S,A], gelu(u[B,S,M])), tanh form; `out` may be columns of one buffer, out[1] may lie on u."""
    assert out is not None
    a, u = _rows.inner(a), _rows.inner(u)
    B, S, A = a.shape
    M = u.shape[2]
    vec = min(_rows.vector(A, a, *out, u), _rows.vector(M, u))
    block, rows = _elementwise.shape_of_tile(max(A, M), _rows.launch(a.device))
    a_parts = _rows.cdiv(A, block)
    parts = a_parts + _rows.cdiv(M, block)
    _kernel[(_rows.cdiv(S, rows) * parts, B)](
        a,
        u,
        *out,
        S,
        A // vec,
        M // vec,
        a_parts,
        parts,
        *_rows.steps(a, vec),
        *_rows.steps(u, vec),
        *_rows.steps(out[0], vec),
        *_rows.steps(out[1], vec),
        BLOCK=block,
        ROWS=rows,
        VEC=vec,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
