"""Counts of the Triton kernels that this process compiled, or loaded from the cache on disk."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass
class Compilations:
    """Since the `with` block began.

    Attributes:
        compiled: kernels that went through the compiler.
        loaded: kernels that this process used for the first time and found in the cache on disk.
    """

    compiled: int = 0
    loaded: int = 0


@contextmanager
def compilations() -> Iterator[Compilations]:
    """Triton tells its listener of each kernel variant that was not in this process's memory yet."""
    import triton

    knobs: Any = triton.knobs.compilation
    before, counts = knobs.listener, Compilations()

    def listener(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            counts.loaded += 1
        else:
            counts.compiled += 1

    knobs.listener = listener
    try:
        yield counts
    finally:
        knobs.listener = before


def kernels() -> list[Any]:
    """fusedit's kernels, in Triton and in Gluon, of all modules of ops/."""
    from triton.runtime.jit import JITFunction

    from fusedit import ops

    modules = [import_module(f"{ops.__name__}.{found.name}") for found in pkgutil.iter_modules(ops.__path__)]
    return list({id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}.values())


def held() -> dict[str, int]:
    """fusedit's kernels of which this process holds variants, however it came by them, and how many of each."""
    counts = {
        f"{kernel.fn.__module__}.{kernel.__name__}": sum(len(kept[0]) for kept in kernel.device_caches.values())
        for kernel in kernels()
    }
    return {name: count for name, count in counts.items() if count}


def variants() -> int:
    """All of those together."""
    return sum(held().values())
