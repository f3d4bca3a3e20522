"""One pipeline call with random embeddings, watched at the end of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OnStep = Callable[[int, torch.Tensor], torch.Tensor | None]
"""(step, its latents) -> latents to go on with instead, or None."""


def call(pipe: Any, arguments: dict[str, Any], steps: int, on_step: OnStep, seed: int = 0) -> None:
    def ended(_pipe: Any, step: int, _time: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        other = on_step(step, kwargs["latents"])
        return kwargs if other is None else {"latents": other}

    pipe(
        **arguments,
        num_inference_steps=steps,
        output_type="latent",
        generator=torch.Generator().manual_seed(seed),
        callback_on_step_end=ended,
    )


def plain_call(pipe: Any, arguments: dict[str, Any], steps: int) -> None:
    call(pipe, arguments, steps, lambda _step, _latents: None)
