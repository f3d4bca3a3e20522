"""The architectures, one file each. `registry()` finds them by folder; a broken file raises, it is never skipped."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from fusedit.models._model import FusedModel, Rewrite

__all__ = ["FusedModel", "Rewrite", "registry"]


@cache
def registry() -> dict[str, type[FusedModel]]:
    """File name -> the one FusedModel it defines, for every file of this folder without a leading underscore."""
    found: dict[str, type[FusedModel]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{info.name}")
        models = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, FusedModel) and value.__module__ == module.__name__
        ]
        if len(models) != 1:
            raise ImportError(f"{module.__name__} must define exactly one FusedModel, it defines {len(models)}")
        found[info.name] = models[0]
    names = [rewrite.name for model in found.values() for rewrite in model.rewrites]
    if len(names) != len(set(names)):
        raise ImportError(f"rewrite names must be unique: {sorted(n for n in names if names.count(n) > 1)}")
    return found
