"""RMSNorm of a branch, tanh gate, and addition to the residual stream, in one pass."""

from __future__ import annotations

import torch

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide
from fusedit.ops._rows import plain_rms

Tensor = torch.Tensor


def reference(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5) -> Tensor:
    x, y, y_weight, gate = wide(x, y, y_weight, gate)
    n = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * y_weight
    return x + (n if gate is None else gate[:, None].tanh() * n)


def plain(
    x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    row = y_weight.float() if gate is None else (gate.float().tanh() * y_weight)[:, None]
    n = plain_rms(y, None, eps)
    if n.dtype is x.dtype:
        return torch.addcmul(x, n, row, out=n if out is None else out)
    r = n.mul_(row).add_(x)
    return r.to(x.dtype) if out is None else out.copy_(r)


def check(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5) -> tuple[torch.Size]:
    _check.activation("rms_gated_residual", "x", x, "BSC")
    B, _, C = x.shape
    _check.like("rms_gated_residual", "y", y, x)
    _check.vector("rms_gated_residual", "y_weight", y_weight, x, (C,), "C")
    if gate is not None:
        _check.vector("rms_gated_residual", "gate", gate, x, (B, C), "BC")
    return (x.shape,)


def cost(x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5) -> Cost:
    rows = y_weight.nbytes + (0 if gate is None else gate.nbytes)
    return Cost(3 * x.nbytes + rows, x.numel() * (5 if gate is None else 6))


CASES = (Case("small", (T((2, 5, 64)), T((2, 5, 64)), T((64,)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def rms_gated_residual(
    x: Tensor, y: Tensor, y_weight: Tensor, gate: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """x + tanh(gate[B,C]) * RMS(y) * y_weight[C] -> [B,S,C] (gate None: plain addition); `out` may lie on x or y."""
    return plain(x, y, y_weight, gate, eps, out=out)
