"""accelerate(): lays a plan on one diffusers pipeline, in place; Handle: report, pause and restore it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fusedit import ops
from fusedit.cache.prompts import PromptCache
from fusedit.errors import RestoreError, UnsupportedPipelineError
from fusedit.float8 import conversion
from fusedit.float8.conversion import check_originals
from fusedit.lora.record import notes as lora_notes
from fusedit.models import FusedModel, registry
from fusedit.models._converted import precisions
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.report import CacheReport, Refusal, Report, SiteReport
from fusedit.runtime.inspect_module import compiled_by
from fusedit.runtime.install import find
from fusedit.served import check_names, component, overflows, reachable, refusal, served, why_off
from fusedit.session import Session

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_HANDLES: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
_DENOISERS = ("transformer", "transformer_2", "unet", "prior")


class Handle:
    """What accelerate() returns. It does not keep its pipeline alive.

    Attributes:
        plan: the plan in force.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        plan: Plan,
        sessions: list[Session],
        prompts: PromptCache | None,
        refusals: list[Refusal],
        notes: list[str],
    ) -> None:
        self.plan = plan
        self._pipe = weakref.ref(pipe)
        self._name = type(pipe).__name__
        self._sessions = sessions
        self._prompts = prompts
        self._refusals = refusals
        self._notes = notes
        self._active = True

    def report(self) -> Report:
        """What was rewritten and what was refused and why, and how often each rewrite really ran since accelerate()."""
        rewritten = []
        notes = list(self._notes)
        for session in self._sessions:
            counters = session.counters
            for rewrite in session.rewrites:
                reasons = dict(counters.stock[rewrite.name]) if rewrite.name in counters.stock else {}
                rewritten.append(
                    SiteReport(
                        rewrite.name,
                        rewrite.exactness,
                        rewrite.summary,
                        counters.fused[rewrite.name],
                        sum(reasons.values()),
                        reasons,
                        session.called,
                    )
                )
            notes += [f"{'.'.join(session.model.path)}: {what}: {count}" for what, count in counters.events.items()]
            notes += [f"{'.'.join(session.model.path)}: {words}" for words in conversion.summary(session.module)]
            notes += _without_kernels(session)
            if getattr(session.module, "_compiled_call_impl", None) is not None:
                where = ".".join(session.model.path)
                notes.append(f"{where} was compiled after accelerate(); compiled calls run stock and are not counted")
            if self._active and session.module is not self._component(session.model):
                notes.append(f"{'.'.join(session.model.path)} was replaced after accelerate(); the new one runs stock")
        pipe = self._pipe()
        if self._active and pipe is not None:
            notes += lora_notes(pipe)
        if self._prompts is not None and self._prompts.displaced():
            notes.append(
                "encode_prompt was replaced after accelerate(); prompts are kept only where ours is still called"
            )
        return Report(
            pipeline=self._name,
            plan=self.plan.to_dict(),
            rewritten=tuple(rewritten),
            refused=tuple(self._refusals),
            notes=tuple(notes),
            active=self._active,
            caches=tuple(self._caches()),
        )

    def _caches(self) -> Iterator[CacheReport]:
        if self._prompts is not None:
            yield self._prompts.report()
        for session in self._sessions:
            yield from session.model.cache_reports()

    def restore(self) -> None:
        """Make the pipeline bit for bit what it was. Calling it again does nothing.

        Raises:
            RestoreError: the weights that the plan converted are gone, or held by an offload hook; nothing was changed.
            DeviceMemoryError: there is no room for them; nothing was changed.
        """
        self._let_go(())

    def _let_go(self, kept: Collection[nn.Module]) -> None:
        """restore(), but for the weights of these modules, which stay converted."""
        if not self._active:
            return
        pipe = self._pipe()
        self._check_restorable(kept)
        for session in sorted(self._sessions, key=lambda session: not session.wanted):  # first those that may fail
            session.uninstall(pipe, keep_weights=session.module in kept)
        if self._prompts is not None:
            self._prompts.uninstall()
        self._active = False
        if pipe is not None and _HANDLES.get(pipe) is self:
            del _HANDLES[pipe]

    def _check_restorable(self, kept: Collection[nn.Module] = ()) -> None:
        for session in self._sessions:
            shared = self._others(session)
            reason = None if session.module in kept or shared else session.why_not_restorable()
            if reason is not None:
                name = ".".join(session.model.path)
                raise RestoreError(f"the weights of {name} cannot be given back: {reason}; nothing was changed")

    def _others(self, session: Session) -> bool:
        """Whether other pipelines are accelerated on this session's module, which keeps its weights for them."""
        fused = find(session.module)
        return fused is not None and any(other is not session for other in fused.sessions.values())

    def _take_up(self, pipe: DiffusionPipeline) -> None:
        """Undo `_let_go`."""
        _install(pipe, self._sessions, Progress())
        if self._prompts is not None:
            self._prompts.install()
        self._active = True
        _HANDLES[pipe] = self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stock behaviour inside the `with` block, for comparing both in one process. Nests.

        Where the plan converted weights, stock's come back for the block: for FLUX.1-dev that moves 22 GiB twice.

        Raises:
            RestoreError: stock's weights are gone, or held by an offload hook; nothing was changed.
            DeviceMemoryError: there is no room for them; nothing was changed.
        """
        with ExitStack() as stack:
            for session in self._sessions if self._active else ():
                session.suspend()
                stack.callback(session.resume)
            if self._prompts is not None:
                prompts = self._prompts
                prompts.paused += 1
                stack.callback(lambda: setattr(prompts, "paused", prompts.paused - 1))
            yield

    def _keeps(self, originals: str) -> bool:
        """Whether originals lie where they are asked for, if any layer has one."""
        return not any(session.difference(originals) for session in self._sessions)

    def _component(self, model: FusedModel) -> Any:
        return component(self._pipe(), model.path)

    def _is_current(self, pipe: DiffusionPipeline) -> bool:
        """Whether every component is still the one accelerated, its forward still ours, and the prompt cache there."""
        if self._prompts is None:
            prompts = not self.plan.cache["prompts"] or PromptCache.refusal(pipe) is not None
        else:
            prompts = self._prompts.installed()
        return prompts and all(
            self._component(session.model) is session.module and session.installed(pipe) for session in self._sessions
        )

    def __repr__(self) -> str:
        return f"<fusedit.Handle {self._name} plan={self.plan.base!r} {'active' if self._active else 'restored'}>"


def accelerate(
    pipe: DiffusionPipeline,
    plan: Plan | str | Path = "exact",
    *,
    strict: bool = True,
    originals: str = "cpu",
    progress: Progress | None = None,
) -> Handle:
    """Make this pipeline faster in place; every later call of it runs rewritten code.

    Only this object changes: no class and no library function is patched, another pipeline that shares a component
    stays stock, and `Handle.restore()` undoes everything.

    Args:
        pipe: a diffusers pipeline whose denoiser a file of `fusedit.models` serves (`fusedit models` lists them).
        plan: a tier name, a Plan, or the path of a plan JSON.
        strict: raise when the denoiser cannot be served; False accelerates what it can and reports the rest.
        originals: where the weights go that an fp8 plan replaces: `cpu` keeps them there, so that restore() gives them
            back bit for bit; `reload` reads them again from where the model was loaded; `drop` gives them up.
        progress: of a conversion to e4m3, which takes 40 s for FLUX.1-dev; None is silent.

    Returns:
        The handle. Accelerating again with an equal plan returns the same one; another plan replaces it.

    Raises:
        UnsupportedPipelineError: not a diffusers pipeline, or (strict) the denoiser cannot be served.
        PlanError: unknown tier, plan file or rewrite name, or a precision for layers that are not there.
        ArgumentError: an unknown value of `originals`, or `reload` for a model that does not say where it is from.
        RestoreError: another plan converted the weights, and they are gone.
    """
    from diffusers import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline):
        raise UnsupportedPipelineError(
            f"accelerate() takes a diffusers pipeline, not a {type(pipe).__module__}.{type(pipe).__name__}; "
            "load one with DiffusionPipeline.from_pretrained(...) or fusedit.load(...)"
        )
    chosen = Plan.of(plan)
    check_names(chosen)
    check_originals(originals)
    current = _HANDLES.get(pipe)
    if current is not None and current.plan == chosen and current._is_current(pipe) and current._keeps(originals):
        return current
    sessions: list[Session] = []
    refusals: list[Refusal] = []
    notes: list[str] = []
    blocking: list[str] = []
    for model in registry().values():
        module = component(pipe, model.path)
        if module is None or not served(module, model):
            continue
        precision = precisions(module, model, chosen, others=_others(pipe, module), originals=originals)
        reason = refusal(pipe, module, model) or precision.blocking
        rewrites = model.rewrites_of(chosen)
        off = [rewrite.name for rewrite in rewrites if not rewrite.on(chosen)]
        if reason is not None:
            refusals += [Refusal(rewrite.name, reason) for rewrite in rewrites]
            if model.denoiser:
                blocking.append(reason)
        else:
            refusals += [Refusal(name, why_off(chosen, name)) for name in off]
            refusals += [Refusal(name, why) for name, why in precision.refused.items() if name not in off]
            notes += precision.notes(".".join(model.path))
        wanted = any(rewrite.on(chosen) for rewrite in rewrites)
        if wanted and (reason is None or (overflows(module, model) and reachable(pipe, module, model))):
            chosen_layers = {} if reason is not None else precision.wanted
            session = Session(
                model,
                module,
                chosen,
                refused=reason,
                wanted=chosen_layers,
                originals=originals,
                without=precision.refused,
            )
            sessions.append(session)
            notes += model.notes if reason is None else ()
        elif overflows(module, model):
            name = ".".join(model.path)
            notes.append(f"{name} runs in float16, as stock does, which may overflow to black pictures")
    for name in _DENOISERS:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module) and not any(served(module, model) for model in registry().values()):
            how = compiled_by(module)
            reason = (
                f"{name} is already compiled by {how}; accelerate the pipeline before, or instead of, compiling it"
                if how
                else f"no file of fusedit.models serves {name} of class {type(module).__name__}"
            )
            refusals.append(Refusal(name, reason))
            blocking.append(reason)
    denoisers = [model for model in registry().values() if model.denoiser]
    if not any(served(component(pipe, model.path), model) for model in denoisers) and not blocking:
        blocking.append("it has no transformer that a file of fusedit.models serves")
        refusals.append(Refusal("transformer", blocking[0]))
    if strict and blocking:
        supported = ", ".join(sorted({name for model in registry().values() for name in model.pipelines}))
        raise UnsupportedPipelineError(
            f"{type(pipe).__name__} cannot be accelerated: {blocking[0]} "
            f"(supported pipelines: {supported}; strict=False accelerates what it can and reports the rest)"
        )
    _check_given_up(sessions)
    if current is not None:
        current._let_go([session.module for session in sessions if not session.difference()])
    try:
        _install(pipe, sessions, progress or Progress())
    except BaseException:
        if current is not None:
            current._take_up(pipe)
        raise
    prompts = _keep_prompts(pipe, chosen, notes)
    handle = Handle(pipe, chosen, sessions, prompts, refusals, notes)
    _HANDLES[pipe] = handle
    return handle


def _install(pipe: DiffusionPipeline, sessions: list[Session], progress: Progress) -> None:
    """All of these or, where one fails, none."""
    done = []
    try:
        for session in sessions:
            session.install(pipe, progress)
            done.append(session)
    except BaseException:
        for session in done:
            session.uninstall(pipe)
        raise


def _keep_prompts(pipe: DiffusionPipeline, plan: Plan, notes: list[str]) -> PromptCache | None:
    """Install the prompt cache, or note why there is none."""
    if any(isinstance(getattr(pipe, name, None), nn.Module) for name in ("text_encoder", "text_encoder_2")):
        notes.append("text encoders run stock: they do not run once a step, so they take little of a picture's time")
    reason = PromptCache.refusal(pipe) if plan.cache["prompts"] else "switched off by the plan"
    if reason is not None:
        notes.append(f"prompts are encoded anew in every call: {reason}")
        return None
    prompts = PromptCache(pipe)
    prompts.install()
    return prompts


def _without_kernels(session: Session) -> list[str]:
    """A note where the ops of this module run plain torch, and why."""
    if session.refused:
        return []
    parameter = next(session.module.parameters())
    usable, reason = ops.triton_status(parameter.device, parameter.dtype)
    return [] if usable else [f"{'.'.join(session.model.path)}: ops run plain torch ({reason})"]


def _others(pipe: DiffusionPipeline, module: nn.Module) -> bool:
    """Whether other pipelines are accelerated on this module."""
    fused = find(module)
    return fused is not None and any(other is not pipe for other in list(fused.sessions))


def _check_given_up(sessions: list[Session]) -> None:
    """Refuse a plan that needs weights which a former one gave up, before anything is changed."""
    for session in sessions:
        difference = session.difference()
        reason = conversion.why_not_restorable(session.module) if difference else None
        if reason is not None:
            how = ", or give originals='drop' again" if difference == "originals" else ""
            raise RestoreError(
                f"this plan needs the original weights of {'.'.join(session.model.path)}, and {reason}{how}; nothing "
                "was changed"
            )
