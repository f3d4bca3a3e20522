"""GELU in its tanh form.

    y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))

x[..., C] and y fp16, bf16 or fp32, any strides; computed in fp32 in the second form, which does not cancel for
negative x, rounded once. Bytes: 2 numel itemsize. FLOPs: about 10 an element.
Exactness: reordered.
Source: Hendrycks and Gimpel 2016, as the feed-forward of FLUX uses it.
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


def reference(x: Tensor) -> Tensor:
    x = wide(x)
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.gelu(x, approximate="tanh")
    return cast(Tensor, torch.ops.aten.gelu.out(x, approximate="tanh", out=out))


def check(x: Tensor) -> tuple[torch.Size]:
    if isinstance(x, Tensor) and x.ndim == 0:
        raise OpError(f"gelu_tanh: x must have at least one dimension, not {_check.show(x)}")
    _check.activation("gelu_tanh", "x", x, "." * getattr(x, "ndim", 1))
    return (x.shape,)


def cost(x: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 10 * x.numel())


@kernel
def gelu(x: tl.tensor) -> tl.tensor:
    return x * sigmoid(x * (1.5957691216057308 + 0.07135481282052411 * x * x))


@kernel
def _kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    S: tl.tensor,
    C: tl.tensor,
    parts: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows, start, cols, mask = tile(S, C, tl.program_id(0) % parts, parts, BLOCK, ROWS, VEC)
    x = tl.load(places(x_ptr, b, rows, start, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    y = gelu(x).to(out_ptr.dtype.element_ty)
    tl.store(places(out_ptr, b, rows, start, cols, out_batch, out_row, VEC), y, mask=mask)


def builds() -> list[Build]:
    return _elementwise.builds(_kernel)


def _last_columns(x: Tensor) -> Tensor:
    return x.new_full((*x.shape[:-1], x.shape[-1] + 32), float("nan"))[..., 32:]


CASES = (
    Case("small", (T((2, 5, 64)),), alias=lambda x: x),
    Case("into-slice", (T((2, 5, 64)),), ("small", "strided"), alias=_last_columns),
    Case("range", (T((3, 257), std=8.0),), ("small", "odd")),
    Case("one-dimension", (T((33,)),), ("small", "odd"), alias=lambda x: x),
    Case("four-dimensions", (T((2, 3, 4, 24), "transposed"),), ("small", "strided")),
    Case("odd-channels", (T((2, 3, 75)),), ("small", "odd"), alias=lambda x: x),
    Case("long", (T((1, 2, 2304), "sliced"),), alias=lambda x: x),
    Case("sliced", (T((2, 5, 96), "sliced"),), ("small", "strided"), alias=lambda x: x),
    Case("joint", (T((2, 5, 96), "joint"),), ("small", "strided"), alias=lambda x: x),
    Case("offset", (T((2, 5, 96), "offset"),), ("small", "strided"), alias=lambda x: x),
    Case("transposed", (T((2, 5, 96), "transposed"),), ("small", "strided"), alias=lambda x: x),
    Case("gapped", (T((2, 5, 96), "gapped"),), ("small", "strided")),
    Case("empty", (T((2, 0, 64)),), ("small", "empty")),
    Case("flux", (T((1, 4608, 12288)),), ("real",), alias=lambda x: x),
    Case("flux-single", (T((2, 512, 12288), "sliced"),), ("real",), alias=_last_columns),
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
def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu(x[..., C]), tanh form; `out` may be a slice of a wider buffer, or lie on x."""
    assert out is not None
    return _elementwise.run(_kernel, out, x)
