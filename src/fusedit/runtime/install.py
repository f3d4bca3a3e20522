"""Where a module's forward is replaced, on that instance alone, and taken out again.

Other libraries wrap forwards too (accelerate's and diffusers' offload hooks), before or after us, and unwrap them in
any order. So the replacement goes into the innermost place where the stock forward is referenced, and every reference
to it that someone keeps after restore() behaves as the stock forward.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fusedit.runtime.hoist import Run
from fusedit.runtime.homes import unpack
from fusedit.runtime.relaid import put_back

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Session(Protocol):
    """What one pipeline wants of one module; see fusedit.session."""

    def call(
        self, stock: Callable[..., Any], run: Run | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def called_by_other(self, name: str) -> None: ...

    def unpack(self) -> None: ...

    def let_go(self) -> None: ...

    def copied_state(self, state: dict[str, Any]) -> dict[str, Any]: ...


def calling_pipeline() -> DiffusionPipeline | None:
    """The pipeline whose `__call__` is running in this thread, innermost first, or None for a direct call.

    Two pipelines may share one transformer and only one be accelerated; the module alone cannot tell who calls.
    """
    from diffusers import DiffusionPipeline

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__":
            caller = frame.f_locals.get("self")
            if isinstance(caller, DiffusionPipeline):
                return caller
        frame = frame.f_back
    return None


def _run_of(pipe: DiffusionPipeline) -> Run | None:
    scheduler: Any = getattr(pipe, "scheduler", None)
    timesteps = getattr(scheduler, "timesteps", None)
    if not isinstance(timesteps, torch.Tensor) or getattr(scheduler, "num_inference_steps", None) is None:
        return None  # what a scheduler has before set_timesteps() are the time steps of its training
    step = getattr(scheduler, "step_index", None)  # None before the first step of a run
    if step is None:
        step = getattr(scheduler, "begin_index", None)
    version = -1 if timesteps.is_inference() else timesteps._version
    return Run(timesteps, step if isinstance(step, int) else 0, version, getattr(pipe, "_merged_adapters", None))


def _stock_forward(module: nn.Module) -> MethodType:
    return MethodType(type(module).forward, module)


class FusedForward:
    """Callable that stands where the stock forward of a module stood; in deep copies and pickles the stock one is."""

    # Slots, no __dict__: functools.update_wrapper, which hook libraries use, would copy the latter into theirs.
    __slots__ = ("__weakref__", "abandoned", "bound", "module", "sessions", "wrapped")
    __name__ = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.bound = _stock_forward(module)
        self.wrapped = False  # whether a hook held the bound one
        # Asked in calls once all pipelines are gone; raises where they have left weights that are not stock's.
        self.abandoned: Callable[[nn.Module], None] | None = None
        self.sessions: weakref.WeakKeyDictionary[DiffusionPipeline, Session] = weakref.WeakKeyDictionary()

    @property
    def stock(self) -> MethodType:
        """What would run without this: the class's forward of this moment, or the one that a hook had bound."""
        return self.bound if self.wrapped else _stock_forward(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stock)

    @property
    def __code__(self) -> CodeType:  # torch.export asks for it
        return self.stock.__func__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Not self.stock: dynamo cannot trace the making of a method.
            return (
                self.bound(*args, **kwargs) if self.wrapped else type(self.module).forward(self.module, *args, **kwargs)
            )
        if not self.sessions:
            if self.abandoned is not None:
                self.abandoned(self.module)
            return self.as_stock(*args, **kwargs)
        caller = calling_pipeline()
        if caller is None:  # called directly: the pipeline accelerated last
            session: Session | None = list(self.sessions.values())[-1]
            run: Run | None = None
        else:
            session = self.sessions.get(caller)
            run = _run_of(caller)
        if session is None:
            for other in self.sessions.values():
                other.called_by_other(type(caller).__name__)  # raises where stock's weights are not there
            return self.as_stock(*args, **kwargs)
        return session.call(self.as_stock, run, args, kwargs)

    def as_stock(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward on weights that lie as stock has them. Packed ones may stay: that changes no result."""
        put_back(self.module)
        return self.stock(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        copied = memo.get(id(self.module))
        return _stock_forward(self.module if copied is None else copied)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        # Unpickled before the module's attributes are there, so this finds the class's forward, without fusedit.
        return getattr, (self.module, "forward")


class _StockReduce:
    """Stands as `__reduce_ex__` on the module, so that a copy or pickle holds each weight in a storage of its own, with
    stock's strides.

    A pickled view would take its whole packed storage along, three to seven times its size. The next call packs again.
    """

    __slots__ = ("fused",)

    def __init__(self, fused: FusedForward) -> None:
        self.fused = fused

    def __call__(self, protocol: int) -> Any:
        for session in self.fused.sessions.values():
            session.unpack()
        unpack(self.fused.module.parameters())  # what pipelines that are gone have packed or laid
        made: Any = object.__reduce_ex__(self.fused.module, protocol)
        for session in list(self.fused.sessions.values())[:1]:
            made = (*made[:2], session.copied_state(made[2]), *made[3:])
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.get(id(self.fused.module), self.fused.module).__reduce_ex__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.fused.module, "__reduce_ex__")


def _places(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every (holder, attribute) through which a hook library reaches the forward it wrapped."""
    namespace = module.__dict__
    if "_old_forward" in namespace:  # accelerate
        yield module, "_old_forward"
    for reference in getattr(namespace.get("_diffusers_hook"), "_fn_refs", ()):  # diffusers
        yield reference, "forward"
        yield reference, "original_forward"
    if "forward" in namespace:
        yield module, "forward"


def rebind(module: nn.Module, former: type[nn.Module]) -> None:
    """Let hook libraries call the forward of the class that the module has now, where they hold that of the former."""
    for holder, name in list(_places(module)):
        value = getattr(holder, name)
        if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is former.forward:
            setattr(holder, name, _stock_forward(module))


def find(module: nn.Module) -> FusedForward | None:
    """The FusedForward of this module, or None."""
    for holder, name in _places(module):
        value = getattr(holder, name)
        if isinstance(value, FusedForward) and value.module is module:
            return value
    return None


def _is_stock(value: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward


def foreign_forward(module: nn.Module) -> bool:
    """Whether someone else replaced the forward in a way that leaves no reference to the stock one to replace."""
    if find(module) is not None or "forward" not in module.__dict__:
        return False
    return not any(_is_stock(getattr(holder, name), module) for holder, name in _places(module))


def install(module: nn.Module) -> FusedForward:
    """Put a FusedForward where the stock forward is; returns the existing one if there is one."""
    existing = find(module)
    if existing is not None:
        return existing
    fused = FusedForward(module)
    for holder, name in _places(module):
        if _is_stock(getattr(holder, name), module):
            setattr(holder, name, fused)
            fused.wrapped = True
    if not fused.wrapped:
        module.forward = fused
    module.__dict__["__reduce_ex__"] = _StockReduce(fused)
    return fused


def uninstall(fused: FusedForward) -> None:
    """Put the stock forward back wherever the FusedForward stands. References elsewhere fall through to stock."""
    module = fused.module
    module.__dict__.pop("__reduce_ex__", None)
    for holder, name in list(_places(module)):
        if getattr(holder, name) is fused:
            if holder is module and name == "forward":
                del module.__dict__["forward"]
            else:
                setattr(holder, name, fused.bound)
