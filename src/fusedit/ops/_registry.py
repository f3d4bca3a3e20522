"""Discovery: every file of ops/ whose name has no leading underscore is an op."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from fusedit.ops._op import Op


@cache
def registry() -> Mapping[str, Op[..., Any]]:
    """Every op by name. A file of ops/ whose name has no leading underscore must define exactly the op of its name."""
    package = importlib.import_module("fusedit.ops")
    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        if not module.startswith("_"):
            found[module] = load(module)
    return found


def load(name: str) -> Op[..., Any]:
    """The op of one file of ops/; raises where the file breaks the rule."""
    module = importlib.import_module(f"fusedit.ops.{name}")
    ops = {key: value for key, value in vars(module).items() if isinstance(value, Op)}
    own = [key for key, value in ops.items() if value.__wrapped__.__module__ == module.__name__]
    if own != [name] or ops[name].name != name:
        raise ImportError(f"fusedit/ops/{name}.py must define exactly one op, named {name}; it defines {own}")
    return ops[name]
