"""What an fp8 plan does with the weights of one module: which layers, or why it may not touch them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from fusedit.float8 import conversion, refusals
from fusedit.models._model import FusedModel
from fusedit.models._precision import chosen_precisions
from fusedit.plan import Plan


@dataclass
class Precisions:
    """The answer for one module.

    Attributes:
        wanted: path -> `fp8` or `weights`.
        blocking: why the module cannot be served at all under this plan.
        refused: name -> reason, of rewrites of the tier that do not apply.
        kept: path -> reason, of layers that stay in the model's dtype.
        modulation: path -> precision, of layers that run in one launch where all or none are e4m3.
    """

    wanted: dict[str, str] = field(default_factory=dict)
    blocking: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    modulation: dict[str, str] = field(default_factory=dict)

    def notes(self, name: str) -> list[str]:
        """What stays in the model's dtype, by reason, for the report."""
        return [
            f"{name}: {count} linear layer{'s' if count > 1 else ''} in the model's dtype: {reason}"
            for reason, count in Counter(self.kept.values()).items()
        ]


def precisions(
    module: nn.Module, model: type[FusedModel], plan: Plan, *, others: bool = False, originals: str = "cpu"
) -> Precisions:
    """What `plan` makes of this module.

    Args:
        others: whether other pipelines are accelerated on it, whose weights must stay what they are.
        originals: where the plan's are to go.

    Raises:
        PlanError: the plan names layers that are not there.
    """
    made = Precisions()
    there = conversion.conversion_of(module)
    name = ".".join(model.path)
    fp8 = [rewrite.name for rewrite in model.rewrites_of(plan) if rewrite.tier == "fp8" and rewrite.default]
    lossy = [rewrite.name for rewrite in model.rewrites if rewrite.tier == "fp8" and rewrite.on(plan)]
    if model.precisions and fp8:
        products = f"{fp8[0].partition('.')[0]}.fp8"
        stored = f"{products}_modulation" if f"{products}_modulation" in fp8 else products
        chosen = chosen_precisions(module, model.precisions, plan, {"fp8": products, "weights": stored})
        made.wanted = {path: found.value for path, found in chosen.items() if found.value != "model"}
        if there is not None and there.originals == "checkpoint":
            made.wanted = dict(there.wanted)
        made.kept = {path: found.reason for path, found in chosen.items() if path not in made.wanted}
        if stored != products:
            made.modulation = {path: found.value for path, found in chosen.items() if found.rewrite == stored}
        used = {chosen[path].rewrite for path in made.wanted}
        none = "all of its linear layers stay in the model's dtype"
        made.refused = {rewrite: none for rewrite in (products, stored) if rewrite not in used}
        if not made.wanted:
            made.refused[model.rounding] = none
        elif there is not None and there.originals == "checkpoint":
            made.refused[model.rounding] = "the codes are those of the checkpoint"
    if conversion.suspended(module):
        made.blocking = f"{name} is paused, with stock's weights for a while; leave the paused() block first"
    elif there is None:
        if made.wanted and others:
            made.blocking = f"another pipeline that shares {name} is accelerated in the model's dtype; restore it first"
        elif made.wanted or lossy:
            everywhere = refusals.refusal_there(module)
            reason = everywhere or (refusals.refusal(module) if made.wanted else None)
            if reason is not None:
                made.wanted, made.kept = {}, {}
                made.refused = dict.fromkeys({*fp8, *(lossy if everywhere else ())}, reason)
    elif there.originals == "checkpoint":
        made.blocking = _against_checkpoint(
            plan, name, [r for r in fp8 if r != model.rounding and not plan.enabled(r, "fp8")]
        )
    elif others:
        rounded = model.rounds(plan)
        why = {
            "precision": "converted its weights by another plan; restore that first",
            "rounding": f"has {model.rounding} {_on(not rounded)}, not {_on(rounded)}; give the same",
            "originals": f"has originals={there.originals!r}, not {originals!r}; give the same",
        }.get(there.difference(made.wanted, rounded, originals))
        made.blocking = None if why is None else f"another pipeline that shares {name} {why}"
    return made


def _on(on: bool) -> str:
    return "on" if on else "off"


def _against_checkpoint(plan: Plan, name: str, off: list[str]) -> str | None:
    """Why a plan cannot be had with weights that are e4m3 in the files, or None."""
    if plan.base == "exact":
        return (
            f"the weights of {name} were e4m3 when they were loaded, and plan 'exact' wants the model's own; load the "
            "unquantised model, or use plan 'fp8'"
        )
    if plan.precision["sites"] or plan.precision["default"] != "fp8" or off:
        what = f"{off[0]} on" if off else "precision out of the plan"
        return f"the precision of {name} is that of its checkpoint; leave {what}"
    return None
