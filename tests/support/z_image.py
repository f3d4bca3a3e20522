"""A tiny Z-Image pipeline in which every part matters to the result."""

from __future__ import annotations

from typing import Any

import torch

from support.pipes import z_image_pipe


def lively_pipe(seed: int = 0, **changes: Any) -> Any:
    """Pad tokens that are not zero, norms that differ from one, attention and gates that are not nearly flat."""
    pipe = z_image_pipe(seed, **changes)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "pad_token" in name:
                parameter.normal_()
            elif "norm" in name:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
            elif "adaLN" in name or "cap_embedder" in name or "attention.to_v" in name:
                parameter.mul_(3.0)
    return pipe
