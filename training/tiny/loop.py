"""The training loop: a clock instead of a step count, one CUDA graph a kind of step, losses in a JSON, resumable."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tiny.optim import MasterOptimizer

Schedule = Callable[[float, int], float]  # (progress, step in this call) -> the factor on the learning rate


@dataclass
class Clock:
    """Progress by wall time, over several calls: `minutes` in all, `elapsed` seconds spent before this call."""

    minutes: float
    elapsed: float = 0.0
    max_steps: int | None = None
    stop_after: float | None = None
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Return the seconds spent, earlier calls included."""
        return self.elapsed + time.monotonic() - self.started

    def is_over(self) -> bool:
        """Say whether this call's own time is up."""
        return self.stop_after is not None and time.monotonic() - self.started > self.stop_after

    def progress(self, step: int) -> float:
        """Return how much of the training is done, from 0 to 1."""
        if self.max_steps is not None:
            return min(1.0, step / self.max_steps)
        return min(1.0, self.seconds() / (60 * self.minutes))


def schedule(progress: float, step_in_call: int, warmup: int = 100, hold: float = 0.35) -> float:
    """Return the factor on the learning rate: warm-up at each call's start, constant, then linear to zero."""
    return min(1.0, (step_in_call + 1) / warmup) * min(1.0, (1 - progress) / (1 - hold))


def two_phases(at: float, again: float = 0.35) -> Schedule:
    """Return a schedule that runs down until progress AT, so that the teacher is at rest, and once more from AGAIN."""

    def rate(progress: float, step_in_call: int) -> float:
        if progress < at:
            return schedule(progress / at, step_in_call)
        return again * schedule((progress - at) / (1 - at), step_in_call)

    return rate


class Stepper:
    """Runs `loss_of(kind)` and the update; on a GPU as one CUDA graph for each kind, captured when first needed."""

    def __init__(self, loss_of: Callable[..., torch.Tensor], optimizer: MasterOptimizer) -> None:
        self.loss_of, self.optimizer = loss_of, optimizer
        self.on_gpu = optimizer.rate.is_cuda
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.losses: dict[Hashable, torch.Tensor] = {}
        self.counts: dict[Hashable, int] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def _eager(self, kind: Hashable) -> None:
        loss = self.loss_of(kind)
        grads = torch.autograd.grad(loss, self.optimizer.weights)
        self.optimizer.step(grads)
        self.losses[kind] += loss.detach().float()

    def __call__(self, kind: Hashable, rate: float) -> None:
        """Take one step."""
        self.optimizer.rate.fill_(rate)
        if kind not in self.losses:
            self.losses[kind] = torch.zeros((), device=self.optimizer.rate.device)
            self.counts[kind] = 0
        self.counts[kind] += 1
        if not self.on_gpu:
            self._eager(kind)
        elif kind in self.graphs:
            self.graphs[kind].replay()
        else:
            self._capture(kind)

    def _capture(self, kind: Hashable) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._eager(kind)  # a real step, which also warms up what must not happen while capturing
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._eager(kind)
        self.graphs[kind] = graph

    def drain(self) -> dict[str, float]:
        """Return the mean loss by kind since the last call, and forget it."""
        means = {str(k): round(float(self.losses[k]) / n, 5) for k, n in self.counts.items() if n}
        for kind, loss in self.losses.items():
            loss.zero_()
            self.counts[kind] = 0
        return means


def run(
    stepper: Stepper,
    clock: Clock,
    pick: Callable[[random.Random, float], Hashable],
    *,
    rate: Schedule = schedule,
    first_step: int = 0,
    log_every: int = 200,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[int, list[dict[str, object]]]:
    """Train until the clock says so; return the number of steps done in all and this call's losses."""
    log: list[dict[str, object]] = []
    rng = random.Random(first_step)
    step = first_step
    while (progress := clock.progress(step)) < 1 and not clock.is_over():
        if on_step is not None:
            on_step(step, progress)
        stepper(pick(rng, progress), rate(progress, step - first_step))
        step += 1
        if step % 20 == 0 and stepper.on_gpu:
            torch.cuda.synchronize()  # the clock must see the work, not the queue
        if step % log_every == 0:
            losses = stepper.drain()
            log.append({"step": step, "seconds": round(clock.seconds(), 1), "loss": losses})
            print(log[-1], flush=True)
            if any(value != value for value in losses.values()):
                raise FloatingPointError(f"the loss is not a number at step {step}")
    log.append({"step": step, "seconds": round(clock.seconds(), 1), "loss": stepper.drain()})
    return step, log


def write_report(path: Path, report: dict[str, object], losses: list[dict[str, object]]) -> None:
    """Write REPORT and LOSSES as JSON, an entry a line."""
    head = json.dumps(report, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "losses": [\n  ' + ",\n  ".join(json.dumps(entry) for entry in losses) + "\n ]\n}\n")
