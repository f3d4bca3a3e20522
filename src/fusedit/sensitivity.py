"""sensitivity(): how much each linear layer's precision adds to the error of the transformer's output.

The transformer's own inputs are recorded in a run of the stock pipeline. Then the layers of one group at a time are
made e4m3, the stock forward runs on those inputs, and its output is compared with the one before. Errors of groups are
nearly independent, so their squares add up: the share of a group is its square of the sum of all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fusedit.errors import ArgumentError, PlanError, UnsupportedPipelineError
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.request import Request

if TYPE_CHECKING:
    from fusedit.calibration import Calibration

GROUPS: Final = ("role", "block", "layer")
"""How layers are put together: by what they are in every block, by block, or each for itself."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Group:
    """Layers that were made e4m3 together.

    Attributes:
        name: a pattern over their paths, as a plan's `precision.sites` takes it.
        precision: what the plan gives them; two, where it differs.
        layers: how many.
        weights: numbers in all of them.
        error: relative L2 of the transformer's output, the median over the recorded steps.
        share: of the sum of squares over all groups, from 0 to 1.
    """

    name: str
    precision: str
    layers: int
    weights: int
    error: float
    share: float


@dataclass(frozen=True)
class Sensitivity:
    """The answer.

    Attributes:
        model: class of the transformer.
        plan: as JSON data.
        by: one of GROUPS.
        steps: which denoising steps were recorded, zero-based.
        groups: the worst first.
        total: relative L2 with all layers of the plan at once.
        rounding: how the codes were chosen, in words.
        kept: pattern-free path -> reason, of layers that the plan leaves in the model's dtype.
        modulation: path -> precision, of layers that run in one launch where all or none are e4m3.
    """

    model: str
    plan: Mapping[str, Any]
    by: str
    steps: tuple[int, ...]
    groups: tuple[Group, ...]
    total: float
    rounding: str
    kept: Mapping[str, str]
    modulation: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "plan": dict(self.plan),
            "groups": [vars(group) for group in self.groups],
            "kept": dict(self.kept),
            "modulation": dict(self.modulation),
        }

    def better(self, count: int) -> Plan:
        """The plan with the `count` worst groups in the model's dtype."""
        plan = Plan.from_dict(dict(self.plan))
        sites = {**plan.precision["sites"], **{group.name: "model" for group in self.groups[:count]}}
        return Plan.from_dict({**plan.to_dict(), "precision": {"default": plan.precision["default"], "sites": sites}})

    def drawback(self, count: int) -> str:
        """What `better(count)` costs in speed, where it takes only some of the layers that run in one launch; or ""."""
        names = [group.name for group in self.groups[:count]]
        own = [
            path
            for path, value in self.modulation.items()
            if value == "model" or any(fnmatchcase(path, name) for name in names)
        ]
        if len(own) in (0, len(self.modulation)):
            return ""
        return (
            f"this plan has {len(own)} of {len(self.modulation)} modulation layers in the model's dtype and the others "
            "in e4m3, so that they run one by one instead of in one launch; docs/fp8.md says under 'Precision by site' "
            "how to give all of them the same"
        )


