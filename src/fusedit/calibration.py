"""Calibration: what the layers of a transformer read, in a few small pictures that stock draws before conversion.

Codes are rounded for it, see float8/rounding.py. Real prompts and real steps, because made-up ones were measured to be
worse: with noise for the text, rounding gained nothing on tiny-flux. Of each call some tokens are kept, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusedit.defaults import defaults_for, request_for
from fusedit.drawing import device_of, rest, silenced
from fusedit.float8 import choice
from fusedit.float8.conversion import linear_layers
from fusedit.models import FusedModel
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.request import call_arguments
from fusedit.runtime.branches import without_adapters

Tensor = torch.Tensor
PICTURES: Final = (
    ("a photograph of a red fox in the snow", 1.0),
    ("portrait of an old sailor, oil painting", 0.6),
    ("a bowl of ramen on a wooden table, top view, the sign above says OPEN", 1.4),
    ("a city street at night in the rain, neon lights", 1.0),
)
"""Prompts, and how much of the model's own guidance each is drawn with: modulation reads that, too."""
STEPS: Final = 8
SIDE: Final = 256
"""Pixels of a picture's side."""
ROWS: Final = 64
"""Tokens that are kept of a call: 2,048 in all, for FLUX.1-dev 6 GB."""
_OFFLOAD: Final = ("_all_hooks", "_offload_device", "_offload_gpu_id")
LARGEST_ON_A_CPU: Final = 1 << 28
"""Weights of a transformer that draws on a CPU in seconds."""


@dataclass(frozen=True)
class Calibration:
    """What is known of the inputs of a module's layers.

    Attributes:
        samples: path -> [n, K] of what the layer reads, finite, on the CPU; one tensor for layers that read the same.
        choices: path -> how that makes its codes, for every layer; see float8/choice.py.
    """

    samples: Mapping[str, Tensor]
    choices: Mapping[str, str]


def calibrate(
    pipe: Any,
    module: nn.Module,
    model: type[FusedModel],
    wanted: Mapping[str, str],
    plan: Plan,
    progress: Progress | None = None,
    *,
    refused: str = "",
) -> Calibration:
    """Look at what the layers of `wanted` read; nothing of the pipeline or the module is changed.

    Args:
        pipe: stock, or accelerated by nothing that touches `module`.
        module: its transformer, not converted.
        model: that serves it.
        wanted: path -> `fp8` or `weights`.
        plan: may switch this off.
        refused: why no pictures may be drawn, or empty.
    """
    asked = [path for path, _ in linear_layers(module) if path in wanted] if model.rounds(plan) else []
    reason, read = refused, {}
    if asked and not reason:
        layers = {path: layer for path, layer in linear_layers(module) if path in asked}
        try:
            reason = _refusal(pipe, module, model)
            read = {} if reason else _drawn(pipe, module, layers, progress or Progress())
        except Exception as error:  # a pipeline may fail in any way, and nearest codes are right, too
            said = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            reason = f"drawing pictures for them failed ({said[:200]})"
    finite = {id(rows): bool(rows.isfinite().all()) for rows in read.values()}
    good = {path: rows for path, rows in read.items() if finite[id(rows)]}
    # What modulation reads can be told without a picture, if less well: 0.33 of the error of nearest codes, not 0.15.
    stored = [path for path, value in wanted.items() if value == "weights" and path not in good]
    typical = model.typical(module) if stored else None
    told = {} if typical is None else dict.fromkeys(stored, typical)
    choices = {path: choice.nearest(reason or _why(path, read)) for path in asked}
    return Calibration(told | good, choices | dict.fromkeys(told, choice.MADE_UP) | dict.fromkeys(good, choice.READ))


def _why(path: str, read: Mapping[str, Tensor]) -> str:
    """Why nothing can be rounded for what this layer read in the pictures."""
    return "what they read in the pictures holds NaN or infinity" if path in read else "the pictures did not reach them"


