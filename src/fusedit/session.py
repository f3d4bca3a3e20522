"""Session: one fused model serving one pipeline; decides for each call whether the fused forward or stock runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fusedit.calibration import calibrate
from fusedit.errors import UsageError
from fusedit.float8 import choice, conversion
from fusedit.lora import fused as fused_loras
from fusedit.lora.watching import Watcher
from fusedit.models import FusedModel
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.runtime.counters import Counters
from fusedit.runtime.hoist import Run
from fusedit.runtime.homes import unpack
from fusedit.runtime.inspect_module import inner_reason
from fusedit.runtime.install import FusedForward, find, install, uninstall


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _foreign_weights(module: nn.Module) -> bool:
    """Whether an accelerated pipeline, not the user, put e4m3 weights there."""
    made = conversion.conversion_of(module)
    return made is not None and made.originals != "checkpoint"


def _abandoned(module: nn.Module) -> None:
    if _foreign_weights(module):
        raise UsageError(
            f"the weights of this {type(module).__name__} were made e4m3 for an accelerated pipeline that is gone; "
            "call fusedit.accelerate() on this one, with plan 'fp8' or, for the original weights, 'exact'"
        )


class Session:
    """The life of one rewrite set on one module for one pipeline.

    Args:
        model: the FusedModel subclass that serves the module.
        module: the stock module.
        plan: what to switch on.
        refused: why every call is left to stock, if so; then the module need not be what `model` knows.
        wanted: path -> precision of the linear layers that are to be e4m3.
        originals: where their weights go, see `fusedit.float8.conversion`.
        without: rewrites of the plan that do not apply here.
    """

    def __init__(
        self,
        model: type[FusedModel],
        module: nn.Module,
        plan: Plan,
        *,
        refused: str | None = None,
        wanted: Mapping[str, str] | None = None,
        originals: str = "cpu",
        without: Collection[str] = (),
    ) -> None:
        self.module = module
        self.refused = refused
        self.wanted, self.originals = wanted or {}, originals
        self.counters = Counters()
        plan = plan.without(*without)
        self.model = model(module, plan, self.counters)
        on = [r for r in model.rewrites_of(plan) if r.on(plan) and r.name not in without]
        self.rewrites = [] if refused else on
        self._rounded = model.rounds(plan)
        self._form = None if refused else model.form_of(module)
        self._takes_loras = model.denoiser and not refused
        self._watcher = Watcher(module, self.model.terms) if self.wanted and self._takes_loras else None
        self.paused = 0
        self.called = False
        self._forward: FusedForward | None = None

    def install(self, pipe: Any, progress: Progress) -> None:
        """Convert what is to be converted, then take the forward; nothing is changed where the former fails."""
        if self.difference() and conversion.conversion_of(self.module) is not None:
            conversion.restore(self.module)  # of a pipeline that is gone
        if self.wanted and conversion.conversion_of(self.module) is None:
            seen = calibrate(pipe, self.module, type(self.model), self.wanted, self.model.plan, progress)
            conversion.convert(
                self.module,
                self.wanted,
                self.originals,
                progress=progress,
                samples=seen.samples,
                choices=seen.choices,
                rounded=self._rounded,
            )
        self._count()
        self._forward = install(self.module)
        self._forward.abandoned = _abandoned
        self._forward.sessions[pipe] = self
        if self._takes_loras:
            fused_loras.install(self.module)

    def _count(self) -> None:
        """Say in the counters what became of the rewrite that rounds codes, whichever session converted the weights."""
        name = self.model.rounding
        if name not in self._names() or conversion.conversion_of(self.module) is None:
            return
        choices = set(conversion.choices_of(self.module))
        self.counters.forget(name)  # a session that is taken up again has counted before
        if choice.READ in choices:
            self.counters.ran(name)
        for reason in choice.why_nearest(choices):
            self.counters.fell_back(name, reason)

    def difference(self, originals: str | None = None) -> str:
        """What of the weights is not as this session wants it, see `Conversion.difference`; empty where all is.

        Args:
            originals: where their originals are to be; None: where this session wants them.
        """
        made = conversion.conversion_of(self.module) or conversion.suspended(self.module)
        if made is None:
            return "precision" if self.wanted else ""
        return made.difference(self.wanted, self._rounded, originals or self.originals)

    def installed(self, pipe: Any) -> bool:
        fused = find(self.module)
        return fused is not None and fused.sessions.get(pipe) is self

    def uninstall(self, pipe: Any, *, keep_weights: bool = False) -> None:
        """Take this session out; the last one to leave puts the stock forward and the separate weights back.

        Args:
            keep_weights: e4m3 weights stay what they are, for the session that follows.

        Raises:
            RestoreError: the weights cannot be given back; nothing was changed.
            DeviceMemoryError: there is no room for them; nothing was changed.
        """
        fused = self._forward or find(self.module)
        if fused is not None and not any(session is not self for session in fused.sessions.values()):
            given_back = self.wanted and not keep_weights
            if given_back:
                conversion.check_restorable(self.module)
            self.unpack()
            if self._takes_loras:
                fused_loras.uninstall(self.module, last=True)  # before the layers go whose branches fused ones are
            if given_back:
                try:
                    conversion.restore(self.module)
                except BaseException:
                    if self._takes_loras:
                        fused_loras.install(self.module)
                    raise
        elif fused is not None and self._takes_loras:
            fused_loras.uninstall(self.module)
        self.model.forget()
        self._forward = None
        if fused is None:
            return
        if pipe is not None:
            fused.sessions.pop(pipe, None)
        if not fused.sessions:
            uninstall(fused)

    def why_not_restorable(self) -> str | None:
        """Why stock's weights cannot be had, or None."""
        return conversion.why_not_restorable(self.module) if self.wanted else None

    def suspend(self) -> None:
        """Stock's weights for a while, where they were converted.

        Raises:
            RestoreError: they cannot be had; nothing was changed.
            DeviceMemoryError: there is no room for them; nothing was changed.
        """
        if self.wanted:
            self.unpack()
            conversion.suspend(self.module)
        self.paused += 1

    def resume(self) -> None:
        """The converted weights again, of what the layers hold by now."""
        self.paused -= 1
        if self.wanted:
            self.unpack()
            conversion.resume(self.module)

    def unpack(self) -> None:
        """Give packed parameters their own storage again; a later call packs them once more."""
        self.model.unpack()
        unpack(self.module.parameters())  # what a session that left before has packed

    def let_go(self) -> None:
        """Of what is kept for the run that is going on."""
        self.model.cache.clear()

    def called_by_other(self, name: str) -> None:
        """Count a call of a pipeline that is not accelerated.

        Raises:
            UsageError: it would find converted weights in the place of its own.
        """
        if self.wanted and _foreign_weights(self.module):
            raise UsageError(
                f"this {name} shares its {'.'.join(self.model.path)} with an accelerated pipeline whose plan made the "
                "weights e4m3; accelerate it with the same plan, or restore() the other one"
            )
        self.counters.all_fell_back(self._names(), f"called by a {name} that shares this module and is not accelerated")

    def call(self, stock: Callable[..., Any], run: Run | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward: fused where it may, else stock with the reason counted."""
        if self.paused:
            return stock(*args, **kwargs)
        if self.wanted and conversion.conversion_of(self.module) is None:
            raise UsageError(
                f"the weights of {'.'.join(self.model.path)} are stock's at the moment, since another pipeline that "
                "shares them is paused, or could not convert them again; leave its paused() block or accelerate anew"
            )
        self.called = True
        reason = self._why_stock(args, kwargs)
        if reason is not None:
            self.counters.all_fell_back(self._names(), reason)
            made = self.model.run_stock(stock, args, kwargs)
        else:
            self.model.cache.begin(run)
            with torch.no_grad():
                made = self.model.forward(*args, **kwargs)
        if self._watcher is not None and (reason is None or not torch.is_grad_enabled()):  # else it may be training
            self._watcher.look(run, next(_tensors([*args, *kwargs.values()])))
        return made

    def copied_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a copy of the module gets for its attributes."""
        return conversion.copied_state(self.module, state)

    def _names(self) -> list[str]:
        return [rewrite.name for rewrite in self.rewrites]

    def _why_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._form is None:
            return self.refused
        if torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in _tensors([*args, *kwargs.values()]))
            or any(parameter.requires_grad for parameter in self.module.parameters())
        ):
            return "gradients are needed (call under torch.no_grad to use the fused forward)"
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "inside a function transform (vmap, jvp)"
        parameter = next(self.module.parameters())
        if parameter.dtype == torch.float64:
            return "float64"
        if parameter.is_meta:
            return "weights are moved layer by layer (offload)"
        device = parameter.device.type
        if torch.is_autocast_enabled(device):
            return "autocast is on"
        if getattr(self.module, "_compiled_call_impl", None) is not None:
            return "the module was compiled after accelerate()"
        return inner_reason(self.module, self.model.known, self._form) or self.model.needs_stock(args, kwargs)
