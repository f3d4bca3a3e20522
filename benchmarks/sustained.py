"""Interleaved measurement: every plan in turn, a burst at a time, until each has run for long enough.

A card that is limited by its power slows down as it warms up, so the later half of the bursts is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from benchmarks import gpu
from benchmarks.energy import joules

BURST_S: Final = 1.0
"""A burst lasts at least this long: the energy counter moves a few times a second only."""


class Burst(NamedTuple):
    """Milliseconds of each unit (step, replay) that counts, and how many units ran, warm ones included."""

    ms: list[float]
    units: int


class Figures(NamedTuple):
    """Median, 5 and 95 %, and joules a unit."""

    ms: float
    spread: tuple[float, float]
    joules: float | None


class _Record(NamedTuple):
    burst: Burst
    joules: float | None
    seconds: float


def sustained(
    bursts: Mapping[str, Callable[[], Burst]], seconds: float, failed: Callable[[str, Exception], None]
) -> dict[str, Figures]:
    """Run the bursts in turn until each has run for `seconds`, and at least twice.

    One that raises is left out from then on; `failed` is told which and why.
    """
    records: dict[str, list[_Record]] = {name: [] for name in bursts}
    while any(len(kept) < 2 or sum(r.seconds for r in kept) < seconds for kept in records.values()):
        for name in list(records):
            try:
                records[name].append(_record(bursts[name]))
            except Exception as error:
                del records[name]
                failed(name, error)
                gpu.free()
    return {name: _figures(kept[len(kept) // 2 :]) for name, kept in records.items()}


def repeated(once: Callable[[], Burst]) -> Burst:
    """Several runs as one burst that lasts long enough."""
    began = time.perf_counter()
    ms, units = list[float](), 0
    while not units or time.perf_counter() - began < BURST_S:
        made = once()
        ms += made.ms
        units += made.units
    return Burst(ms, units)


def spread_of(values: list[float]) -> tuple[float, float]:
    """5 and 95 %."""
    if len(values) < 2:
        return values[0], values[0]
    twentieths = statistics.quantiles(values, n=20, method="inclusive")
    return twentieths[0], twentieths[-1]


def _record(run: Callable[[], Burst]) -> _Record:
    before, began = joules(), time.perf_counter()
    burst = run()
    gpu.synchronize()
    seconds, after = time.perf_counter() - began, joules()
    return _Record(burst, None if before is None or after is None else after - before, seconds)


def _figures(records: list[_Record]) -> Figures:
    values = [ms for record in records for ms in record.burst.ms]
    used = [record.joules for record in records if record.joules is not None]
    units = sum(record.burst.units for record in records if record.joules is not None)
    low, high = spread_of(values)
    return Figures(
        round(statistics.median(values), 4),
        (round(low, 4), round(high, 4)),
        round(sum(used) / units, 3) if used else None,
    )
