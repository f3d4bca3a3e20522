"""SwiGLU: the gated product of a feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

Tensor = torch.Tensor


def reference(a: Tensor, b: Tensor) -> Tensor:
    a, b = wide(a, b)
    return a / (1 + torch.exp(-a)) * b


def plain(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.silu(a).mul_(b)
    if out.data_ptr() == b.data_ptr():
        return torch.mul(F.silu(a), b, out=out)
    return torch.ops.aten.silu.out(a, out=out).mul_(b)


def check(a: Tensor, b: Tensor) -> tuple[torch.Size]:
    if isinstance(a, Tensor) and a.ndim == 0:
        raise OpError(f"swiglu: a must have at least one dimension, not {_check.show(a)}")
    _check.activation("swiglu", "a", a, "." * getattr(a, "ndim", 1))
    _check.like("swiglu", "b", b, a)
    return (a.shape,)


def cost(a: Tensor, b: Tensor) -> Cost:
    return Cost(3 * a.nbytes, 5 * a.numel())


CASES = (Case("small", (T((2, 5, 64)), T((2, 5, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def swiglu(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(a[..., F]) * b[..., F]; a and b may be halves of one buffer; `out` may lie on a or b."""
    return plain(a, b, out=out)
