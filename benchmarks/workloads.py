"""Pipelines of the real architectures, random weights: right for speed, memory and numerical error, not pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch

from benchmarks import gpu, prompts
from benchmarks.floor import Part, flux_parts, z_image_parts
from fusedit.vae_layout import FLUX_1_DEV

TOKENS: dict[str, int] = {"flux.1-dev": 512, "z-image-turbo": 200}
"""Of a prompt where nothing else is said: FLUX fills every prompt up to 512, Z-Image takes it as long as it is."""
_stock: Any = diffusers


@dataclass(frozen=True)
class Workload:
    """A pipeline without text encoders (see `benchmarks.prompts`), and what one needs to call it.

    Attributes:
        name: as on the command line.
        pipe: a diffusers pipeline.
        arguments: (width, height, batch, prompt tokens of each item) -> keyword arguments with random embeddings.
        parts: (width, height, batch) -> the products and attentions of one step, for the floor.
        prediction: the transformer's output -> what the pipeline hands to its scheduler.
        steps: denoising steps of a picture.
    """

    name: str
    pipe: Any
    arguments: Callable[..., dict[str, Any]]
    parts: Callable[[int, int, int], list[Part]]
    prediction: Callable[[Any], torch.Tensor]
    steps: int

    def with_components(self, **components: Any) -> Workload:
        """The same with other components, in a pipeline of its own that shares the rest."""
        pipe = type(self.pipe)(**{**self.pipe.components, **components})
        pipe.set_progress_bar_config(disable=True)
        return replace(self, pipe=pipe)


def on_gpu(make: Callable[[], Any]) -> Any:
    """Weights are made on the GPU, in bf16, so that 12 billion of them take seconds."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(gpu.DEVICE):
            model = make()
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def _vae() -> Any:
    with torch.device(gpu.DEVICE):
        vae = _stock.AutoencoderKL(**FLUX_1_DEV)
    return vae.to(torch.bfloat16).eval().requires_grad_(False)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=gpu.DEVICE, dtype=torch.bfloat16)


def flux_1_dev(**config: Any) -> Workload:
    """FLUX.1-dev; `config` changes the transformer, for example its depth."""
    transformer = on_gpu(lambda: _stock.FluxTransformer2DModel(guidance_embeds=True, **config))
    pipe = prompts.FluxPipeline(
        scheduler=_stock.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)

    def arguments(width: int, height: int, batch: int, tokens: Sequence[int] | None = None) -> dict[str, Any]:
        return {
            "prompt_embeds": _random(
                batch, max(tokens or [TOKENS["flux.1-dev"]]), transformer.config.joint_attention_dim
            ),
            "pooled_prompt_embeds": _random(batch, transformer.config.pooled_projection_dim),
            "width": width,
            "height": height,
            "guidance_scale": 3.5,
        }

    return Workload(
        "flux.1-dev",
        pipe,
        arguments,
        lambda width, height, batch: flux_parts(transformer.config, batch, width * height // 256, TOKENS["flux.1-dev"]),
        lambda output: output[0],
        28,
    )


def z_image_turbo(**config: Any) -> Workload:
    """Z-Image-Turbo; `config` changes the transformer, for example its depth."""
    transformer = on_gpu(lambda: _stock.ZImageTransformer2DModel(**config))
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        token.data.normal_()
    pipe = prompts.ZImagePipeline(
        scheduler=_stock.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)

    def arguments(width: int, height: int, batch: int, tokens: Sequence[int] | None = None) -> dict[str, Any]:
        captions = [
            _random(length, transformer.config.cap_feat_dim) for length in tokens or [TOKENS["z-image-turbo"]] * batch
        ]
        return {"prompt_embeds": captions, "width": width, "height": height, "guidance_scale": 0.0}

    return Workload(
        "z-image-turbo",
        pipe,
        arguments,
        lambda width, height, batch: z_image_parts(
            transformer.config, batch, width * height // 256, TOKENS["z-image-turbo"]
        ),
        lambda output: -torch.stack([item.float() for item in output[0]]).squeeze(2),
        9,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"flux.1-dev": flux_1_dev, "z-image-turbo": z_image_turbo}
