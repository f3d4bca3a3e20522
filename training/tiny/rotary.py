"""Stock arithmetic in fewer passes, for training only: the rotary embedding and RMSNorm.

Stock's rotary embedding makes ten passes in fp32 over queries and keys, and diffusers' RMSNorm six; in models this
narrow they, not the matrix products, are what a step costs.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd, out = x[..., 0::2], x[..., 1::2], torch.empty_like(x)
    out[..., 0::2] = torch.addcmul(even * cos, odd, sin, value=-1)
    out[..., 1::2] = torch.addcmul(even * sin, odd, cos)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of X [B, S, H, D] by the angle whose COS and SIN are [1, S, 1, D / 2]; backward turns it back."""
    result: torch.Tensor = _Rotate.apply(x, cos, sin)
    return result


def use_library_norms(model: nn.Module) -> None:
    """Put torch's RMSNorm in the place of diffusers' throughout MODEL; the weights and their names stay."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                norm = nn.RMSNorm(child.dim, eps=child.eps)
                norm.weight = child.weight
                setattr(module, name, norm)
