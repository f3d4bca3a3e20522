"""GELU in its tanh form."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

Tensor = torch.Tensor


def reference(x: Tensor) -> Tensor:
    x = wide(x)
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.gelu(x, approximate="tanh")
    return torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def check(x: Tensor) -> tuple[torch.Size]:
    if isinstance(x, Tensor) and x.ndim == 0:
        raise OpError(f"gelu_tanh: x must have at least one dimension, not {_check.show(x)}")
    _check.activation("gelu_tanh", "x", x, "." * getattr(x, "ndim", 1))
    return (x.shape,)


def cost(x: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 10 * x.numel())


CASES = (Case("small", (T((2, 5, 64)),)),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def gelu_tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu(x[..., C]), tanh form; `out` may be a slice of a wider buffer, or lie on x."""
    return plain(x, out=out)
