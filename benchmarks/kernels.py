"""Kernel launches, counted by torch's profiler; kernels inside a replayed CUDA graph count one by one.

A process that has profiled launches more slowly from then on, so nothing is timed after a count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks import gpu
from benchmarks.call import call, plain_call
from benchmarks.plans import Laid

STEPS: Final = 5
COUNTED: Final = 2
"""The last steps of a call: what a plan does once a run lies behind them."""


class KernelCount:
    """Counts from `start` to `stop`."""

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        gpu.synchronize()
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.start()

    def stop(self) -> int:
        gpu.synchronize()
        self._profile.stop()
        return sum(_is_kernel(event) for event in self._profile.events())


def _is_kernel(event: Any) -> bool:
    return event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))


def prepare() -> None:
    """Load the profiler's library before any graph is captured: it must not be taken down between two profiles then."""
    os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
    os.environ["TEARDOWN_CUPTI"] = "0"
    count = KernelCount()
    count.start()
    torch.zeros(1, device=gpu.DEVICE)
    count.stop()


def of(run: Callable[[], None]) -> float:
    count = KernelCount()
    count.start()
    run()
    return float(count.stop())


def of_a_step(laid: Laid, arguments: dict[str, Any]) -> float:
    """Kernels a step, in the middle of a run."""
    count = KernelCount()

    def on_step(step: int, _latents: torch.Tensor) -> None:
        if step == STEPS - COUNTED - 1:
            count.start()

    with laid.context():
        plain_call(laid.pipe, arguments, STEPS)
        call(laid.pipe, arguments, STEPS, on_step)
        return count.stop() / COUNTED
