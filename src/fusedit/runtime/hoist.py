"""RunCache: values that cannot change between two steps of one run, kept so that no stale one can ever be used.

An entry is used only while the run is the same, every input is the same object at the same version, and every
parameter it was computed with is the same object, at the same address and version. Entries hold their inputs, so an
identity cannot be reused by another tensor. Tensors without a version counter (inference mode) are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

# True classifier-free guidance alternates two conditionings a step, for text and for positions; eight leave room.
CAPACITY: Final = 8


class Run(NamedTuple):
    """One run of a pipeline's scheduler.

    Attributes:
        timesteps: the scheduler's own tensor, which `set_timesteps` replaces: its identity is the run's.
        step: index of the step that comes next, as far as the scheduler knows. A guess: nothing may rely on it.
        version: of `timesteps`, for a scheduler that writes into the tensor it has; -1 where it has none.
    """

    timesteps: torch.Tensor
    step: int
    version: int

    def goes_on(self, later: Run) -> bool:
        """Whether `later` can be the same run: the same time steps, and not an earlier one of them."""
        same = self.timesteps is later.timesteps and self.version == later.version
        return same and later.step >= self.step


@dataclass(frozen=True)
class _Entry:
    kind: object
    key: Hashable
    inputs: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    weights: tuple[torch.Tensor, ...]
    stamps: tuple[tuple[int, int], ...]
    value: Any


def _stamp(weight: torch.Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()


def _watchable(owner: nn.Module) -> tuple[torch.Tensor, ...] | None:
    """The parameters of `owner`, or None when its result depends on more than parameters (LoRA scales, merges)."""
    for module in owner.modules():
        if type(module).__module__.partition(".")[0] == "peft":
            return None
    weights = (*owner.parameters(), *owner.buffers())
    return None if any(weight.is_inference() for weight in weights) else weights


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
        weights = None if self.run is None or any(t.is_inference() for t in inputs) else _watchable(owner)
        if weights is None:
            return None if or_none else compute(), None
        versions = tuple(t._version for t in inputs)
        stamps = tuple(map(_stamp, weights))
        for entry in self._entries:
            if (
                entry.kind is kind
                and entry.key == key
                and len(entry.inputs) == len(inputs)
                and all(a is b for a, b in zip(entry.inputs, inputs, strict=True))
                and entry.versions == versions
                and len(entry.weights) == len(weights)
                and all(a is b for a, b in zip(entry.weights, weights, strict=True))
                and entry.stamps == stamps
            ):
                return entry.value, True
        value = compute()
        del self._entries[: max(0, len(self._entries) - CAPACITY + 1)]
        self._entries.append(_Entry(kind, key, inputs, versions, weights, stamps, value))
        return value, False
