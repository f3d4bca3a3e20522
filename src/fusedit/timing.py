"""Timing one pipeline call: step by step and as a whole, synchronised, with the memory peak.

On a GPU the steps are timed by events in the stream, so that looking at the clock does not stop the queue; the whole
call is timed by the wall clock between two synchronisations. On a CPU both are the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

now = time.perf_counter  # seconds; tests put their own clock here


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything that was asked of it. Nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Lap:
    """What one call took.

    Attributes:
        step_ms: milliseconds of each denoising step.
        total_s: seconds of the whole call: text encoding, steps and decoding.
        peak_bytes: highest allocated device memory during the call, or None on a CPU.
    """

    step_ms: tuple[float, ...]
    total_s: float
    peak_bytes: int | None


class StepClock:
    """start(), then loop() when the denoising loop begins, tick() after every step, stop() at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []
        self.began = 0.0

    def start(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronise(self.device)
        self.began = now()

    def loop(self) -> None:
        self.marks = [self._mark()]

    def tick(self) -> None:
        self.marks.append(self._mark())

    def stop(self) -> Lap:
        synchronise(self.device)
        total = now() - self.began
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.on_gpu:
            steps = tuple(float(a.elapsed_time(b)) for a, b in pairs)
            return Lap(steps, total, torch.cuda.max_memory_allocated(self.device))
        return Lap(tuple(1e3 * (b - a) for a, b in pairs), total, None)

    def _mark(self) -> Any:
        if not self.on_gpu:
            return now()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass(frozen=True)
class Timing:
    """Several calls of one arm.

    Attributes:
        step_ms: median milliseconds of a denoising step, over every step of every call; None if no step was seen.
        step_ms_p10, step_ms_p90: the spread of the same.
        total_s: median seconds of a whole call.
        total_s_min, total_s_max: the spread of the same.
        peak_bytes: highest allocated device memory, or None on a CPU.
        calls: how many calls were timed.
        warmup_s: seconds of each call made before the timed ones; in none of the other numbers.
    """

    step_ms: float | None
    step_ms_p10: float | None
    step_ms_p90: float | None
    total_s: float | None
    total_s_min: float | None
    total_s_max: float | None
    peak_bytes: int | None
    calls: int
    warmup_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, laps: Sequence[Lap], warmup: Sequence[Lap] = ()) -> Timing:
        steps = sorted(step for lap in laps for step in lap.step_ms)
        totals = [lap.total_s for lap in laps]
        peaks = [lap.peak_bytes for lap in laps if lap.peak_bytes is not None]
        return cls(
            step_ms=statistics.median(steps) if steps else None,
            step_ms_p10=_quantile(steps, 0.1),
            step_ms_p90=_quantile(steps, 0.9),
            total_s=statistics.median(totals) if totals else None,
            total_s_min=min(totals, default=None),
            total_s_max=max(totals, default=None),
            peak_bytes=max(peaks, default=None),
            calls=len(laps),
            warmup_s=tuple(lap.total_s for lap in warmup),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "warmup_s": list(self.warmup_s)}


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
