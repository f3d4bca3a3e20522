"""A LoRA on an embedded model's transformer: where it sits, what of it learns, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

RANK = 8  # about 0.3 million weights, 0.65 MB in bf16
ADAPTER = "default"
PARTS = ("transformer", "text_encoder", "text_encoder_2")
# Attention and feed-forward layers of every block. A regular expression, because as a name `proj_out` would also mean
# tiny-flux's last layer.
TARGETS = {
    "tiny-flux": r"(single_)?transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)",
    "tiny-z-image": r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)"
    r"|feed_forward\.w[123])",
}


def add_lora(pipe: DiffusionPipeline, name: str, rank: int = RANK) -> nn.ModuleDict:
    """Put a LoRA that does nothing yet on PIPE's transformer; return the transformer and its text encoders.

    Only the LoRA's weights want a gradient, and alpha equals the rank, so that the file needs no alpha.
    """
    modules = nn.ModuleDict({part: getattr(pipe, part) for part in PARTS if hasattr(pipe, part)}).requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=True, target_modules=TARGETS[name])
    pipe.transformer.add_adapter(config, adapter_name=ADAPTER)
    return modules


def frozen_names(modules: nn.ModuleDict) -> frozenset[str]:
    """Name the parameters that stay as they are: all but the LoRA's."""
    return frozenset(name for name, weight in modules.named_parameters() if not weight.requires_grad)


@torch.no_grad()
def save_lora(pipe: DiffusionPipeline, file: Path, metadata: dict[str, str]) -> None:
    """Write PIPE's LoRA as diffusers does (`transformer.<layer>.lora_A.weight`), in bf16, with METADATA."""
    layers = get_peft_model_state_dict(pipe.transformer, adapter_name=ADAPTER)
    layers = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in layers.items()}

    def save(weights: dict[str, torch.Tensor], path: Any) -> None:
        save_file(weights, path, metadata={"format": "pt", **metadata})

    pipe.save_lora_weights(file.parent, transformer_lora_layers=layers, weight_name=file.name, save_function=save)
