"""The device that trains, and the switches that training on it needs."""

from __future__ import annotations

import torch


def pick_device() -> torch.device:
    """Return the GPU where there is one, set up for training."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass gave NaN with torch 2.11 on an H200
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda")
