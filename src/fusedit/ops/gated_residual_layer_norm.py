"""Gated residual, then the LayerNorm and modulation of the next branch, in one pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

Tensor = torch.Tensor


def reference(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    x, y, gate, scale, shift = wide(x, y, gate, scale, shift)
    r = x + gate[:, None] * y
    return r, F.layer_norm(r, (r.shape[-1],), eps=eps) * (1 + scale[:, None]) + shift[:, None]


def plain(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    from fusedit.ops.layer_norm_modulate import plain as layer_norm_plain

    r = torch.addcmul(x, y, gate[:, None], out=None if out is None else out[0])
    return r, layer_norm_plain(r, scale, shift, eps, out=None if out is None else out[1])


def check(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[torch.Size, torch.Size]:
    name = "gated_residual_layer_norm"
    _check.activation(name, "x", x, "BSC")
    _check.like(name, "y", y, x)
    for label, t in (("gate", gate), ("scale", scale), ("shift", shift)):
        _check.vector(name, label, t, x, (x.shape[0], x.shape[2]), "BC")
    return x.shape, x.shape


def cost(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Cost:
    return Cost(4 * x.nbytes + gate.nbytes + scale.nbytes + shift.nbytes, 10 * x.numel())


CASES = (Case("small", (T((2, 5, 64)), T((2, 5, 64)), T((2, 64)), T((2, 64)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def gated_residual_layer_norm(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """r = x + gate * y and n = LN(r) * (1 + scale) + shift -> (r, n), each [B,S,C]; r may lie on x."""
    return plain(x, y, gate, scale, shift, eps, out=out)
