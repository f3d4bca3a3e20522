"""A buffer that the products of a block write into one after the other."""

from __future__ import annotations

import torch


def scratch_part(scratch: torch.Tensor, like: torch.Tensor, width: int) -> torch.Tensor:
    """The first numbers of scratch as a dense [B, S, width], for `like` [B, S, ...]."""
    batch, length = like.shape[0], like.shape[1]
    return scratch.view(-1)[: batch * length * width].view(batch, length, width)
