"""The plans that are measured side by side on one workload, and how each is laid on it."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import fusedit
from benchmarks import gpu
from benchmarks.workloads import Workload

PLANS: Final = ("stock", "compile", "compile-whole", "exact")
COMPILED: Final = ("compile", "compile-whole")


@dataclass(frozen=True)
class Laid:
    """One plan ready to run: a pipeline, and the context its calls run in."""

    plan: str
    pipe: Any
    context: Callable[[], AbstractContextManager[None]]

    def own_bytes(self, arguments: dict[str, Any]) -> int:
        """Bytes of the weights and arguments that this plan alone would need."""
        modules = [part for part in self.pipe.components.values() if isinstance(part, torch.nn.Module)]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        for value in arguments.values():
            tensors += value if isinstance(value, list) else [value] if isinstance(value, torch.Tensor) else []
        return gpu.bytes_of(tensors)


class SideBySide:
    """Lays plans on one workload; at the end of the `with` block it is stock again, and the copies are gone."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.handle: fusedit.Handle | None = None
        self._copies: list[Workload] = []

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            self.handle.restore()
            self.handle = None
        if self._copies:
            self._copies.clear()
            torch.compiler.reset()
        gpu.free()

    def lay(self, plan: str) -> Laid:
        """The plan on the workload's pipeline; a compiled one on a copy of its models."""
        if plan == "stock":
            return Laid(plan, self.workload.pipe, self._paused)
        if plan in COMPILED:
            pipe = self.workload.pipe
            transformer = copy.deepcopy(pipe.transformer)
            if not self._copies:  # else what was compiled for another size makes this one compile for any size
                torch.compiler.reset()
            compile_in_place(transformer, plan)
            # With a VAE of its own too, or the accelerated pipeline would report that another one calls its VAE.
            self._copies.append(self.workload.with_components(transformer=transformer, vae=copy.deepcopy(pipe.vae)))
            return Laid(plan, self._copies[-1].pipe, contextlib.nullcontext)
        self.handle = fusedit.accelerate(self.workload.pipe, plan)
        return Laid(plan, self.workload.pipe, contextlib.nullcontext)

    def _paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.handle is None else self.handle.paused()


def compile_in_place(transformer: Any, plan: str) -> None:
    """`compile` is the usual way with diffusers, block by block; `compile-whole` is one graph where it can be."""
    if plan == "compile":
        transformer.compile_repeated_blocks(fullgraph=True)
    else:
        transformer.compile()


def what_ran(handle: fusedit.Handle) -> dict[str, Any]:
    """What of the plan did not run and why, and what its caches did: JSON data."""
    report = handle.report().to_dict()
    found = {
        "fell_back": {site["site"]: site["reasons"] for site in report["rewritten"] if site["stock"]},
        "refused": {refusal["site"]: refusal["reason"] for refusal in report["refused"]},
        "caches": report.get("caches"),
    }
    return {name: value for name, value in found.items() if value}


@contextlib.contextmanager
def empty_caches() -> Iterator[Path]:
    """Caches of compiled code that are empty at the start and gone at the end, so that `cold` means cold."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in names})
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
