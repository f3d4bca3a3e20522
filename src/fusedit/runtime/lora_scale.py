"""The `scale` entry of joint_attention_kwargs: scales the LoRA layers for one forward, as stock does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fusedit.runtime.branches import from_peft


@contextmanager
def lora_scaled(module: nn.Module, kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Scale the LoRA layers of `module` by kwargs["scale"] inside the block; without one, do nothing."""
    scale = 1.0 if kwargs is None else kwargs.get("scale", 1.0)
    if scale == 1.0:
        yield
        return
    from diffusers.utils import peft_utils

    _warn_of_fused(module, scale)
    peft: Any = peft_utils
    peft.scale_lora_layers(module, scale)
    try:
        yield
    finally:
        peft.unscale_lora_layers(module, scale)


def _warn_of_fused(module: nn.Module, scale: float) -> None:
    """Stock lets the scale have no effect on what is merged, and says nothing."""
    layers = (child for child in module.modules() if from_peft(child))
    fused = sorted({name for layer in layers for name in getattr(layer, "merged_adapters", ())})
    if fused:
        warnings.warn(
            f"scale {scale:g} has no effect on LoRA {', '.join(map(repr, fused))}, which is fused into the weights; "
            "unfuse it to scale it",
            stacklevel=3,
        )
