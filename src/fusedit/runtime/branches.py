"""What a LoRA layer is made of: the layer it wraps, and the low-rank pairs it adds.

So the wrapped layers can still be packed, and their product be one, with the pairs added behind it. Where a layer of
peft does anything else (DoRA, dropout in training, weights of another dtype, a hook), only calling it tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


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
    if kind.__name__ != "Linear" or _hooked(space):
        return None
    base = space["_modules"].get("base_layer")
    if base is None or type(base).__module__.startswith("peft.") or _hooked(base.__dict__):
        return None
    if layer.disable_adapters:
        return None if layer.merged else Split(base, ())
    if layer.merged:
        return Split(base, ())
    made = []
    for name in layer.active_adapters:
        if name in layer.lora_A and layer.scaling[name] != 0:  # at scale 0 the base alone remains, to the bit
            branch = _branch(layer, name)
            if branch is None:
                return None
            made.append(branch)
    return Split(base, tuple(made))


def split_for_packing(layer: Any) -> Split | None:
    """`split` for one whose product others make: LoRAs that were fused beside e4m3 weights are to be added too."""
    found = split(layer)
    fused = None if found is None else found.base.__dict__.get("branches")
    if found is None or not fused:
        return found
    return Split(found.base, (*(Branch(*pair) for pairs in fused.values() for pair in pairs), *found.branches))


def _hooked(space: dict[str, Any]) -> bool:
    return bool(space["_forward_hooks"] or space["_forward_pre_hooks"] or "forward" in space or "_hf_hook" in space)


def _branch(layer: Any, name: str) -> Branch | None:
    down: Any = layer.lora_A[name]
    up: Any = layer.lora_B[name]
    dropout: Any = layer.lora_dropout[name]
    if name in getattr(layer, "lora_variant", ()) or any(_hooked(part.__dict__) for part in (down, up, dropout)):
        return None
    if not (_plain(down) and _plain(up)):
        return None
    if type(dropout) is not nn.Identity and dropout.training and getattr(dropout, "p", 1.0) > 0:
        return None
    if down.weight.dtype is not up.weight.dtype or down.weight.device != up.weight.device:
        return None
    return Branch(down.weight, up.weight, float(layer.scaling[name]))


def _plain(part: Any) -> bool:
    """Whether half of a pair is a linear layer without a bias."""
    return type(part) is nn.Linear and part._parameters["bias"] is None


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Inside the block the LoRA layers in `module` are as if they were not there, but for merged ones."""
    found = [m for m in module.modules() if type(m).__module__.startswith("peft.") and "_disable_adapters" in vars(m)]
    layers = [layer for layer in found if not getattr(layer, "merged", False)]
    before = [layer.__dict__["_disable_adapters"] for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["_disable_adapters"] = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.__dict__["_disable_adapters"] = was
