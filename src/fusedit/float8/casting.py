"""Layerwise casting beside e4m3 weights: refused before it has cast the layers that are not e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from fusedit.errors import UsageError

NAME: Final = "enable_layerwise_casting"


class NoCasting:
    """Stands where `enable_layerwise_casting` of one module stood; copies and pickles get the stock one."""

    __slots__ = ("module",)
    __name__ = NAME

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"this {type(self.module).__name__} has e4m3 weights, beside which layerwise casting saves nothing and "
            "makes every call run stock; leave it out, or restore() the pipeline first"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, NAME)  # in a copy, whose attributes are not there yet, the class's


def refuse(module: nn.Module) -> None:
    """Refuse layerwise casting of this module from now on."""
    if hasattr(type(module), NAME):
        module.__dict__[NAME] = NoCasting(module)


def allow(module: nn.Module) -> None:
    """Undo `refuse`."""
    if isinstance(module.__dict__.get(NAME), NoCasting):
        del module.__dict__[NAME]
