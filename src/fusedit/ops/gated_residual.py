"""Gated residual: adds a gated branch to the residual stream."""

from __future__ import annotations

import torch

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

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
    return Cost(3 * x.nbytes + gate.nbytes, 2 * x.numel())


CASES = (Case("small", (T((2, 5, 64)), T((2, 5, 64)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[B,S,C] + gate[B,C] * y[B,S,C] -> [B,S,C]; `out` may lie on x or y."""
    return plain(x, y, gate, out=out)
