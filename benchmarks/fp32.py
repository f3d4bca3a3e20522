"""The truth that results are held against: the same values through the same layers in fp32, all of its bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_tf32() -> Iterator[None]:
    """Convolutions in fp32 keep their 24 bits: by default cuDNN rounds them to TF32's 11, as coarse as half a bf16."""
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


def relative_l2(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.float() - truth).norm() / truth.norm())
