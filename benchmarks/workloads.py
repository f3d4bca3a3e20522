"""Pipelines of the real architectures, random weights: right for speed, memory and numerical error, not pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)


@dataclass(frozen=True)
class Workload:
    """A pipeline without text encoders, and the arguments of one call of it."""

    name: str
    pipe: Any
    arguments: Callable[[int, int, int], dict[str, Any]]
    """(width, height, batch) -> keyword arguments with random embeddings."""


def _transformer(kind: Any, **config: Any) -> Any:
    """Weights are made on the GPU, in bf16, so that 12 billion of them take seconds."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = kind(**config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def _vae() -> AutoencoderKL:
    with torch.device("cuda"):
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        )
    return vae.to(torch.bfloat16).eval().requires_grad_(False)


def flux_1_dev(**config: Any) -> Workload:
    """FLUX.1-dev; `config` changes the transformer, for example its depth."""
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=_transformer(FluxTransformer2DModel, guidance_embeds=True, **config),
    )

    def arguments(width: int, height: int, batch: int) -> dict[str, Any]:
        bf = {"device": "cuda", "dtype": torch.bfloat16}
        return {
            "prompt_embeds": torch.randn(batch, 512, 4096, **bf),
            "pooled_prompt_embeds": torch.randn(batch, 768, **bf),
            "width": width,
            "height": height,
            "guidance_scale": 3.5,
        }

    return Workload("flux.1-dev", pipe, arguments)


def z_image_turbo(**config: Any) -> Workload:
    """Z-Image-Turbo; `config` changes the transformer, for example its depth."""
    transformer = _transformer(ZImageTransformer2DModel, **config)
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        token.data.normal_()
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )

    def arguments(width: int, height: int, batch: int) -> dict[str, Any]:
        captions = [torch.randn(200, 2560, device="cuda", dtype=torch.bfloat16) for _ in range(batch)]
        return {"prompt_embeds": captions, "width": width, "height": height, "guidance_scale": 0.0}

    return Workload("z-image-turbo", pipe, arguments)


WORKLOADS: dict[str, Callable[[], Workload]] = {"flux.1-dev": flux_1_dev, "z-image-turbo": z_image_turbo}
