"""SwiGLU: the gated product of a feed-forward layer.

    y = a sigmoid(a) b

a[..., F], b[..., F] and y fp16, bf16 or fp32, any strides (the two halves of one packed product, say); computed in
fp32, rounded once. Bytes: 3 numel itemsize. FLOPs: about 5 an element.
Exactness: reordered; stock rounds silu(a) too.
Source: Shazeer 2020, as the feed-forward of Z-Image uses it (a = w1 x, b = w3 x).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _elementwise
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._elementwise import places, sigmoid, tile
from fusedit.ops._op import Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(a: Tensor, b: Tensor) -> Tensor:
    a, b = wide(a, b)
    return a / (1 + torch.exp(-a)) * b


def plain(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.silu(a).mul_(b)
    if out.data_ptr() == b.data_ptr():
        return torch.mul(F.silu(a), b, out=out)
    return cast(Tensor, torch.ops.aten.silu.out(a, out=out).mul_(b))


def check(a: Tensor, b: Tensor) -> tuple[torch.Size]:
    if isinstance(a, Tensor) and a.ndim == 0:
        raise OpError(f"swiglu: a must have at least one dimension, not {_check.show(a)}")
    _check.activation("swiglu", "a", a, "." * getattr(a, "ndim", 1))
    _check.like("swiglu", "b", b, a)
    return (a.shape,)


def cost(a: Tensor, b: Tensor) -> Cost:
    return Cost(2 * a.nbytes + b.nbytes, 5 * a.numel())


@kernel
def _kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    S: tl.tensor,
    C: tl.tensor,
    parts: tl.tensor,
    a_batch: tl.tensor,
    a_row: tl.tensor,
    b_batch: tl.tensor,
    b_row: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    item = tl.program_id(1).to(tl.int64)
    rows, start, cols, mask = tile(S, C, tl.program_id(0) % parts, parts, BLOCK, ROWS, VEC)
    a = tl.load(places(a_ptr, item, rows, start, cols, a_batch, a_row, VEC), mask=mask, other=0.0).to(tl.float32)
    b = tl.load(places(b_ptr, item, rows, start, cols, b_batch, b_row, VEC), mask=mask, other=0.0).to(tl.float32)
    y = (a * sigmoid(a) * b).to(out_ptr.dtype.element_ty)
    tl.store(places(out_ptr, item, rows, start, cols, out_batch, out_row, VEC), y, mask=mask)


def builds() -> list[Build]:
    return _elementwise.builds(_kernel)


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    a, b = packed.chunk(2, dim=-1)
    return a, b


def _first(a: Tensor, *_: Tensor) -> Tensor:
    return a


def _second(_: Tensor, b: Tensor) -> Tensor:
    return b


CASES = (
    Case("small", (T((2, 5, 64)), T((2, 5, 64))), alias=_first),
    Case("onto-b", (T((2, 5, 64)), T((2, 5, 64))), ("small", "alias"), alias=_second),
    Case("packed", (T((2, 5, 128)),), ("small", "strided"), packed=_halves, alias=_first),
    Case("packed-onto-b", (T((2, 5, 128)),), ("small", "strided", "alias"), packed=_halves, alias=_second),
    Case("packed-odd", (T((2, 3, 150)),), ("small", "odd"), packed=_halves, alias=_first),
    Case("range", (T((3, 257), std=30.0), T((3, 257)))),
    Case("one-dimension", (T((33,)), T((33,))), ("small", "odd")),
    Case("four-dimensions", (T((2, 3, 4, 24), "transposed"), T((2, 3, 4, 24), "joint")), ("small", "strided")),
    Case("sliced", (T((2, 5, 96), "sliced"), T((2, 5, 96))), ("small", "strided"), alias=_first),
    Case("joint", (T((2, 5, 96), "joint"), T((2, 5, 96), "offset")), ("small", "strided")),
    Case("gapped", (T((2, 5, 96), "gapped"), T((2, 5, 96), "transposed")), ("small", "strided")),
    Case("empty", (T((0, 5, 64)), T((0, 5, 64))), ("small", "empty")),
    Case("z-image", (T((1, 4320, 20480)),), ("real",), packed=_halves),
    Case("z-image-onto", (T((2, 224, 20480)),), ("real",), packed=_halves, alias=_first),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    fits=_elementwise.foldable,
)
def swiglu(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(a[..., F]) * b[..., F]; a and b may be halves of one buffer; `out` may lie on a or b."""
    assert out is not None
    return _elementwise.run(_kernel, out, a, b)