def sensitivity(
    pipe: Any,
    request: Request,
    plan: Plan | str = "fp8",
    *,
    by: str = "role",
    samples: int = 3,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the layers that `plan` makes e4m3, on a stock pipeline, which is left as it was.

    Args:
        request: a picture whose steps give the inputs.
        by: one of GROUPS.
        samples: denoising steps that are recorded, evenly spread.

    Raises:
        ArgumentError: `by` or `samples` is out of range.
        PlanError: the plan quantises nothing here.
        UnsupportedPipelineError: no transformer that is served, or it is converted already.
    """
    from fusedit.calibration import calibrate
    from fusedit.float8 import choice
    from fusedit.float8.conversion import conversion_of, linear_layers
    from fusedit.models._converted import precisions
    from fusedit.served import denoiser_of

    if by not in GROUPS:
        raise ArgumentError(f"by is {by!r}; give one of {', '.join(GROUPS)}")
    if not 1 <= samples <= request.steps:
        raise ArgumentError(f"samples is {samples}; give 1 to {request.steps}, the steps of the run")
    chosen = Plan.of(plan)
    module = getattr(pipe, "transformer", None)
    model = denoiser_of(module)
    if module is None or model is None:
        raise UnsupportedPipelineError(f"{type(pipe).__name__} has no transformer that a file of fusedit.models serves")
    if conversion_of(module) is not None:
        raise UnsupportedPipelineError("the transformer's weights are e4m3 already; give the model with its own")
    found = precisions(module, model, chosen)
    reason = found.blocking or (None if found.kept else next(iter(found.refused.values()), None))
    if reason is not None:
        raise UnsupportedPipelineError(reason)
    if not found.wanted:
        raise PlanError("this plan makes no layer e4m3, so there is nothing to measure; give fp8")
    layers = {path: layer for path, layer in linear_layers(module) if path in found.wanted}
    progress = progress or Progress()
    wanted_steps = sorted({round(i * (request.steps - 1) / max(1, samples - 1)) for i in range(samples)})
    calls = _recorded(pipe, module, request, wanted_steps, progress)
    seen = calibrate(pipe, module, model, found.wanted, chosen, progress)
    groups = _grouped(layers, by)
    with torch.no_grad():
        before = [_output(module, call) for call in calls]
        progress.begin("measuring", len(groups) + 1)
        choices: dict[str, str] = {}

        def error(names: Sequence[str]) -> float:
            with _converted({name: layers[name] for name in names}, found.wanted, seen) as chosen_by:
                choices.update(chosen_by)
                made = [_distance(_output(module, call), old) for call, old in zip(calls, before, strict=True)]
            progress.finish_picture()
            return sorted(made)[len(made) // 2]

        total = error(list(layers))
        errors = {name: error(names) for name, names in groups.items()}
    square = sum(e * e for e in errors.values()) or 1.0
    rows = [
        Group(
            name,
            ", ".join(dict.fromkeys(found.wanted[path] for path in names)),
            len(names),
            sum(layers[path].weight.numel() for path in names),
            errors[name],
            errors[name] ** 2 / square,
        )
        for name, names in groups.items()
    ]
    return Sensitivity(
        type(module).__name__,
        chosen.to_dict(),
        by,
        tuple(wanted_steps),
        tuple(sorted(rows, key=lambda group: -group.error)),
        total,
        "; ".join(choice.sentences(choices.values())),
        found.kept,
        found.modulation,
    )


def _grouped(layers: Mapping[str, nn.Linear], by: str) -> dict[str, list[str]]:
    """Pattern -> paths."""
    made: dict[str, list[str]] = {}
    for path in layers:
        number = _NUMBER.search(path)
        if by == "layer" or number is None:
            name = path
        elif by == "role":
            name = f"{path[: number.start()]}*{path[number.end() :]}"
        else:
            name = f"{path[: number.end()]}.*"
        made.setdefault(name, []).append(path)
    return made


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _recorded(pipe: Any, module: nn.Module, request: Request, steps: Sequence[int], progress: Progress) -> list[Call]:
    """The transformer's arguments at these steps of a stock run (its first call of each step)."""
    from fusedit.drawing import draw

    calls: list[Call] = []
    done = 0

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if done in steps and len(calls) == list(steps).index(done):
            calls.append((_copied(args), _copied(kwargs)))

    def on_step(now: int, total: int) -> None:
        nonlocal done
        done = now
        progress.step(now, total)

    progress.begin("recording", 1)
    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        draw(pipe, request, on_step=on_step)
    finally:
        hook.remove()
    progress.finish_picture()
    return calls


def _copied(value: Any) -> Any:
    """The same arguments, which nobody writes to any more."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value


def _output(module: nn.Module, call: Call) -> list[torch.Tensor]:
    stock: Callable[..., Any] = type(module).forward
    made = stock(module, *call[0], **{**call[1], "return_dict": False})[0]
    return [t.float() for t in (made if isinstance(made, list | tuple) else [made])]


def _distance(made: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Relative L2; inf where the made one is not finite."""
    square = sum(float((a - b).double().square().sum()) for a, b in zip(made, right, strict=True))
    norm = sum(float(b.double().square().sum()) for b in right)
    return math.sqrt(square / norm) if math.isfinite(square) and norm else math.inf if square else 0.0


@contextmanager
def _converted(
    layers: Mapping[str, nn.Linear], wanted: Mapping[str, str], seen: Calibration
) -> Iterator[dict[str, str]]:
    """These layers in their precision inside the block, and the very same weights again behind it.

    Yields:
        path -> how its codes were chosen.
    """
    from fusedit.float8.linear import Float8Linear
    from fusedit.float8.rounding import Rounder

    rounder = Rounder(seen.samples, layers, choices=seen.choices)
    done: list[tuple[Float8Linear, torch.Tensor]] = []
    try:
        for path, layer in layers.items():
            weight, codes = layer.weight.data, rounder.codes(path)
            made = Float8Linear.convert(layer, activations=wanted[path] == "fp8", keep=False, codes=codes)
            done.append((made, weight))
        yield {path: rounder.choice(path) for path in layers}
    finally:
        for made, weight in done:
            made.revert(weight)
