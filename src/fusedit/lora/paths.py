"""Modules by their paths. A LoRA of FLUX names 494 layers, several times each; torch's own look takes 20 us."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def submodule(module: nn.Module, path: str) -> nn.Module:
    """As `get_submodule`, by way of the modules' own dictionaries where that leads there.

    Raises:
        AttributeError: there is none.
    """
    found: nn.Module | None = module
    for key in path.split(".") if path else ():
        found = None if found is None else found._modules.get(key)
    return module.get_submodule(path) if found is None else found


def place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has what is at this path, and its name there."""
    parent, _, key = path.rpartition(".")
    return submodule(module, parent), key


def below(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all inside it, in no particular order; what stands at two places comes twice."""
    stack = [module]
    while stack:
        child = stack.pop()
        yield child
        stack += [each for each in child._modules.values() if each is not None]
