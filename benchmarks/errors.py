"""Error of one denoising step inside the pipeline, against stock in fp32 on the same weights and the same input."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

import fusedit
from benchmarks import gpu
from benchmarks.call import call
from benchmarks.workloads import Workload

STEPS: Final = 4
"""Of the call that is checked; its last step is compared, when what a plan keeps for a run or captures is in use."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Seen:
    """What a call did.

    Attributes:
        latents: at the end of each step.
        prediction: what the transformer predicted in the last step.
        first_s: seconds from the call to the end of its first step.
    """

    latents: list[torch.Tensor]
    prediction: torch.Tensor
    first_s: float


@dataclass(frozen=True)
class Truth:
    """A stock call, and its last step in fp32.

    Attributes:
        arguments: of the call.
        stock: what stock did in its own dtype.
        exact: the prediction of its last step in fp32; None where fp32 did not fit into memory.
    """

    arguments: dict[str, Any]
    stock: Seen
    exact: torch.Tensor | None

    @property
    def stock_error(self) -> float | None:
        return self._error(self.stock.prediction)

    def check(self, pipe: Any) -> tuple[float | None, float]:
        """Error of the same step by another pipeline that is given stock's latents, and its seconds to a first step."""
        seen = watch(pipe, self.arguments, self.stock.latents)
        return self._error(seen.prediction), seen.first_s

    def _error(self, prediction: torch.Tensor) -> float | None:
        if self.exact is None:
            return None
        return float((prediction.float() - self.exact).norm() / self.exact.norm())


def watch(pipe: Any, arguments: dict[str, Any], latents: list[torch.Tensor] | None = None) -> Seen:
    """Run a call; each step but the first starts from the given latents instead of its own."""
    ends: list[torch.Tensor] = []
    first: list[float] = []

    def on_step(step: int, current: torch.Tensor) -> torch.Tensor | None:
        if not first:
            gpu.synchronize()
            first.append(time.perf_counter() - began)
        ends.append(current.clone())
        return None if latents is None else latents[step]

    gpu.synchronize()
    began = time.perf_counter()
    with _predictions(pipe.scheduler) as predicted:
        call(pipe, arguments, STEPS, on_step)
    gpu.synchronize()
    return Seen(ends, predicted[-1], first[0])


@contextmanager
def _predictions(scheduler: Any) -> Iterator[list[torch.Tensor]]:
    """The last thing the scheduler was given; by a wrapper on this instance, which sees what any plan predicts."""
    seen: list[torch.Tensor] = []
    step = scheduler.step

    def record(prediction: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[:] = [prediction.clone()]  # a graph writes its next output to the same place
        return step(prediction, *args, **kwargs)

    scheduler.step = record
    try:
        yield seen
    finally:
        del scheduler.step


@torch.no_grad()
def truth(workload: Workload, arguments: dict[str, Any]) -> Truth:
    """Run stock, and its last step in fp32; the pipeline must not be accelerated, or be paused."""
    model = workload.pipe.transformer
    inputs: dict[str, Inputs] = {}

    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs["last"] = (args, kwargs)

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        stock = watch(workload.pipe, arguments)
    finally:
        hook.remove()
    gpu.free()
    try:
        exact = _in_fp32(workload, inputs["last"], len(stock.prediction))
    except torch.OutOfMemoryError:
        exact = None
    gpu.free()
    return Truth(arguments, stock, exact)


def _in_fp32(workload: Workload, inputs: Inputs, batch: int) -> torch.Tensor:
    """The prediction in fp32, an item of the batch at a time, so that it fits; leaves the weights as they were."""
    model = workload.pipe.transformer
    dtype = model.dtype
    made = []
    try:
        model.to(torch.float32)  # bf16 -> fp32 -> bf16 gives the same bits back
        for i in range(batch):
            args, kwargs = (_item(part, i, batch) for part in inputs)
            made.append(workload.prediction(model(*args, **kwargs)).float())
    finally:
        model.to(dtype)
    return torch.cat(made)


def _item(value: Any, i: int, batch: int) -> Any:
    """Item `i` of the arguments of a transformer, in fp32. Token positions (`*_ids`) are shared by all items."""
    if isinstance(value, torch.Tensor):
        part = value[i : i + 1] if value.ndim and len(value) == batch else value
        return part.float() if part.is_floating_point() else part
    if isinstance(value, list):
        return [_item(part, 0, 1) for part in value[i : i + 1]]
    if isinstance(value, tuple):
        return tuple(_item(part, i, batch) for part in value)
    if isinstance(value, dict):
        return {k: _item(v, 0, 1) if k.endswith("_ids") else _item(v, i, batch) for k, v in value.items()}
    return value


def step_errors(workload: Workload, handle: fusedit.Handle, arguments: dict[str, Any]) -> tuple[float, float]:
    """Relative L2 of one step against stock in fp32: ours, and stock's own in bf16."""
    with handle.paused():
        reference = truth(workload, arguments)
    ours, _ = reference.check(workload.pipe)
    stock = reference.stock_error
    if ours is None or stock is None:
        raise RuntimeError("the step in fp32 does not fit into memory")
    return ours, stock
