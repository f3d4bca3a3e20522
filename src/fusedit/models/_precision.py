"""Which linear layers of a model a plan keeps in e4m3, and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fusedit.errors import PlanError
from fusedit.plan import Plan


@dataclass(frozen=True)
class Precision:
    """What the fp8 tier does with the linear layers of a model that a pattern matches; the first match counts.

    Attributes:
        pattern: over paths inside the module, `*` for any text.
        value: `fp8`, `weights` or `model`; see `fusedit.plan.PRECISIONS`.
        reason: why, where that is `model` or `weights`.
    """

    pattern: str
    value: str
    reason: str = ""


@dataclass(frozen=True)
class Chosen:
    """The precision of one layer, and the reason where it is the model's own."""

    value: str
    reason: str


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Path and layer of every linear layer, whatever LoRA layers stand around it: the path is stock's."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not _within_adapter(path):
            yield path.replace(".base_layer", ""), layer


def _within_adapter(path: str) -> bool:
    return any(part in path for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


def chosen_precisions(module: nn.Module, table: Sequence[Precision], plan: Plan, names: Any) -> dict[str, Chosen]:
    """Path -> precision of every linear layer of a module under a plan.

    Args:
        names: precision -> the rewrite that a plan switches it off by.

    Raises:
        PlanError: a pattern of the plan matches no layer.
    """
    sites: dict[str, str] = dict(plan.precision["sites"])
    unused = set(sites)
    made = {}
    for path, layer in linear_layers(module):
        rule = next((rule for rule in table if fnmatchcase(path, rule.pattern)), None)
        value = "model" if rule is None or plan.precision["default"] == "model" else rule.value
        reason = (
            "the plan's default" if rule is not None and value != rule.value else "" if rule is None else rule.reason
        )
        for pattern, wanted in sites.items():
            if fnmatchcase(path, pattern):
                unused.discard(pattern)
                value, reason = wanted, "the plan says so"
        if value != "model" and not plan.enabled(names[value], "fp8"):
            value, reason = "model", f"{names[value]} is switched off by the plan"
        if value != "model" and layer.weight.numel() == 0:
            value, reason = "model", "it has no weights"
        made[path] = Chosen(value, reason or ("no rule names it" if rule is None else ""))
    if unused and plan.base == "fp8":
        pattern = sorted(unused)[0]
        raise PlanError(
            f"plan precision of {pattern!r} matches no linear layer of {type(module).__name__}; "
            "`fusedit sensitivity` lists their paths"
        )
    return made
