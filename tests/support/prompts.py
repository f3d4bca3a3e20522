"""Prompt embeddings of the whole tiny pipelines, and counting what their text encoders really ran."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import CLIPTextModel, Qwen3Model, T5EncoderModel

import fusedit
from fusedit.report import CacheReport


def count_runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Class name of a text encoder -> how often its forward ran. On the class: a hook would keep the cache away."""
    counter: Counter[str] = Counter()
    for kind in (CLIPTextModel, T5EncoderModel, Qwen3Model):

        def forward(self: Any, *args: Any, stock: Any = kind.forward, **kwargs: Any) -> Any:
            counter[type(self).__name__] += 1
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", functools.wraps(kind.forward)(forward))
    return counter


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in flat(item)]


def embeds(pipe: Any, prompt: Any = "red fox", **arguments: Any) -> list[torch.Tensor]:
    """Every tensor that encode_prompt gives, in order."""
    with torch.no_grad():
        return flat(pipe.encode_prompt(prompt, **arguments))


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.device == y.device and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def latents(pipe: Any, prompt: Any = "red fox", **arguments: Any) -> torch.Tensor:
    arguments = {"width": 48, "height": 32, "num_inference_steps": 2, "output_type": "latent", **arguments}
    images: torch.Tensor = pipe(prompt, generator=torch.Generator().manual_seed(0), **arguments).images
    return images


def prompts_of(handle: fusedit.Handle) -> CacheReport:
    return next(cache for cache in handle.report().caches if cache.name == "prompts")
