"""What the ops on rows of C channels share."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def plain_rms(x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension in plain torch, in fp32 (fp64 for fp64): written into `out` where it is of that
    dtype, else a new tensor. Two passes over memory instead of the five of the usual formulation."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    target = wide if wide is not x else out
    n = torch.mul(wide, inverse, out=target)
    return n if weight is None else n.mul_(weight)
