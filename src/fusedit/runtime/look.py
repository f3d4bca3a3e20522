"""Look: whether what a forward depends on below its module is as it was in the call before, found in one pass.

Every call has to know whether a LoRA came or went, a weight moved or was written, a hook was set. All of it goes into
flat lists of numbers and names: 3000 tuples living until the next step would start a collection of Python's each time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, NamedTuple

from torch import nn

from fusedit.runtime.branches import from_peft, hooked

_CONTAINERS: Final = (nn.ModuleDict, nn.ParameterDict)
_PLAIN: Final = (nn.Identity, nn.Linear)
_SETTINGS: Final = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters", "use_dora", "lora_variant")


class Look(NamedTuple):
    """Numbers that were never given before, where something differs from the call before; else that call's.

    Attributes:
        state: of what a CUDA graph takes for granted: where tensors lie, and settings. Values may change in place, a
            graph reads them from memory at each replay.
        content: of all of that and of the tensors' versions. What is written through `.data` shows nowhere.
    """

    state: int
    content: int


class Looks:
    """At one module."""

    def __init__(self) -> None:
        self._state: object = None
        self._versions: list[int] = []
        self._last = Look(0, 0)

    def __call__(self, module: nn.Module) -> Look:
        places, settings, versions = _seen(module)
        if (places, settings) != self._state:
            self._state = places, settings
            self._last = Look(self._last.state + 1, self._last.content + 1)
        elif versions != self._versions:
            self._last = self._last._replace(content=self._last.content + 1)
        self._versions = versions
        return self._last


def _seen(module: nn.Module) -> tuple[list[object], list[object], list[int]]:
    """Where each tensor lies, ended by its dtype; every setting of LoRA layers; versions."""
    places: list[object] = []
    settings: list[object] = []
    versions: list[int] = []
    stack = [module]
    while stack:
        child = stack.pop()
        space = child.__dict__
        for tensors in (space["_parameters"], space["_buffers"]):
            if tensors:
                for t in tensors.values():
                    if t is not None:
                        places += (t.data_ptr(), *t.shape, *t.stride(), t.dtype)
                        versions.append(-1 if t.is_inference() else t._version)
        if hooked(space):
            settings.append(len(places))
        inner = space["_modules"]
        if from_peft(child):
            settings.append(repr([space.get(name) for name in _SETTINGS]))
            for part in _filled(inner):
                if type(part) not in _PLAIN and not part._modules:
                    settings += (type(part), part.training, getattr(part, "p", None))  # a dropout, of whatever kind
                stack.append(part)
            continue
        if space.get("branches"):
            settings.append(_branches(space["branches"]))
        elif isinstance(child, nn.Dropout) and child.p > 0:
            settings.append(child.training)
        if inner:
            stack += [c for c in inner.values() if c is not None]
    return places, settings, versions


def _filled(inner: dict[str, Any]) -> Iterator[nn.Module]:
    """Of what is in a LoRA layer that which can matter: of its eleven modules six are containers, one does nothing."""
    for part in inner.values():
        if type(part) in _CONTAINERS:
            if part._parameters:
                yield part
            for child in part._modules.values():
                if type(child) is not nn.Identity or hooked(child.__dict__):
                    yield child
        elif part is not None:
            yield part


def _branches(branches: dict[str, Any]) -> Hashable:
    """LoRAs that were fused beside e4m3 weights: their matrices are no parameters."""
    pairs = (pair for pairs in branches.values() for pair in pairs)
    return tuple((t.data_ptr(), t._version, scale) for *halves, scale in pairs for t in halves)
