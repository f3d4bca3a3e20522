"""LayerNorm without affine, then the modulation of an adaptive norm, in one pass.

n[b,s,c] = (x[b,s,c] - mean_c) / sqrt(var_c + eps) * (1 + scale[b,c]) + shift[b,c]

"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

Tensor = torch.Tensor


def reference(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> Tensor:
    x, scale, shift = wide(x, scale, shift)
    n = F.layer_norm(x, (x.shape[-1],), eps=eps) * (1 + scale[:, None])
    return n if shift is None else n + shift[:, None]


def plain(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    C = x.shape[-1]
    if x.shape[0] == 1:  # one row of weights: layer_norm's own affine, in fp32, is one pass
        n = F.layer_norm(x, (C,), scale[0].float() + 1, None if shift is None else shift[0].float(), eps)
        return n if out is None else out.copy_(n)
    n = F.layer_norm(x, (C,), eps=eps)
    if shift is None:
        return torch.mul(n, 1 + scale[:, None], out=n if out is None else out)
    return torch.addcmul(shift[:, None], n, 1 + scale[:, None], out=n if out is None else out)


def check(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> tuple[torch.Size]:
    _check.activation("layer_norm_modulate", "x", x, "BSC")
    B, _, C = x.shape
    _check.vector("layer_norm_modulate", "scale", scale, x, (B, C), "BC")
    if shift is not None:
        _check.vector("layer_norm_modulate", "shift", shift, x, (B, C), "BC")
    return (x.shape,)


def cost(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> Cost:
    rows = scale.nbytes + (0 if shift is None else shift.nbytes)
    return Cost(2 * x.nbytes + rows, x.numel() * (7 if shift is None else 8))


CASES = (Case("small", (T((2, 5, 64)), T((2, 64)), T((2, 64)))),)


@op(exactness="reordered", reference=reference, plain=plain, check=check, cost=cost, cases=CASES)
def layer_norm_modulate(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """LN(x[B,S,C]) * (1 + scale[B,C]) + shift[B,C] -> [B,S,C]; `out` may lie on x."""
    return plain(x, scale, shift, eps, out=out)
