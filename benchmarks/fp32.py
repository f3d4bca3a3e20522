"""Distance from the truth that results are held against: the same values through the same layers in fp32."""

from __future__ import annotations

import torch


def relative_l2(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.float() - truth).norm() / truth.norm())
