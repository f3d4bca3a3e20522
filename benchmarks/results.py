"""Results: one type of row for every benchmark, written whole or not at all; reading.py reads them back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.environment import environment
from fusedit.files import json_bytes, write_together

SLACK: Final = 1.05
"""How much further from fp32 than stock in the same dtype a row may be."""
PEERS: Final = ("torchao-fp8", "torchao-fp8-eager")
FP8: Final = ("fp8", *PEERS)
"""Plans that compute in fp8: they are held against a peer's error and the floor in fp8."""
FLOORS: Final = ("floor", "fp8-floor")


@dataclass
class Row:
    """What one plan did in one benchmark.

    Attributes:
        benchmark: `step`, `launches`, `lora`, `pictures`, `cold-start`, `new-size`, `image`, `vae-decode`,
            `vae-encode`, `ops`, `convolutions` or `layouts`.
        model: a workload's name; in `ops` the op's, in `convolutions` the layer, in `layouts` what is measured.
        size: `WIDTHxHEIGHT`; in `ops` the case, in `convolutions` the layer's own picture, in `layouts` the shape.
        plan: `stock`, `compile`, `exact`, `fp8`, `floor`, ...; in `convolutions` what computes it, in `layouts` the
            layout.
        variant: what else tells two rows apart, for example the state of a cache, or the rank of a LoRA.
        ms: median of the sustained part.
        spread: 5 and 95 % of the same values.
        floor_ms: the same step's matrix products and attention alone, in the same run, with products in fp8 for the
            plans in FP8; of the VAE its convolutions too.
        launches: kernels a step, or a decode or encode.
        joules: a step, or a picture, a decode or encode.
        peak_bytes: the most this plan needs, without what the others in the process hold.
        rel_error: relative L2 of one step against stock in fp32; `stock_rel_error` that of stock in bf16 (in
            `convolutions` cuDNN's).
        peer_rel_error: of the plans in FP8 that of torchao in the same run.
        correct: whether `rel_error` is at most 5 % above `stock_rel_error` (`ops`, `convolutions`: twice), of the plans
            in FP8 at most `peer_rel_error`; None where it was not checked.
        error: why there is no measurement.
        more: further keys of this benchmark.
    """

    benchmark: str
    model: str
    size: str
    batch: int
    plan: str
    variant: str = ""
    ms: float | None = None
    spread: tuple[float, float] | None = None
    floor_ms: float | None = None
    launches: float | None = None
    joules: float | None = None
    peak_bytes: int | None = None
    rel_error: float | None = None
    stock_rel_error: float | None = None
    peer_rel_error: float | None = None
    correct: bool | None = None
    error: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, int, str, str]:
        return (self.benchmark, self.model, self.size, self.batch, self.plan, self.variant)

    @property
    def of_floor(self) -> float | None:
        """How many times as long as the floor; None beside a check that is red or was not made."""
        return None if self.ms is None or not self.floor_ms or not self.correct else self.ms / self.floor_ms

    def judge(self, error: float | None, stock: float | None, peer: float | None = None) -> None:
        """Set the errors and the verdict; NaN is never correct."""
        self.rel_error, self.stock_rel_error, self.peer_rel_error = error, stock, peer
        if self.plan in FP8:
            self.correct = None if error is None or peer is None else error <= peer and math.isfinite(error)
        else:
            self.correct = None if error is None or stock is None else error <= SLACK * stock

    def faster_than(self, stock: Row | None) -> float | None:
        """How many times as fast as `stock`; None beside a check that is red or was not made."""
        if stock is None or not self.ms or not stock.ms or not self.correct or self.error or stock.error:
            return None
        return stock.ms / self.ms

    def to_dict(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "more"}
        for name in ("variant", "error", "peer_rel_error"):
            if data[name] in ("", None):
                del data[name]
        if self.of_floor is not None:
            data["of_floor"] = round(self.of_floor, 3)
        return {**data, **self.more}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        known = {f.name for f in fields(cls)} - {"more"}
        own = {key: value for key, value in data.items() if key in known}
        more = {key: value for key, value in data.items() if key not in known and key != "of_floor"}
        return cls(**own, more=more)


class Results:
    """The rows of one run and the file they go to, which always holds everything added so far."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._environment = environment()

    def add(self, rows: Iterable[Row]) -> None:
        self.rows += rows
        self.save()

    def save(self) -> None:
        if self.path is not None:
            data = {**self._environment, "rows": [row.to_dict() for row in self.rows]}
            write_together({self.path: json_bytes(data)})


@dataclass(frozen=True)
class Run:
    """A results file that was read."""

    name: str
    environment: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def when(self) -> str:
        return str(self.environment.get("time") or self.environment["date"])
