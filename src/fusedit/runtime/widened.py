"""The stock forward of a module in float32 where its weights are float16 and would overflow: widened for one call.

Every parameter and buffer in float16, those of LoRA layers too, is float32 while the call runs and then the very same
tensor that it was. Widening writes into no weight; what a hook edits in place while it lasts is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import Parameter

from fusedit.runtime import relaid
from fusedit.runtime.counters import Counters

WIDENED: Final = "float16 weights computed in float32, since float16 overflows to black pictures"
LEFT: Final = "calls that stock computed in float16, which may overflow to black pictures"

_ONE_AT_A_TIME: Final = RLock()
"""Held while weights are widened: another thread would take them for float32."""


def call(
    module: nn.Module, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], counters: Counters
) -> Any:
    """`stock(*args, **kwargs)`, the forward of `module`: in float32 where an argument and the weights are in
    float16, with the result in float16 as stock has it. Counts that, or why it could not be."""
    given = [value for value in (*args, *kwargs.values()) if _is_half(value)]
    if not given or _elsewhere(given[0].device.type):
        return stock(*args, **kwargs)
    with _ONE_AT_A_TIME:
        halves = [t for t in (*module.parameters(), *module.buffers()) if t.dtype == torch.float16]
        if not halves or next(module.parameters()).dtype != torch.float16:
            return stock(*args, **kwargs)
        reason = _why_not(module, [*given, *halves])
        if reason is not None:
            counters.event(f"{LEFT}: {reason}")
            return stock(*args, **kwargs)
        counters.event(WIDENED)
        relaid.put_back(module)  # as stock has them, and now: it knows them by where they lie
        with _widened(halves), _without_autocast(given[0].device.type):
            y = stock(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
    return y.to(torch.float16) if isinstance(y, torch.Tensor) and y.dtype == torch.float32 else y


@contextmanager
def _widened(halves: list[torch.Tensor]) -> Iterator[None]:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for t in halves:
            with torch.inference_mode(t.is_inference()):  # a parameter stays an inference tensor or none, for good
                held = t.data
                wide = held.float()
                kept.append((t, held))
                t.data = wide
        yield
    finally:
        for t, held in kept:
            with torch.inference_mode(held.is_inference()):
                t.data = held


def _why_not(module: nn.Module, tensors: list[torch.Tensor]) -> str | None:
    """Why this module cannot be widened for a call; its weights and the call's arguments in float16 are `tensors`."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are needed"
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    if any(t.is_meta for t in module.parameters()) or any(
        map(_moved, (m for m in module.modules() if m is not module))
    ):
        return "weights are moved layer by layer (offload)"
    plain = (torch.Tensor, Parameter)
    other = next((t for t in tensors if type(t) not in plain or type(t.data) is not torch.Tensor), None)
    return None if other is None else f"a tensor is a {type(other).__name__}"


def _moved(module: nn.Module) -> bool:
    """Whether a hook of diffusers brings this inner module's weights, from where this file does not know."""
    return bool(getattr(module.__dict__.get("_diffusers_hook"), "hooks", None))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _wide(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _elsewhere(kind: str) -> bool:
    """Whether autocast has the products computed in another dtype than float16."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != torch.float16


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Autocast to float16 would narrow what was widened."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
