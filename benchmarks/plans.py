"""The plans that are measured side by side on one workload, and how each is laid on it."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import fusedit
from benchmarks import gpu, peer
from benchmarks.results import FP8, PEERS
from benchmarks.workloads import Workload

PLANS: Final = ("stock", "compile", "compile-whole", "torchao-fp8-eager", "fp8", "exact", "torchao-fp8")
"""In the order in which they are looked at: what takes minutes to compile comes last."""
COMPILED: Final = ("compile", "compile-whole", "torchao-fp8")
UNTIMED: Final = ("torchao-fp8-eager",)
"""What nobody would run: it is there for its error alone, which takes no compilation to see."""


@dataclass(frozen=True)
class Laid:
    """One plan ready to run: a pipeline, and the context its calls run in.

    Attributes:
        converted: of a copy whose weights were converted: bytes allocated before its transformer was there, and after
            the conversion. What stands for a weight then need not be a tensor that counts its bytes.
        more: keys of this plan's row.
    """

    plan: str
    pipe: Any
    context: Callable[[], AbstractContextManager[None]]
    converted: tuple[int, int] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def own_bytes(self, arguments: dict[str, Any]) -> int:
        """Bytes of the weights and arguments that this plan alone would need."""
        values = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
        given = [value for value in values if isinstance(value, torch.Tensor)]
        if self.converted is not None:
            return gpu.allocated() - self.converted[0] + gpu.bytes_of([*self._tensors(self._others), *given])
        return gpu.bytes_of([*self._tensors(self._modules), *given])

    @property
    def weights_bytes(self) -> int:
        """Of the transformer alone."""
        if self.converted is not None:
            return self.converted[1] - self.converted[0]
        return gpu.bytes_of(self._tensors([self.pipe.transformer]))

    @property
    def others_bytes(self) -> int:
        """Of the weights of all but the transformer."""
        return gpu.bytes_of(self._tensors(self._others))

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [part for part in self.pipe.components.values() if isinstance(part, torch.nn.Module)]

    @property
    def _others(self) -> list[torch.nn.Module]:
        return [module for module in self._modules if module is not self.pipe.transformer]

    @staticmethod
    def _tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        return [t for module in modules for t in (*module.parameters(), *module.buffers())]


class SideBySide:
    """Lays plans on one workload; at the end of the `with` block it is stock again, and the copies are gone.

    Attributes:
        handles: of the plans that fusedit laid.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.handles: dict[str, fusedit.Handle] = {}
        self._in_place: fusedit.Handle | None = None
        self._copies: list[Workload] = []
        self._compiled = False

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place is not None:
            self._in_place.restore()
            self._in_place = None
        self.handles.clear()
        self._copies.clear()
        if self._compiled:
            self._compiled = False
            torch.compiler.reset()
        gpu.free()

    def lay(self, plan: str) -> Laid:
        """The plan on the workload's pipeline; on a copy of its models where they are compiled or converted."""
        if plan == "stock":
            return Laid(plan, self.workload.pipe, self._paused)
        if plan == "exact":
            self._in_place = self.handles[plan] = fusedit.accelerate(self.workload.pipe, plan)
            return Laid(plan, self.workload.pipe, contextlib.nullcontext)
        if plan in PEERS:
            peer.need_torchao()  # before 24 GB are copied
        # With a VAE of its own too, or the accelerated pipeline would report that another one calls its VAE.
        vae = copy.deepcopy(self.workload.pipe.vae)
        gpu.free()
        before = gpu.allocated()
        copied = self.workload.with_components(transformer=copy.deepcopy(self.workload.pipe.transformer), vae=vae)
        made = convert(copied.pipe, plan, drop=True)
        if made.handle is not None:
            self.handles[plan] = made.handle
        gpu.free()
        converted = (before, gpu.allocated()) if plan in FP8 else None
        if plan in COMPILED:
            if not self._compiled:  # else what was compiled for another size makes this one compile for any size
                torch.compiler.reset()
            self._compiled = True
            compile_in_place(copied.pipe.transformer, plan)
        self._copies.append(copied)
        return Laid(plan, copied.pipe, made.context, converted, made.more)

    def _paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._in_place is None else self._in_place.paused()


@dataclass(frozen=True)
class Converted:
    """What `convert` did: the context that calls run in, keys of the row, and the handle where fusedit did it."""

    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    more: dict[str, Any] = field(default_factory=dict)
    handle: fusedit.Handle | None = None


def convert(pipe: Any, plan: str, *, drop: bool) -> Converted:
    """Weights to fp8, in place, where the plan has any there.

    Args:
        pipe: its transformer is converted.
        plan: one of FP8, or another, which converts nothing.
        drop: fusedit's plan shall not keep the weights that it replaces.
    """
    if plan in PEERS:
        made = peer.quantise(pipe.transformer)
        more = {"fp8_layers": made.layers, "fused_projections": made.fused, "lay_s": round(made.seconds, 3)}
        return Converted(made.settings, more)
    if plan not in FP8:
        return Converted()
    gpu.synchronize()
    began = time.perf_counter()
    handle = fusedit.accelerate(pipe, plan, originals="drop" if drop else "cpu")
    gpu.synchronize()
    return Converted(more={"lay_s": round(time.perf_counter() - began, 3)}, handle=handle)


def compile_in_place(transformer: Any, plan: str) -> None:
    """`compile-whole` is one graph where it can be, the others block by block, the usual way with diffusers."""
    if plan == "compile-whole":
        transformer.compile()
    else:
        transformer.compile_repeated_blocks(fullgraph=True)


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
