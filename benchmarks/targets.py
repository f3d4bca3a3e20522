"""What the fp8 tier must reach, and what it aims at, on one H200 at 1024x1024 in batch 1: facts, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.results import Row

DEVICE: Final = "H200"
"""Part of the name of the card that the figures were set for."""
SIZE: Final = "1024x1024"


@dataclass(frozen=True)
class Target:
    """A figure of one model, the smaller the better.

    Attributes:
        what: with its unit.
        model: a workload's name.
        benchmark, variant: of the rows that hold it.
        of: a row -> the figure, or None where it is not there.
        required: at most; None where the figure of the peer in the same run is what it must not exceed.
        aim: at most.
        digits: behind the point.
    """

    what: str
    model: str
    of: Callable[[Row], Any]
    required: float | None
    aim: float | None = None
    benchmark: str = "step"
    variant: str = ""
    digits: int = 1

    @property
    def needs_check(self) -> bool:
        """Whether the figure is worth nothing beside a red check of the same row."""
        return self.benchmark == "step" and self.required is not None

    def verdict(self, value: Any, peer: Any) -> str:
        """In a cell of the page; NaN meets nothing."""
        limit = peer if self.required is None else self.required
        if value is None or limit is None:
            return "not measured"
        if not float(value) <= float(limit):
            return "**red**"
        return "aim met" if self.aim is not None and float(value) <= self.aim else "green"


def gib(key: str) -> Callable[[Row], Any]:
    def of(row: Row) -> Any:
        value = row.more.get(key)
        return None if value is None else value / 2**30

    return of


def first_step(row: Row) -> Any:
    """Seconds; what is compiled in it has another name."""
    return row.more.get("cold_s", row.more.get("first_step_s"))


_START: Final = partial(Target, "first step, weights converted, kernels cached, s", benchmark="cold-start")
TARGETS: Final = (
    Target("step, ms", "flux.1-dev", lambda row: row.ms, 81.0, 70.0),
    Target("step, ms", "z-image-turbo", lambda row: row.ms, 61.0, 54.0),
    Target("J a step", "flux.1-dev", lambda row: row.joules, 60.0),
    Target("J a step", "z-image-turbo", lambda row: row.joules, 44.0),
    Target("peak of the transformer, GiB", "flux.1-dev", gib("transformer_peak_bytes"), 13.0, digits=2),
    Target("error against fp32", "flux.1-dev", lambda row: row.rel_error, None, digits=4),
    Target("error against fp32", "z-image-turbo", lambda row: row.rel_error, None, digits=4),
    _START(model="flux.1-dev", of=first_step, required=3.0, variant="filled cache"),
    _START(model="z-image-turbo", of=first_step, required=3.0, variant="filled cache"),
)
