"""Why weights cannot be made e4m3, loaded into an e4m3 layer, or given back, where and as they are at the moment."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from fusedit.ops._fp8 import E4M3

CAPABILITY: Final = (8, 9)
"""The first compute capability with products of e4m3."""


def device_refusal(capability: tuple[int, int] | None) -> str | None:
    """Why a GPU of this compute capability has no products in e4m3, or None; on a CPU (None) they are emulated."""
    if capability is None or capability >= CAPABILITY:
        return None
    return (
        f"compute capability {capability[0]}.{capability[1]} has no products in e4m3 (they need 8.9: Ada, Hopper and "
        "newer); the weights stay in the model's dtype and the exact rewrites run"
    )


def refusal_there(module: nn.Module) -> str | None:
    """Why nothing of the tier can run where this module lies, or None."""
    parameter = next(module.parameters())
    if torch.version.hip is not None and parameter.is_cuda:
        return "products in e4m3 are not supported on ROCm; the weights stay in the model's dtype"
    return device_refusal(torch.cuda.get_device_capability(parameter.device) if parameter.is_cuda else None)


def refusal(module: nn.Module) -> str | None:
    """Why the layers of this module cannot be converted as they are, or None."""
    if next(module.parameters()).dtype == torch.float64:
        return "float64 weights are not converted"
    if any(p.is_meta for p in module.parameters()):
        return "weights are moved layer by layer (sequential offload); accelerate the pipeline before enabling it"
    if any(p.is_inference() for p in module.parameters()):
        return "weights loaded under inference_mode cannot be converted"
    if _streamed(module):
        return "group offload holds copies of the weights; accelerate the pipeline before enabling it"
    return None


def _streamed(module: nn.Module) -> bool:
    """Whether group offload holds copies of the weights, which it brings back at the next call."""
    for child in module.modules():
        registry: Any = child.__dict__.get("_diffusers_hook")
        for hook in getattr(registry, "hooks", {}).values():
            group = getattr(hook, "group", None)
            if getattr(group, "cpu_param_dict", None) or getattr(group, "offload_to_disk_path", None):
                return True
    return False


def why_not_loaded(weight: Tensor | None, scale: Tensor | None) -> str | None:
    """Why an e4m3 layer cannot take these from a state dict, where the one or the other may be left out, or None.

    A sentence that begins with the key and has `{prefix}` before others. Scales have to be positive, as those that
    quantising makes are: LoRA terms are divided by them.
    """
    if scale is None:
        e4m3 = weight is not None and weight.dtype is E4M3
        return "weight is e4m3 without {prefix}weight_scale; its values are not known" if e4m3 else None
    if weight is not None and weight.dtype is not E4M3:
        return (
            f"weight is {weight.dtype} beside {{prefix}}weight_scale, so its codes were cast as if they were values; "
            "give them in torch.float8_e4m3fn, or stock's weight without a scale"
        )
    if scale.dtype is not torch.float32:
        return f"weight_scale is {scale.dtype}, not torch.float32; give the scales that were saved with the codes"
    if scale.is_meta:
        return None
    if not torch.isfinite(scale).all():
        return "weight_scale holds NaN or infinity, which draws a black picture; replace the checkpoint"
    if not (scale > 0).all():
        return f"weight_scale holds {float(scale.min()):g}, where scales are positive; replace the checkpoint"
    return None


def why_held(module: nn.Module) -> str | None:
    """Why the weights of a converted module cannot be replaced at the moment, or None."""
    if any(p.is_meta for p in module.parameters()):
        return "they are moved layer by layer (sequential offload); call pipe.remove_all_hooks() first"
    if _streamed(module):
        return "group offload holds copies of them; take it off the transformer first"
    return None
