"""Calibration: what the layers of a transformer read, in a few small pictures that stock draws before conversion.

Codes are rounded for it, see float8/rounding.py. Real prompts and real steps, because made-up ones were measured to be
worse: with noise for the text, rounding gained nothing on tiny-flux. Of each call some tokens are kept, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from fusedit.defaults import request_for
from fusedit.drawing import device_of, silenced
from fusedit.float8.conversion import linear_layers
from fusedit.models import FusedModel
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.request import call_arguments
from fusedit.runtime.branches import without_adapters

Tensor = torch.Tensor
PROMPTS: Final = (
    "a photograph of a red fox in the snow",
    "portrait of an old sailor, oil painting",
    "a bowl of ramen on a wooden table, top view, the sign above says OPEN",
    "a city street at night in the rain, neon lights",
)
STEPS: Final = 8
SIDE: Final = 256
"""Pixels of a picture's side."""
ROWS: Final = 64
"""Tokens that are kept of a call: 2,048 in all, for FLUX.1-dev 6 GB."""
LARGEST_ON_A_CPU: Final = 1 << 28
"""Weights of a transformer that draws on a CPU in seconds."""


@dataclass(frozen=True)
class Calibration:
    """What is known of the inputs of a module's layers.

    Attributes:
        samples: path -> [n, K] of what the layer reads, on the CPU; one tensor for layers that read the same.
        pictures: how many of them come from pictures.
        reason: why none does, or empty.
    """

    samples: Mapping[str, Tensor] = field(default_factory=dict)
    pictures: int = 0
    reason: str = ""

    def words(self) -> str:
        """For a report."""
        if self.reason:
            return f"each code is the nearest one: {self.reason}"
        if not self.pictures:
            return ""
        return f"the codes of {self.pictures} layers are rounded for what these read in {len(PROMPTS)} small pictures"


def calibrate(
    pipe: Any,
    module: nn.Module,
    model: type[FusedModel],
    wanted: Mapping[str, str],
    plan: Plan,
    progress: Progress | None = None,
) -> Calibration:
    """Look at what the layers of `wanted` read; nothing of the pipeline or the module is changed.

    Args:
        pipe: stock, or accelerated by nothing that touches `module`.
        module: its transformer, not converted.
        model: that serves it.
        wanted: path -> `fp8` or `weights`.
        plan: may switch this off.
    """
    stored = [path for path, value in wanted.items() if value == "weights"]
    typical = model.typical(module) if stored else None
    samples = {} if typical is None else dict.fromkeys(stored, typical)
    layers = {path: layer for path, layer in linear_layers(module) if wanted.get(path) == "fp8"}
    if not layers or not plan.enabled(model.rounding, "fp8"):
        return Calibration(samples)
    reason = _refusal(pipe, module, model)
    read: dict[str, Tensor] = {}
    if not reason:
        try:
            read = _drawn(pipe, module, layers, progress or Progress())
        except Exception as error:  # a pipeline may fail in any way, and nearest codes are right, too
            reason = f"drawing pictures for them failed ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    return Calibration(samples | read, len(read), reason)


def _refusal(pipe: Any, module: nn.Module, model: type[FusedModel]) -> str:
    """Why no picture can be drawn for this, or an empty string."""
    if type(pipe).__name__ != model.pipelines[0]:
        return f"{type(pipe).__name__} needs more than a prompt to draw"
    if device_of(pipe).type == "cpu":
        size = sum(p.numel() for p in module.parameters())
        if size > LARGEST_ON_A_CPU:
            return f"drawing with {size:,} weights on a CPU takes too long; move the pipeline to a GPU before that"
    return ""


def _drawn(pipe: Any, module: nn.Module, layers: Mapping[str, nn.Linear], progress: Progress) -> dict[str, Tensor]:
    """Rows of what each layer reads in all pictures."""
    with ExitStack() as stack:
        reader = stack.enter_context(_reading(layers))
        stack.enter_context(without_adapters(module))
        stack.enter_context(_unchanged(pipe.scheduler))
        device = device_of(pipe)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(silenced(pipe))
        progress.begin("looking at what layers read", len(PROMPTS))
        for seed, prompt in enumerate(PROMPTS):
            arguments = call_arguments(pipe, request_for(pipe, prompt, seed, width=SIDE, height=SIDE, steps=STEPS))
            pipe(**arguments, generator=torch.Generator("cpu").manual_seed(seed), output_type="latent")
            progress.finish_picture()
        return reader()


@contextmanager
def _reading(layers: Mapping[str, nn.Linear]) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Inside the block rows of what the layers read are kept; yields what gives them."""
    kept: dict[str, list[Tensor]] = {}
    same: dict[str, str] = {}
    last: tuple[str, Any] = ("", None)
    chance = torch.Generator().manual_seed(0)

    def look(path: str, x: Tensor) -> None:
        nonlocal last
        if last[1] is x:
            same.setdefault(path, last[0])
        else:
            last = (path, x)
        if path in same:
            return
        rows = x.detach().flatten(0, -2)
        chosen = torch.randperm(len(rows), generator=chance)[:ROWS]
        kept.setdefault(path, []).append(rows[chosen.to(rows.device)].to("cpu"))

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, path=path: look(path, args[0]))
        for path, layer in layers.items()
    ]
    try:
        yield lambda: _joined(kept, same, layers)
    finally:
        for hook in hooks:
            hook.remove()


def _joined(
    kept: Mapping[str, list[Tensor]], same: Mapping[str, str], layers: Mapping[str, nn.Linear]
) -> dict[str, Tensor]:
    found = {path: torch.cat(rows) for path, rows in kept.items() if path not in same}
    return {path: found[same.get(path, path)] for path in layers if same.get(path, path) in found}


@contextmanager
def _unchanged(scheduler: Any) -> Iterator[None]:
    """What a call leaves on a scheduler is gone again behind the block."""
    before = dict(vars(scheduler))
    try:
        yield
    finally:
        vars(scheduler).clear()
        vars(scheduler).update(before)