def _refusal(pipe: Any, module: nn.Module, model: type[FusedModel]) -> str:
    """Why no picture can be drawn for this, or an empty string."""
    if model.pipelines[0] not in (cls.__name__ for cls in type(pipe).__mro__):
        return f"{type(pipe).__name__} needs more than a prompt to draw"
    encodes = getattr(pipe.encode_prompt, "__module__", "").startswith("diffusers.")
    missing = [name for name, part in pipe.components.items() if part is None and name.startswith(("text_", "token"))]
    if encodes and missing:
        return f"without {missing[0]} the pipeline cannot draw from a prompt"
    if device_of(pipe).type == "cpu":
        size = sum(p.numel() for p in module.parameters())
        if size > LARGEST_ON_A_CPU:
            return f"drawing with {size:,} weights on a CPU takes too long; move the pipeline to a GPU before that"
    return ""


def _drawn(pipe: Any, module: nn.Module, layers: Mapping[str, nn.Linear], progress: Progress) -> dict[str, Tensor]:
    """Rows of what each layer reads in all pictures."""
    with ExitStack() as stack:
        reader = stack.enter_context(_reading(module, layers))
        stack.enter_context(without_adapters(module))
        stack.enter_context(_unchanged(pipe))
        stack.enter_context(_unchanged(pipe.scheduler))
        device = device_of(pipe)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(silenced(pipe))
        progress.begin("looking at what layers read", len(PICTURES))
        stack.push(lambda kind, *_: rest(pipe) if kind is not None else None)
        own = defaults_for(pipe).guidance
        for seed, (prompt, part) in enumerate(PICTURES):
            guidance = None if own is None else own * part
            request = request_for(pipe, prompt, seed, width=SIDE, height=SIDE, steps=STEPS, guidance=guidance)
            arguments = call_arguments(pipe, request)
            pipe(**arguments, generator=torch.Generator("cpu").manual_seed(seed), output_type="latent")
            progress.finish_picture()
        return reader.rows()


class _Reader:
    """Keeps rows of what layers read.

    Within a call of the module they stay on its device, 150 MB for FLUX.1-dev: moving each by itself would wait for the
    GPU hundreds of times a step.
    """

    def __init__(self) -> None:
        self._now: list[tuple[str, Tensor]] = []
        self._kept: dict[str, list[Tensor]] = {}
        self._same: dict[str, str] = {}
        self._last: tuple[str, Any] = ("", None)
        self._places: dict[int, Tensor] = {}
        self._chance = torch.Generator().manual_seed(0)

    def look(self, path: str, x: Tensor) -> None:
        """A layer is about to read x [..., K]."""
        before, seen = self._last
        if seen is x:
            self._same.setdefault(path, before)
        else:
            self._last = (path, x)
        if path not in self._same:
            rows = x.detach().flatten(0, -2)
            self._now.append((path, rows[self._chosen(len(rows), rows.device)]))

    def _chosen(self, n: int, device: torch.device) -> Tensor:
        """Which of n tokens are kept in this call."""
        if n not in self._places:
            self._places[n] = torch.randperm(n, generator=self._chance)[:ROWS].to(device)
        return self._places[n]

    def end(self) -> None:
        """A call is over."""
        for path, rows in self._now:
            self._kept.setdefault(path, []).append(rows.to("cpu", copy=True))
        self._now, self._last, self._places = [], ("", None), {}

    def rows(self) -> dict[str, Tensor]:
        """Path -> all that were kept."""
        found = {path: torch.cat(rows) for path, rows in self._kept.items()}
        return found | {path: found[first] for path, first in self._same.items()}


@contextmanager
def _reading(module: nn.Module, layers: Mapping[str, nn.Linear]) -> Iterator[_Reader]:
    """What keeps rows of what these layers of the module read inside the block."""
    reader = _Reader()
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, path=path: reader.look(path, args[0]))
        for path, layer in layers.items()
    ]
    hooks.append(module.register_forward_hook(lambda *_: reader.end()))
    try:
        yield reader
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _unchanged(thing: Any) -> Iterator[None]:
    """What a call leaves on a pipeline or scheduler is gone again behind the block, but for offload's own notes."""
    before = dict(vars(thing))
    try:
        yield
    finally:
        kept = {key: value for key, value in vars(thing).items() if key in _OFFLOAD}
        vars(thing).clear()
        vars(thing).update(before | kept)
