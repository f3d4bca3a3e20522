"""The LoRA layers of one module: found, put around its linear layers and taken away again. They are of peft's own
classes, so that every call of diffusers and peft sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusedit.lora.making import Change, Maker, description, is_float8
from fusedit.lora.paths import place, submodule

_PACKAGES: Final = ("torch", "diffusers", "fusedit")
# What a peft LoRA layer knows of each of its adapters.
_OF_ADAPTER: Final = (
    "r",
    "lora_alpha",
    "scaling",
    "lora_dropout",
    "lora_A",
    "lora_B",
    "lora_magnitude_vector",
    "use_dora",
    "use_rslora",
    "lora_bias",
    "lora_variant",
)


def tuner_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """(path, layer) of every adapter layer of peft in this module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: list[tuple[str, Any]] = []
    stack = [("", module)]
    while stack:
        path, child = stack.pop()
        inner = child._modules
        if isinstance(child, BaseTunerLayer):
            found.append((path, child))
            inner = {"base_layer": inner.get("base_layer")}  # in what else it has there are none
        prefix = f"{path}." if path else ""
        stack += [(prefix + key, below) for key, below in reversed(inner.items()) if below is not None]
    return found


def adapters_in(layer: Any) -> set[str]:
    """Names of the adapters that this layer of peft has."""
    return set(layer._get_available_adapters())


def why_not(module: nn.Module, path: str, change: Change) -> str | None:
    """Why the layer at this path, whose shape fits, cannot take this change; None: it can."""
    from peft.tuners.lora import Linear

    found: Any = submodule(module, path)
    layer = found
    if hasattr(found, "base_layer"):
        if type(found) is not Linear:
            return f"it is a {type(found).__name__} of peft already"
        if found.merged:
            names = ", ".join(map(repr, found.merged_adapters))
            return f"LoRA {names} is fused into it, beside which peft runs no other; call pipe.unfuse_lora() first"
        layer = found.base_layer
    if not isinstance(layer, nn.Linear) or type(layer).__module__.partition(".")[0] not in _PACKAGES:
        return f"it is a {type(layer).__module__}.{type(layer).__name__}; load it with pipe.load_lora_weights()"
    if layer.weight.is_meta:
        return "its weights are not there (sequential offload); load the LoRA before that is switched on"
    if change.layer.magnitude is not None and is_float8(layer.weight) and not hasattr(layer, "dequantize"):
        return "DoRA needs the layer's own weights, and float8 codes alone do not give them"
    return None


