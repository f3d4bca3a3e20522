"""What control LoRAs change besides adding low-rank layers: norm scales are replaced, the input embedder is widened.

Recorded where diffusers records it, so that its unload_lora_weights(reset_to_overwritten_params=True) undoes it too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fusedit.errors import LoraError
from fusedit.lora.adapters import adapters_in
from fusedit.lora.paths import place

_NORMS: Final = "_transformer_norm_layers"  # parameter -> its value before
_WIDENED: Final = "_overwritten_params"  # parameter -> its value before
_NARROW: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]]] = weakref.WeakKeyDictionary()
"""Module -> path -> the layer that stood there before a wider one."""
_OWNERS: Final[weakref.WeakKeyDictionary[nn.Module, str]] = weakref.WeakKeyDictionary()
"""Module -> the LoRA that overwrote something in it; none where diffusers did."""


def overwritten(module: nn.Module) -> bool:
    """Whether something is replaced or widened."""
    return bool(module.__dict__.get(_NORMS) or module.__dict__.get(_WIDENED))


class Overwrite:
    """Replaces parameters and widens layers of one module.

    Args:
        module: the transformer; nothing of it is overwritten.
        values: parameter -> its new value.
        wider: path of a linear layer -> inputs it gets; the weights of the new ones are zero.
    """

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor], wider: Mapping[str, int]) -> None:
        self.module, self.values, self.wider = module, values, wider
        self._undo: list[Callable[[], None]] = []

    def put(self) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                for path, inputs in self.wider.items():
                    self._widen(path, inputs)
                self._replace()
        except BaseException:
            self.take_back()
            raise

    def keep(self, name: str) -> None:
        """It is done and stays until LoRA `name` is unloaded."""
        if self.values or self.wider:
            _OWNERS[self.module] = name
        self._undo.clear()

    def take_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _widen(self, path: str, inputs: int) -> None:
        parent, key = place(self.module, path)
        old: Any = getattr(parent, key)
        new = _widened(old, inputs)
        config: Any = getattr(self.module, "config", None)
        was = config.in_channels if path == "x_embedder" else None

        def undo() -> None:
            setattr(parent, key, old)
            if was is not None:
                config.in_channels = was
            self.module.__dict__.pop(_WIDENED, None)
            _NARROW.pop(self.module, None)

        self._undo.append(undo)
        setattr(parent, key, new)
        if was is not None:
            config.in_channels = inputs  # as diffusers does: pipelines read it
        kept = {f"{path}.{name}": p.data for name, p in old.named_parameters()}
        self.module.__dict__[_WIDENED] = self.module.__dict__.get(_WIDENED, {}) | kept
        _NARROW.setdefault(self.module, {})[path] = old

    def _replace(self) -> None:
        if not self.values:
            return
        parameters = {name: self.module.get_parameter(name) for name in self.values}
        kept = {name: p.detach().clone() for name, p in parameters.items()}

        def undo() -> None:
            _put_back(self.module)

        self._undo.append(undo)
        self.module.__dict__[_NORMS] = kept
        for name, p in parameters.items():
            p.copy_(self.values[name])


def check_resettable(module: nn.Module, name: str) -> None:
    """Refuse to unload LoRA `name` while another one sits on a layer that it widened.

    Raises:
        LoraError: there is one.
    """
    if _OWNERS.get(module) != name:
        return
    for parameter in module.__dict__.get(_WIDENED) or {}:
        path = parameter.rpartition(".")[0]
        layer: Any = module.get_submodule(path)
        others = sorted(adapters_in(layer) - {name}) if hasattr(layer, "base_layer") else []
        if others:
            raise LoraError(
                f"LoRA {others[0]!r} was made for the {path} that {name!r} has widened; unload that one first"
            )


def reset(module: nn.Module, name: str) -> None:
    """Undo what LoRA `name`, whose layers are gone, has overwritten; what diffusers has, once no LoRA is left."""
    owner = _OWNERS.get(module)
    if not overwritten(module) or (owner != name if owner is not None else module.__dict__.get("peft_config")):
        return
    _OWNERS.pop(module, None)
    _put_back(module)
    narrow = _NARROW.pop(module, {})
    for name, weight in (module.__dict__.pop(_WIDENED, None) or {}).items():
        path, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        parent, key = place(module, path)
        now: Any = getattr(parent, key)
        before = narrow.get(path)
        if before is None or before.weight.device != now.weight.device or before.weight.dtype != now.weight.dtype:
            before = _narrowed(now, weight.shape[1])  # it was moved or converted in the meantime
        setattr(parent, key, before)
        if path == "x_embedder":
            module.config.in_channels = weight.shape[1]  # type: ignore[union-attr]


def _put_back(module: nn.Module) -> None:
    with torch.no_grad():
        for name, value in (module.__dict__.pop(_NORMS, None) or {}).items():
            module.get_parameter(name).copy_(value)


def _widened(old: Any, inputs: int) -> nn.Linear:
    new = nn.Linear(inputs, old.out_features, bias=False, device="meta")
    weight = old.weight.new_zeros(old.out_features, inputs)
    weight[:, : old.in_features] = old.weight
    new.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    return new.train(old.training)


def _narrowed(wide: Any, inputs: int) -> nn.Linear:
    new = nn.Linear(inputs, wide.out_features, bias=False, device="meta")
    new.weight = nn.Parameter(wide.weight.detach()[:, :inputs].clone(), requires_grad=wide.weight.requires_grad)
    new.bias = wide.bias
    return new.train(wide.training)
