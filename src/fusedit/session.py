"""Session: one fused model serving one pipeline; decides for each call whether the fused forward or stock runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fusedit.errors import UsageError
from fusedit.float8.conversion import conversion_of, convert, restore
from fusedit.models import FusedModel
from fusedit.plan import Plan
from fusedit.runtime.counters import Counters
from fusedit.runtime.hoist import Run
from fusedit.runtime.homes import unpack
from fusedit.runtime.inspect_module import inner_reason
from fusedit.runtime.install import FusedForward, find, install, uninstall


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class Session:
    """The life of one rewrite set on one module for one pipeline.

    Args:
        model: the FusedModel subclass that serves the module.
        module: the stock module.
        plan: what to switch on.
        refused: why every call is left to stock, if so; then the module need not be what `model` knows.
        wanted: path -> precision of the linear layers that are to be e4m3.
        originals: where their weights go, see `fusedit.float8.conversion`.
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
    ) -> None:
        self.module = module
        self.refused = refused
        self.wanted, self.originals = wanted or {}, originals
        self.counters = Counters()
        self.model = model(module, plan, self.counters)
        self.rewrites = [] if refused else [r for r in model.rewrites_of(plan) if plan.enabled(r.name, r.tier)]
        self._form = None if refused else model.form_of(module)
        self.paused = 0
        self.called = False
        self._forward: FusedForward | None = None

    def install(self, pipe: Any) -> None:
        if self.wanted and conversion_of(self.module) is None:
            convert(self.module, self.wanted, self.originals)
        self._forward = install(self.module)
        self._forward.sessions[pipe] = self

    def installed(self, pipe: Any) -> bool:
        fused = find(self.module)
        return fused is not None and fused.sessions.get(pipe) is self

    def uninstall(self, pipe: Any, *, keep_weights: bool = False) -> None:
        """Take this session out; the last one to leave puts the stock forward and the separate weights back.

        Args:
            keep_weights: e4m3 weights stay what they are, for the session that follows.

        Raises:
            RestoreError: the weights cannot be given back; nothing was changed.
        """
        self.model.forget()
        fused = self._forward or find(self.module)
        self._forward = None
        if fused is None:
            return
        if pipe is not None:
            fused.sessions.pop(pipe, None)
        if not fused.sessions:
            uninstall(fused)
            self.unpack()
            if not keep_weights and self.restorable():
                restore(self.module)

    def restorable(self) -> bool:
        """Whether the module's weights were converted by an accelerated pipeline and can be given back."""
        made = conversion_of(self.module)
        return made is not None and made.restorable

    def suspend(self) -> None:
        """Stock's weights for a while, where they were converted."""
        if self.wanted and not self.paused:
            self.unpack()
            restore(self.module)

    def resume(self) -> None:
        """The converted weights again, of what the layers hold by now."""
        if self.wanted and not self.paused:
            convert(self.module, self.wanted, self.originals)

    def unpack(self) -> None:
        """Give packed parameters their own storage again; a later call packs them once more."""
        self.model.unpack()
        unpack(self.module.parameters())  # what a session that left before has packed

    def called_by_other(self, name: str) -> None:
        """Count a call of a pipeline that is not accelerated.

        Raises:
            UsageError: it would find converted weights in the place of its own.
        """
        if self.wanted and self.restorable():
            raise UsageError(
                f"this {name} shares its {'.'.join(self.model.path)} with an accelerated pipeline whose plan made the "
                "weights e4m3; accelerate it with the same plan, or restore() the other one"
            )
        self.counters.all_fell_back(self._names(), f"called by a {name} that shares this module and is not accelerated")

    def call(self, stock: Callable[..., Any], run: Run | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward: fused where it may, else stock with the reason counted."""
        if self.paused:
            return stock(*args, **kwargs)
        self.called = True
        reason = self._why_stock(args, kwargs)
        if reason is not None:
            self.counters.all_fell_back(self._names(), reason)
            return self.model.run_stock(stock, args, kwargs)
        self.model.cache.begin(run)
        with torch.no_grad():
            return self.model.forward(*args, **kwargs)

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
