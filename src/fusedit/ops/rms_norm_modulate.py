"""RMSNorm with weight, then the scale of an adaptive norm, in one pass."""

from __future__ import annotations

import torch

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide
from fusedit.ops._rows import plain_rms

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> Tensor:
    x, weight, scale = wide(x, weight, scale)
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n = n if weight is None else n * weight
    return n if scale is None else n * (1 + scale[:, None])


def plain(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    if scale is not None and weight is not None:
        row = (weight.float() * (1 + scale.float()))[:, None]
    elif scale is not None:
        row = 1 + scale.float()[:, None]
    else:
        row = weight
    n = plain_rms(x, row, eps, out)
    return n.to(x.dtype) if out is None else out if n is out else out.copy_(n)


def check(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> tuple[torch.Size]:
    _check.activation("rms_norm_modulate", "x", x, "BSC")
    B, _, C = x.shape
    if weight is not None:
        _check.vector("rms_norm_modulate", "weight", weight, x, (C,), "C")
    if scale is not None:
        _check.vector("rms_norm_modulate", "scale", scale, x, (B, C), "BC")
    return (x.shape,)


def cost(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> Cost:
    rows = sum(t.nbytes for t in (weight, scale) if t is not None)
    return Cost(2 * x.nbytes + rows, x.numel() * (3 + (weight is not None) + (scale is not None)))


CASES = (Case("small", (T((2, 5, 64)), T((64,)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def rms_norm_modulate(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """RMS(x[B,S,C]) * weight[C] * (1 + scale[B,C]) -> [B,S,C]; `out` may lie on x."""
    return plain(x, weight, scale, eps, out=out)
