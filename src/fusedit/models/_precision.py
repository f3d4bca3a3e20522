"""Which linear layers of a model a plan keeps in e4m3, and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from fusedit.errors import PlanError
from fusedit.float8.conversion import linear_layers
from fusedit.plan import Plan


@dataclass(frozen=True)
class Precision:
    """What the fp8 tier does with the linear layers of a model that a pattern matches; the first match counts.

    Attributes:
        pattern: over paths inside the module, `*` for any text; blocks may be counted from the end, `blocks.-1.*`.
        value: `fp8`, `weights` or `model`; see `fusedit.plan.PRECISIONS`.
        reason: why, where that is `model` or `weights`.
        fixed: why no plan can change that, where none can.
    """

    pattern: str
    value: str
    reason: str = ""
    fixed: str = ""


@dataclass(frozen=True)
class Chosen:
    """The precision of one layer.

    Attributes:
        value: as in Precision.
        reason: why it is the model's own, where it is.
        rewrite: that switches it off.
    """

    value: str
    reason: str
    rewrite: str


def chosen_precisions(
    module: nn.Module, table: Sequence[Precision], plan: Plan, names: Mapping[str, str]
) -> dict[str, Chosen]:
    """Path -> precision of every linear layer of a module under a plan.

    Args:
        table: the model's own rules.
        names: precision in the table -> the rewrite that a plan switches such layers off by.

    Raises:
        PlanError: a pattern of the plan matches no layer.
    """
    sites: dict[str, str] = dict(plan.precision["sites"])
    unused = set(sites)
    tied = _tied(module)
    made = {}
    for path, layer in linear_layers(module):
        names_of = path, _from_the_end(module, path)
        rule = next((rule for rule in table if _matches(names_of, rule.pattern)), _NO_RULE)
        value, reason = rule.value, rule.reason
        if plan.precision["default"] == "model" and value != "model":
            value, reason = "model", "the plan's default"
        for pattern, wanted in sites.items():
            if _matches(names_of, pattern):
                unused.discard(pattern)
                value, reason = wanted, "the plan says so"
        rewrite = names.get(rule.value, names["fp8"])
        if value != "model":
            value, reason = _allowed(value, layer, rule, plan, rewrite, tied)
        made[path] = Chosen(value, reason, rewrite)
    if unused:
        pattern = next(pattern for pattern in sites if pattern in unused)
        raise PlanError(
            f"plan precision of {pattern!r} matches no linear layer of {type(module).__name__}; "
            "`fusedit sensitivity` lists their paths"
        )
    return made


def _from_the_end(module: nn.Module, path: str) -> str:
    """The same path with its block counted from the end of the list."""
    head, _, rest = path.partition(".")
    blocks: Any = module._modules.get(head)
    number, dot, rest = rest.partition(".")
    if not isinstance(blocks, nn.ModuleList) or not number.isdecimal():
        return path
    return f"{head}.{int(number) - len(blocks)}{dot}{rest}"


def _matches(names: tuple[str, str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


_NO_RULE: Final = Precision("*", "model", "no rule names it")


def _allowed(
    value: str, layer: nn.Linear, rule: Precision, plan: Plan, rewrite: str, tied: Collection[int]
) -> tuple[str, str]:
    """This precision, or the model's own and why it has to be that."""
    if not plan.enabled(rewrite, "fp8"):
        return "model", f"{rewrite} is switched off by the plan"
    if rule.fixed:
        return "model", rule.fixed
    if layer.weight.numel() == 0:
        return "model", "it has no weights"
    if id(layer.weight) in tied:
        return "model", "it shares its weight with another module"
    return value, ""


def _tied(module: nn.Module) -> set[int]:
    """Of parameters that several modules have."""
    seen: set[int] = set()
    return {
        id(p)
        for child in module.modules()
        for p in child._parameters.values()
        if p is not None and (id(p) in seen or seen.add(id(p)))  # type: ignore[func-returns-value]
    }
