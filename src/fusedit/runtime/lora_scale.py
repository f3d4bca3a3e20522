"""The `scale` entry of joint_attention_kwargs: scales the LoRA layers for one forward, as stock does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def lora_scaled(module: nn.Module, kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Scale the LoRA layers of `module` by kwargs["scale"] inside the block; without one, do nothing."""
    scale = 1.0 if kwargs is None else kwargs.get("scale", 1.0)
    if scale == 1.0:
        yield
        return
    from diffusers.utils import peft_utils

    peft: Any = peft_utils
    peft.scale_lora_layers(module, scale)
    try:
        yield
    finally:
        peft.unscale_lora_layers(module, scale)