class Injection:
    """One adapter put into one module, all of it or nothing.

    `stage` makes the tensors, where memory may run out; `put` changes the module and cannot leave it half changed.

    Args:
        module: a diffusers model or transformers text encoder.
        name: of the adapter; not taken.
        changes: module path -> change; each passed `why_not`.
        scale: the LoRA's own.
    """

    def __init__(self, module: nn.Module, name: str, changes: Mapping[str, Change], scale: float) -> None:
        self.module, self.name, self.changes, self.scale = module, name, changes, scale
        self._fresh: list[tuple[str, Any, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def stage(self) -> None:
        """Make every LoRA layer beside the module, in the dtype of the layer that it is for."""
        self.config = description(self.changes)
        maker = Maker(self.name, self.config)
        compute = _dtype_of(self.module)
        with torch.inference_mode(False), torch.no_grad():
            for path, change in self.changes.items():
                found: Any = submodule(self.module, path)
                made = maker.layer(getattr(found, "base_layer", found), change, compute)
                self._fresh.append((path, found, made))

    def put(self) -> None:
        """Put them in, active beside those that are active already."""
        there = [layer for _, layer in tuner_layers(self.module)]
        names = [*(there[0].active_adapters if there else ()), self.name]
        changed = []
        try:
            for path, found, made in self._fresh:
                if hasattr(found, "base_layer"):
                    self._join(found, made)
                    changed.append(found)
                else:
                    self._replace(path, found, made)
                    made._active_adapter = names  # no more: it was made frozen
                    changed.append(made)
            self._register()
            self._activate(there, names)
        except BaseException:
            self.take_back()
            raise
        self._fresh.clear()
        for layer in changed:
            layer.set_scale(self.name, self.scale)

    def take_back(self) -> None:
        """Undo `put`, whole or halfway; every object that was there is there again."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, path: str, found: nn.Module, made: nn.Module) -> None:
        parent, key = place(self.module, path)
        self._undo.append(lambda: setattr(parent, key, found))
        setattr(parent, key, made)

    def _join(self, found: Any, made: Any) -> None:
        """Move the adapter of a LoRA layer just made into the one that is there."""

        self._undo.append(lambda: _forget(found, self.name))
        for attribute in _OF_ADAPTER:
            entries = getattr(made, attribute)
            if self.name in entries:
                getattr(found, attribute)[self.name] = entries[self.name]

    def _register(self) -> None:
        space = self.module.__dict__
        for attribute in ("peft_config", "_hf_peft_config_loaded"):
            if attribute in space:
                self._undo.append(lambda a=attribute, value=space[attribute]: space.__setitem__(a, value))  # type: ignore[misc]
            else:
                self._undo.append(lambda a=attribute: space.pop(a, None))  # type: ignore[misc]
        space["peft_config"] = {**space.get("peft_config", {}), self.name: self.config}
        space["_hf_peft_config_loaded"] = True

    def _activate(self, layers: list[Any], names: list[str]) -> None:
        for layer in layers:
            self._undo.append(lambda a=layer, was=layer._active_adapter: setattr(a, "_active_adapter", was))  # type: ignore[misc]
            layer.set_adapter(names, inference_mode=True)


@dataclass(frozen=True)
class Settings:
    """Which adapters of one layer of peft are active, and how strongly; what `set_loras` changes."""

    layer: Any
    active: Any
    disabled: bool
    scaling: dict[str, float]
    gradients: tuple[tuple[nn.Parameter, bool], ...]

    @classmethod
    def of(cls, layer: Any) -> Settings:
        own = (p for name in layer.adapter_layer_names for p in getattr(layer, name).parameters())
        gradients = tuple((p, p.requires_grad) for p in own)
        return cls(layer, layer._active_adapter, layer._disable_adapters, dict(layer.scaling), gradients)

    def put_back(self) -> None:
        self.layer._active_adapter, self.layer._disable_adapters = self.active, self.disabled
        self.layer.scaling.update(self.scaling)
        for p, wanted in self.gradients:
            p.requires_grad_(wanted)


def eject(module: nn.Module, name: str) -> None:
    """Take an adapter out. A layer that has no other is the very layer again that it was before any."""
    for path, layer in tuner_layers(module):
        own = adapters_in(layer)
        if own <= {name}:
            _forget(layer, name)  # so that nobody who holds the layer holds the matrices
            parent, key = place(module, path)
            setattr(parent, key, layer.base_layer)
            continue
        layer.set_adapter([other for other in layer.active_adapters if other != name], inference_mode=True)
        if name in own:
            layer.delete_adapter(name)
    space = module.__dict__
    left = {other: config for other, config in space.get("peft_config", {}).items() if other != name}
    if left:
        space["peft_config"] = left
    else:
        for attribute in ("peft_config", "_hf_peft_config_loaded"):
            space.pop(attribute, None)


def _forget(layer: Any, name: str) -> None:
    """Take all that a layer has of an adapter; which ones are active stays."""
    for attribute in _OF_ADAPTER:
        entries = getattr(layer, attribute)
        if name in entries:
            del entries[name]


def active_in(module: nn.Module) -> list[str]:
    """Names of the active adapters, as diffusers answers it: those of the first layer."""
    return next((list(layer.active_adapters) for _, layer in tuner_layers(module)), [])


def _dtype_of(module: nn.Module) -> torch.dtype:
    """What the module computes in, for layers that are stored in fewer bits."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point() and not is_float8(p))
    return next(dtypes, torch.bfloat16)
