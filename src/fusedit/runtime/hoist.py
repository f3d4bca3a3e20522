"""RunCache: values that cannot change between two steps of one run, kept so that no stale one can ever be used.

An entry is used only while the run is the same, every input is the same object at the same version, every parameter it
was computed with is the same object, at the same address and version, and the modules are the same with the same plain
attributes. Entries hold all of them, so that no identity is used again. Tensors without a version counter (inference
mode) are not cached. What none of this shows is a write through `.data`; the one that users do in a run, `fuse_lora()`
and its like, shows in the pipeline (`Run.merged`) and in the LoRA layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from fusedit.runtime.branches import from_peft, split
from fusedit.runtime.form import STANDARD

# True classifier-free guidance alternates two conditionings a step, for text and for positions; eight leave room.
CAPACITY: Final = 8


class Run(NamedTuple):
    """One run of a pipeline's scheduler.

    Attributes:
        timesteps: the scheduler's own tensor, which `set_timesteps` replaces: its identity is the run's.
        step: index of the step that comes next, as far as the scheduler knows. A guess: nothing may rely on it.
        version: of `timesteps`, for a scheduler that writes into the tensor it has; -1 where it has none.
        merged: the pipeline's set of fused LoRAs, which diffusers replaces when one is fused or taken out.
    """

    timesteps: torch.Tensor
    step: int
    version: int
    merged: object

    def goes_on(self, later: Run) -> bool:
        """Whether `later` can be the same run: the same time steps and weights, and not an earlier step."""
        same = self.timesteps is later.timesteps and self.version == later.version and self.merged is later.merged
        return same and later.step >= self.step


@dataclass(frozen=True)
class _Entry:
    kind: object
    key: Hashable
    inputs: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    seen: _Seen
    value: Any


_ATOMS: Final = frozenset({bool, int, float, str, torch.dtype, type(None)})
_COMMON: Final = STANDARD - {"training"}


class _Seen(NamedTuple):
    """What a value was computed with.

    Attributes:
        objects: modules, parameters and what modules keep, compared by identity.
        facts: attributes and versions, compared by value.
    """

    objects: tuple[Any, ...]
    facts: tuple[Any, ...]

    def same(self, other: _Seen) -> bool:
        return self.facts == other.facts and _same(self.objects, other.objects)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _look(owner: nn.Module) -> _Seen | None:
    """What `owner` is at the moment, or None where its result depends on more than can be seen.

    Lists of modules count by what is in them: models make one for a call. A LoRA layer counts by the layer that it
    wraps, what it adds to it, and what is merged into it.
    """
    objects: list[Any] = []
    facts: list[Any] = []
    stack, met = [owner], set()
    while stack:
        module = stack.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        kind, space = type(module), module.__dict__
        if from_peft(module):
            base = _look_at_lora(module, objects, facts)
            if base is None:
                return None
            stack.append(base)
            continue
        stack += [child for child in space["_modules"].values() if child is not None]
        if kind is not nn.ModuleList:
            objects.append(module)
            for name in space.keys() - _COMMON:
                value = space[name]
                if type(value) in _ATOMS:
                    facts += name, value
                elif type(value) in (list, tuple) and all(type(v) in _ATOMS for v in value):
                    facts += name, tuple(value)
                else:
                    facts.append(name)
                    objects.append(value)
        for weight in (*space["_parameters"].values(), *space["_buffers"].values()):
            if weight is not None:
                if weight.is_inference():
                    return None
                objects.append(weight)
                facts += weight._version, weight.data_ptr()
    return _Seen(tuple(objects), tuple(facts))


def _look_at_lora(layer: Any, objects: list[Any], facts: list[Any]) -> nn.Module | None:
    """Notes what a LoRA layer is besides what it wraps, and returns that; None where it does more than add."""
    found = split(layer)
    if found is None or found.base is layer:  # of another kind than LoRA
        return None
    objects.append(layer)
    merged = tuple(getattr(layer, "merged_adapters", ()))
    facts += merged, tuple(layer.scaling.get(name) for name in merged) if merged else ()
    for branch in found.branches:
        for weight in branch[:2]:
            if weight.is_inference():
                return None
            objects.append(weight)
            facts += weight._version, weight.data_ptr()
        facts.append(branch.scale)
    return found.base


class RunCache:
    """The hoisted values of one module.

    `begin` is called before each forward; with None nothing is kept.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._entries: list[_Entry] = []

    def begin(self, run: Run | None) -> None:
        """Say which run the next forward belongs to; another run, or none, drops everything."""
        if run is None or self.run is None or not self.run.goes_on(run):
            self._entries.clear()
        self.run = run

    def clear(self) -> None:
        self.begin(None)

    def drop(self, value: object) -> None:
        """Let go of one value before its run ends."""
        self._entries = [entry for entry in self._entries if entry.value is not value]

    def values(self) -> list[Any]:
        """What is kept now."""
        return [entry.value for entry in self._entries]

    def get(
        self,
        compute: Callable[[], Any],
        inputs: tuple[torch.Tensor, ...],
        owner: nn.Module,
        key: Hashable = None,
        *,
        or_none: bool = False,
    ) -> tuple[Any, bool | None]:
        """The value, and whether it was kept from an earlier step (None: this call could not be watched).

        `key` is what else the value depends on, compared for equality. With `or_none` a call that could not be watched
        computes nothing and gets None.
        """
        kind = getattr(compute, "__code__", compute)  # which expression of the source this is
        seen = None if self.run is None or any(t.is_inference() for t in inputs) else _look(owner)
        if seen is None:
            return None if or_none else compute(), None
        versions = tuple(t._version for t in inputs)
        for entry in self._entries:
            if (
                entry.kind is kind
                and entry.key == key
                and _same(entry.inputs, inputs)
                and entry.versions == versions
                and entry.seen.same(seen)
            ):
                return entry.value, True
        value = compute()
        del self._entries[: max(0, len(self._entries) - CAPACITY + 1)]
        self._entries.append(_Entry(kind, key, inputs, versions, seen, value))
        return value, False
