"""Which components of a pipeline a plan can be laid on, and why the others stay as they are."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import nn

from fusedit.errors import PlanError
from fusedit.models import FusedModel, registry
from fusedit.plan import Plan
from fusedit.runtime.inspect_module import Difference, compiled_by, inner_reason, quantised_by
from fusedit.runtime.install import foreign_forward
from fusedit.runtime.methods import replaced_method


def component(pipe: Any, path: tuple[str, ...]) -> Any:
    """What lies at this path of the pipeline, or None."""
    return reduce(lambda owner, name: getattr(owner, name, None), path, pipe)


def served(module: Any, model: type[FusedModel]) -> bool:
    """Whether the model was written for exactly this class."""
    return type(module) is model.stock_class()


def denoiser_of(module: Any) -> type[FusedModel] | None:
    """The model of a transformer of this class, if there is one."""
    return next((model for model in registry().values() if model.denoiser and served(module, model)), None)


def check_names(plan: Plan) -> None:
    """Refuse a plan with rewrites that are not there, or not in its tier.

    Raises:
        PlanError: it has one.
    """
    known = {rewrite.name: rewrite for model in registry().values() for rewrite in model.rewrites}
    for name, on in plan.rewrites.items():
        if name not in known:
            raise PlanError(f"unknown rewrite {name!r} in the plan; known rewrites: {', '.join(known)}")
        if on and not plan.enabled(name, known[name].tier):
            raise PlanError(
                f"rewrite {name!r} belongs to tier {known[name].tier!r}, not {plan.base!r}; change the base"
            )


def overflows(module: nn.Module, model: type[FusedModel]) -> bool:
    """Whether stock may overflow in the dtype that the module has now."""
    parameter = next(module.parameters(), None)
    return model.overflows and parameter is not None and parameter.dtype == torch.float16


def reachable(pipe: Any, module: nn.Module, model: type[FusedModel]) -> bool:
    """Whether the stock forward of a module that was refused may be called by us, with weights that can be widened."""
    owner = getattr(pipe, model.path[0])
    return quantised_by(owner) is None and compiled_by(owner) is None and not foreign_forward(module)


def refusal(pipe: Any, module: nn.Module, model: type[FusedModel]) -> str | None:
    """Why this module cannot be served in this state, or None."""
    name = ".".join(model.path)
    owner = getattr(pipe, model.path[0])
    replaced = replaced_method(model.stock_class())
    if replaced is not None:  # asked first: a replacement may take other arguments, as another version may
        return replaced
    if model.signature_now() != model.signature:
        import diffusers

        return (
            f"{model.stock_class().__name__}.forward of diffusers {diffusers.__version__} takes other arguments than "
            "the version this was written against; install diffusers 0.42"
        )
    quantiser = quantised_by(owner)
    if quantiser is not None:
        return f"{name} is already quantised by {quantiser}; load the unquantised weights to accelerate it"
    compiled = compiled_by(owner)
    if compiled is not None:
        return f"{name} is already compiled by {compiled}; accelerate the pipeline instead of compiling it"
    if foreign_forward(module):
        return f"the forward of {name} was replaced by something else; undo that first"
    reason = model.refuse(module)
    if reason is not None:
        return reason
    inner = inner_reason(module, model.known, model.form_of(module))
    return inner if isinstance(inner, Difference) else None  # the others may pass: each call asks anew


def why_off(plan: Plan, rewrite: str) -> str:
    """Why a rewrite that the plan leaves off is off."""
    return "switched off by the plan" if rewrite in plan.rewrites else "off unless a plan names it"
