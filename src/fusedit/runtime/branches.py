"""What a LoRA layer is made of: the layer it wraps, and the low-rank pairs it adds.

So the wrapped layers can still be packed, and their product be one, with the pairs added behind it. Where a layer of
peft does anything else (DoRA, dropout in training, weights of another dtype, a hook), only calling it tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import nn


def from_peft(module: nn.Module) -> bool:
    """Whether its class is one of peft's."""
    return _peft_class(type(module))  # type: ignore[arg-type]


@cache
def _peft_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "peft"


class Branch(NamedTuple):
    """scale * x down^T up^T: down [R, K], up [N, R]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class Split(NamedTuple):
    """A layer as the one that it wraps (itself, where it wraps none) and what is added to that one's result."""

    base: nn.Module
    branches: tuple[Branch, ...]


def split(layer: Any) -> Split | None:
    """The parts of a linear layer, or None where it has to be called as it is."""
    kind = type(layer)
    if kind.__module__ != "peft.tuners.lora.layer":
        return Split(layer, ())
    space = layer.__dict__
    if kind.__name__ != "Linear" or hooked(space):
        return None
    base = space["_modules"].get("base_layer")
    if base is None or from_peft(base) or hooked(base.__dict__):
        return None
    if layer.disable_adapters:
        return None if layer.merged else Split(base, ())
    if layer.merged:
        return Split(base, ())
    made = []
    parts, scaling = space["_modules"], space["scaling"]
    downs = parts["lora_A"]._modules
    for name in layer.active_adapters:
        if name in downs and scaling[name] != 0:  # at scale 0 the base alone remains, to the bit
            halves = downs[name], parts["lora_B"]._modules[name], parts["lora_dropout"]._modules[name]
            branch = None if name in space.get("lora_variant", ()) else _branch(*halves, scaling[name])
            if branch is None:
                return None
            made.append(branch)
    return Split(base, tuple(made))


_LOOKED: Final[ContextVar[dict[int, tuple[Any, Split | None]] | None]] = ContextVar("looked", default=None)


@contextmanager
def looked_at_once(enabled: bool = True) -> Iterator[None]:
    """Inside, each layer is looked at once: for one call of a model, in which nobody may change its LoRAs.

    With a LoRA on all layers of FLUX a call asks a thousand times what a layer is made of.
    """
    token = _LOOKED.set({} if enabled else None)
    try:
        yield
    finally:
        _LOOKED.reset(token)


def split_for_packing(layer: Any) -> Split | None:
    """`split` for one whose product others make: LoRAs that were fused beside e4m3 weights are to be added too."""
    looked = _LOOKED.get()
    if looked is None:
        return _with_fused(layer)
    known = looked.get(id(layer))
    if known is None:
        known = looked[id(layer)] = layer, _with_fused(layer)  # which keeps the layer, and so its number
    return known[1]


def _with_fused(layer: Any) -> Split | None:
    found = split(layer)
    fused = None if found is None else found.base.__dict__.get("branches")
    if found is None or not fused:
        return found
    return Split(found.base, (*(Branch(*pair) for pairs in fused.values() for pair in pairs), *found.branches))


def hooked(space: dict[str, Any]) -> bool:
    """Whether something runs around the forward of the module that these are the attributes of."""
    return bool(space["_forward_hooks"] or space["_forward_pre_hooks"] or "forward" in space or "_hf_hook" in space)


def _branch(down: Any, up: Any, dropout: Any, scale: float) -> Branch | None:
    """What an adapter adds; by way of the modules' own dictionaries, since this runs thousands of times a step."""
    if hooked(down.__dict__) or hooked(up.__dict__) or hooked(dropout.__dict__):
        return None
    if type(dropout) is not nn.Identity and dropout.training and getattr(dropout, "p", 1.0) > 0:
        return None
    a, b = _weight(down), _weight(up)
    if a is None or b is None or a.dtype is not b.dtype or a.device != b.device:
        return None
    return Branch(a, b, float(scale))


def _weight(part: Any) -> torch.Tensor | None:
    """Of half of a pair, if that is a linear layer without a bias."""
    own = part._parameters
    return own["weight"] if type(part) is nn.Linear and own["bias"] is None else None


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Inside the block the LoRA layers in `module` are as if they were not there, but for merged ones."""
    found = [m for m in module.modules() if from_peft(m) and "_disable_adapters" in vars(m)]
    layers = [layer for layer in found if not getattr(layer, "merged", False)]
    before = [layer.__dict__["_disable_adapters"] for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["_disable_adapters"] = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.__dict__["_disable_adapters"] = was
