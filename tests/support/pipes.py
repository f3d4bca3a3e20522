"""Tiny stock pipelines with random weights, and calls that draw latents or pictures with them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    ZImagePipeline,
)

from fusedit.models import registry


def tiny_vae(**changes: Any) -> AutoencoderKL:
    config: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.5,
        "shift_factor": 0.1,
    }
    return AutoencoderKL(**{**config, **changes}).eval()


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def flux_pipe(seed: int = 0, **changes: Any) -> FluxPipeline:
    """A FluxPipeline without text encoders; draw with `flux_call`."""
    torch.manual_seed(seed)
    transformer = registry()["flux"].tiny(**changes)
    pipe = FluxPipeline(
        scheduler=_scheduler(),
        vae=tiny_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_inputs(pipe: Any, batch: int = 1, text: int = 7, seed: int = 1) -> dict[str, Any]:
    config, generator = pipe.transformer.config, torch.Generator().manual_seed(seed)
    dtype = pipe.transformer.dtype
    return {
        "prompt_embeds": torch.randn(batch, text, config.joint_attention_dim, generator=generator).to(dtype),
        "pooled_prompt_embeds": torch.randn(batch, config.pooled_projection_dim, generator=generator).to(dtype),
    }


def flux_guidance(pipe: Any) -> dict[str, Any]:
    """Arguments of real classifier-free guidance against other random embeddings."""
    negative = {f"negative_{name}": value for name, value in flux_inputs(pipe, seed=7).items()}
    return {"true_cfg_scale": 2.0, **negative}


def flux_call(pipe: Any, seed: int = 3, **changes: Any) -> torch.Tensor:
    """Latents [B, tokens, channels] of a few steps at 64x48."""
    arguments: dict[str, Any] = {
        "width": 64,
        "height": 48,
        "num_inference_steps": 3,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
    }
    if "prompt_embeds" not in changes:
        arguments |= flux_inputs(pipe)
    images: torch.Tensor = pipe(**{**arguments, **changes}).images
    return images


def z_image_pipe(seed: int = 0, **changes: Any) -> ZImagePipeline:
    """A ZImagePipeline without text encoder; draw with `z_image_call`."""
    torch.manual_seed(seed)
    transformer = registry()["z_image"].tiny(**changes)
    pipe = ZImagePipeline(
        scheduler=_scheduler(), vae=tiny_vae(), text_encoder=None, tokenizer=None, transformer=transformer
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def z_image_call(pipe: Any, seed: int = 3, lengths: tuple[int, ...] = (7,), **changes: Any) -> torch.Tensor:
    """Latents [B, C, H, W] of a few steps at 64x48; one caption a length."""
    generator = torch.Generator().manual_seed(1)
    width = pipe.transformer.config.cap_feat_dim
    captions = [torch.randn(n, width, generator=generator).to(pipe.transformer.dtype) for n in lengths]
    arguments: dict[str, Any] = {
        "prompt_embeds": captions,
        "width": 64,
        "height": 48,
        "num_inference_steps": 3,
        "guidance_scale": 0.0,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
    }
    images: torch.Tensor = pipe(**{**arguments, **changes}).images
    return images


def parameters_of(pipe: DiffusionPipeline) -> dict[str, tuple[torch.Tensor, int, int, tuple[int, ...]]]:
    """For each parameter: a copy of its value, its offset in its storage, that storage's size, and its strides."""
    found = {}
    for part, module in pipe.components.items():
        if isinstance(module, torch.nn.Module):
            for name, p in module.named_parameters():
                found[f"{part}.{name}"] = (
                    p.detach().clone(),
                    p.storage_offset(),
                    p.untyped_storage().nbytes(),
                    p.stride(),
                )
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 of a against b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def lora_state(
    pipe: Any, rank: int = 4, scale: float = 0.3, seed: int = 0, names: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A LoRA state dict in diffusers' layout for every Linear of the transformer, or for the named ones."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, module in pipe.transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and (not names or any(part in name for part in names)):
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                state[f"transformer.{name}.lora_{part}.weight"] = torch.randn(*shape, generator=generator) * scale
    return state
