"""What an fp8 plan does with the weights of one module: which layers, or why it may not touch them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from fusedit.float8 import conversion
from fusedit.models._model import FusedModel
from fusedit.models._precision import chosen_precisions
from fusedit.plan import Plan
from fusedit.report import Refusal


@dataclass
class Precisions:
    """The answer for one module.

    Attributes:
        wanted: path -> `fp8` or `weights`.
        blocking: why the module cannot be served at all under this plan.
        refused: rewrites of the tier that do not apply, with the reason.
        kept: path -> reason, of layers that stay in the model's dtype.
    """

    wanted: dict[str, str] = field(default_factory=dict)
    blocking: str | None = None
    refused: list[Refusal] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def notes(self, name: str) -> list[str]:
        """What stays in the model's dtype, by reason, for the report."""
        return [
            f"{name}: {count} linear layer{'s' if count > 1 else ''} in the model's dtype: {reason}"
            for reason, count in Counter(self.kept.values()).items()
        ]


def precisions(module: nn.Module, model: type[FusedModel], plan: Plan, *, ours: bool) -> Precisions:
    """What `plan` makes of this module.

    Args:
        ours: whether the pipeline's own former plan converted it, so that this one may undo that.

    Raises:
        PlanError: the plan names layers that are not there.
    """
    made = Precisions()
    there = conversion.conversion_of(module)
    name = ".".join(model.path)
    fp8 = [rewrite for rewrite in model.rewrites_of(plan) if rewrite.tier == "fp8"]
    if not model.precisions or not fp8:
        if there is not None and not ours:
            how = conversion.why_not_restorable(module) or "another pipeline that shares it holds them for its plan"
            made.blocking = f"the weights of {name} are e4m3 and plan {plan.base!r} wants the model's own: {how}"
        return made
    names = {"fp8": f"{fp8[0].name.partition('.')[0]}.fp8", "weights": fp8[-1].name}
    chosen = chosen_precisions(module, model.precisions, plan, names)
    made.wanted = {path: found.value for path, found in chosen.items() if found.value != "model"}
    if there is not None and there.originals == "checkpoint":
        if plan.precision["sites"] or plan.precision["default"] != "fp8":
            made.blocking = f"the precision of {name} is that of its checkpoint; leave precision out of the plan"
        made.wanted = dict(there.wanted)
        return made
    if there is not None and not ours and dict(there.wanted) != made.wanted:
        made.blocking = f"another pipeline that shares {name} converted its weights by another plan; restore that first"
        return made
    reason = conversion.refusal(module) if made.wanted and there is None else None
    if reason is not None:
        made.wanted = {}
        made.refused = [Refusal(rewrite.name, reason) for rewrite in fp8 if plan.enabled(rewrite.name, rewrite.tier)]
        return made
    made.kept = {path: found.reason for path, found in chosen.items() if found.value == "model"}
    return made
