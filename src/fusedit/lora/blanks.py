"""Blank: many modules alike, without what constructors do each time: a LoRA of FLUX has 4000, at 30 us each."""

from __future__ import annotations

from typing import Any, Final

from torch import nn


class Blank:
    """Makes modules of one class with the plain attributes of a pattern and nothing in them.

    Args:
        pattern: stays as it is, and is not read again.
    """

    def __init__(self, pattern: nn.Module) -> None:
        self._kind: Final[Any] = type(pattern)
        fresh = nn.Module()
        self._space: Final = {**pattern.__dict__, **fresh.__dict__}
        containers = {key: value for key, value in self._space.items() if isinstance(value, dict | list | set)}
        self._empty: Final = [(key, type(value)) for key, value in containers.items() if not value]
        self._filled: Final = [(key, value) for key, value in containers.items() if value]

    def __call__(self, training: bool) -> Any:
        made = self._kind.__new__(self._kind)
        space = made.__dict__
        space.update(self._space)
        for key, kind in self._empty:  # making one is cheaper than copying it
            space[key] = kind()
        for key, value in self._filled:
            space[key] = value.copy()
        space["training"] = training
        return made


def linear(blank: Blank, weight: nn.Parameter, training: bool) -> nn.Linear:
    """A linear layer of this weight [N, K] and no bias.

    Args:
        blank: of an nn.Linear.
    """
    made: nn.Linear = blank(training)
    space = made.__dict__
    space["out_features"], space["in_features"] = weight.shape
    made._parameters |= {"weight": weight, "bias": None}
    return made
