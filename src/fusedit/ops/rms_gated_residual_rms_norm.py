"""RMSNorm of a branch, tanh gate, addition to the residual stream, then the next RMSNorm and scale, in one pass."""

from __future__ import annotations

import torch

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide
from fusedit.ops.rms_gated_residual import plain as plain_residual
from fusedit.ops.rms_norm_modulate import plain as plain_norm

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
    x, y, y_weight, gate, next_weight, next_scale = wide(x, y, y_weight, gate, next_weight, next_scale)
    b = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * y_weight
    r = x + (b if gate is None else gate[:, None].tanh() * b)
    n = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * next_weight
    return r, n if next_scale is None else n * (1 + next_scale[:, None])


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
    name = "rms_gated_residual_rms_norm"
    _check.activation(name, "x", x, "BSC")
    B, _, C = x.shape
    _check.like(name, "y", y, x)
    _check.vector(name, "y_weight", y_weight, x, (C,), "C")
    _check.vector(name, "next_weight", next_weight, x, (C,), "C")
    for label, t in (("gate", gate), ("next_scale", next_scale)):
        if t is not None:
            _check.vector(name, label, t, x, (B, C), "BC")
    return x.shape, x.shape


def cost(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
) -> Cost:
    rows = sum(t.nbytes for t in (y_weight, gate, next_weight, next_scale) if t is not None)
    return Cost(4 * x.nbytes + rows, x.numel() * (9 + (gate is not None) + (next_scale is not None)))


CASES = (Case("small", (T((2, 5, 64)), T((2, 5, 64)), T((64,)), T((2, 64)), T((64,)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
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
    """r = x + tanh(gate) * RMS(y) * y_weight and n = RMS(r) * next_weight * (1 + next_scale) -> (r, n); r may lie on x."""
    return plain(x, y, y_weight, gate, next_weight, next_scale, eps, out=out)
