"""NaN and infinity: finding them, and saying which weight, step or setting they come from.

Stock diffusers turns NaN into an all-black picture without a word. Here it is an error, always.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusedit.errors import NonFiniteError


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite."""
    known = tensor if tensor.itemsize > 1 else tensor.float()  # torch has no such question for e4m3
    return bool(torch.isfinite(known).all())


def modules_of(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The pipeline's components that have weights, by name."""
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            yield name, component


def bad_weight(pipe: Any) -> str | None:
    """The name of the first parameter or buffer that holds NaN or infinity, such as `vae.decoder.conv_in.weight`."""
    for component, module in modules_of(pipe):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device.type == "meta" or not tensor.is_floating_point():
                continue
            # The sum is one pass without a temporary and cannot miss; only when it is not finite is it looked at twice.
            if not torch.isfinite(tensor.detach().sum(dtype=torch.float32)) and not is_finite(tensor.detach()):
                return f"{component}.{name}"
    return None


def weight_error(name: str, step: int | None = None) -> NonFiniteError:
    """The error for a weight that holds NaN or infinity."""
    return NonFiniteError(
        f"weight {name} holds NaN or infinity, which draws a black picture; replace the checkpoint",
        stage="weights",
        step=step,
    )


def explain(pipe: Any, *, stage: str, step: int | None, steps: int) -> NonFiniteError:
    """An error that names the cause as far as one call can tell: a bad weight, fp16, or the step it appeared in.

    Args:
        pipe: the pipeline that drew.
        stage: `latents` or `pixels`.
        step: zero-based step, None after the loop.
        steps: how many steps there were to be.
    """
    bad = bad_weight(pipe)
    if bad is not None:
        return weight_error(bad, step)
    module = pipe.transformer if stage == "latents" else pipe.vae
    if stage == "latents":
        where = f"the latents hold NaN or infinity after step {(step or 0) + 1} of {steps}"
    else:
        where = "the decoded pixels hold NaN or infinity"
    if getattr(module, "dtype", None) == torch.float16:
        part = "transformer" if stage == "latents" else "vae"
        remedy = f"the {part} overflows in float16: run it in bfloat16 or float32, pipe.{part}.to(torch.bfloat16)"
    else:
        remedy = "no picture was kept; `fusedit compare` tells whether stock shows it too, and which rewrite causes it"
    return NonFiniteError(f"{where}; {remedy}", stage=stage, step=step)
