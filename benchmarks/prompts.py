"""Pipelines without text encoders that take prompts all the same: each text has random embeddings of its own.

So that a plan may draw what it looks at before it converts weights, as it does with a whole pipeline.
"""

from __future__ import annotations

import zlib
from typing import Any

import diffusers
import torch

_stock: Any = diffusers


def random_of(text: str, *shape: int, like: Any) -> torch.Tensor:
    """The same for the same text, in the dtype and on the device of a module."""
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)


class FluxPipeline(_stock.FluxPipeline):  # type: ignore[misc]
    """FLUX.1-dev, every prompt filled up to 512 tokens."""

    def encode_prompt(self, prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        if prompt is not None and kwargs.get("prompt_embeds") is None:
            text, model = prompt if isinstance(prompt, str) else prompt[0], self.transformer
            kwargs["prompt_embeds"] = random_of(text, 1, 512, model.config.joint_attention_dim, like=model)
            kwargs["pooled_prompt_embeds"] = random_of(text, 1, model.config.pooled_projection_dim, like=model)
            prompt = None
        return super().encode_prompt(prompt, *args, **kwargs)


class ZImagePipeline(_stock.ZImagePipeline):  # type: ignore[misc]
    """Z-Image-Turbo, a prompt as long as it is: a token a character."""

    def encode_prompt(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt is not None and kwargs.get("prompt_embeds") is None:
            text, model = prompt if isinstance(prompt, str) else prompt[0], self.transformer
            return [random_of(text, max(1, len(text)), model.config.cap_feat_dim, like=model)], []
        return super().encode_prompt(prompt, *args, **kwargs)
