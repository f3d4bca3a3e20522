"""Ops: rates, percent of the ceiling, and the check against fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gpu, ops
from benchmarks.__main__ import app
from benchmarks.ops import Ceilings, Timed
from fusedit import ops as fused
from fusedit.ops._cases import Case

FAST = Ceilings(1e12, 1e15)


def case(name: str) -> Case:
    """The op's first small case that computes something."""
    found: Case = next(c for c in fused.registry()[name].cases if "small" in c.tags and "empty" not in c.tags)
    return found


@pytest.mark.parametrize("name", sorted(fused.registry()))
def test_every_op_can_be_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MOST_CALLS", 2)  # the 200 of a GPU took 59 CPU seconds for all ops, these take 2
    plain, row = ops.measure(fused.registry()[name], case(name), FAST, 1e-3)
    assert (row.error, plain.error) == (None, None)
    assert (plain.plan, row.plan) == ("plain", "fused")
    assert row.model == name
    assert row.correct is True
    assert row.rel_error is not None
    assert row.stock_rel_error == plain.rel_error
    more = row.more
    rate = 1e12 * more["tb_s"] / 1e12 if "tb_s" in more else more["tflop_s"] * 1e12 / 1e15
    assert more["percent_of_ceiling"] == pytest.approx(100 * rate, abs=0.2)
    assert ("tb_s" in more) is not ("tflop_s" in more)


def test_rate_is_what_the_cost_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "in_turn", lambda runs, _seconds: {name: [0.5, 0.5] for name in runs})
    args, kwargs = case("swiglu").build(torch.bfloat16)
    cost = fused.registry()["swiglu"].cost(*args, **kwargs)
    _, row = ops.measure(fused.registry()["swiglu"], case("swiglu"), Ceilings(cost.bytes * 4000, 1e15), 1.0)
    assert (row.ms, row.spread) == (0.5, (0.5, 0.5))
    assert (row.more["bytes"], row.more["flops"]) == cost
    assert row.more["percent_of_ceiling"] == 50.0  # cost.bytes in half a millisecond, of twice as many
    _, row = ops.measure(fused.registry()["attention"], case("attention"), Ceilings(1e15, 1e6), 1.0)
    assert "tflop_s" in row.more


def test_a_wrong_op_is_red_and_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = fused.registry()["swiglu"]
    monkeypatch.setattr(type(op), "__call__", lambda self, *args, **kwargs: 1.01 * self.plain(*args, **kwargs))
    plain, row = ops.measure(op, case("swiglu"), FAST, 1e-3)
    assert row.correct is False
    assert row.faster_than(plain) is None
    ops.show([plain, row])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(", RED")
    assert "ceiling" not in last


def test_runs_take_turns_over_several_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ops._sets(case("swiglu"))
    each = sum(t.nbytes for t in sets[0][0])
    assert len(sets) == max(2, -(-4 * 4096 // each))
    assert not torch.equal(sets[0][0][0], sets[1][0][0])
    seen: list[int] = []
    timed = ops._timed(lambda a, _b: seen.append(a.data_ptr()), sets, len(sets) + 1)
    timed.run()
    assert timed.calls == len(seen) == len(sets) + 1
    assert seen[0] == seen[-1]
    order: list[str] = []
    runs = {name: Timed(lambda name=name: order.append(name), 4) for name in ("a", "b")}
    times = ops.in_turn(runs, 1e-6)
    assert order == ["a", "b", *["a", "b"] * 10]
    assert {name: len(values) for name, values in times.items()} == {"a": 5, "b": 5}
    captured: list[Any] = []
    monkeypatch.setattr(gpu, "capture", lambda run: captured.append(run) or run)
    monkeypatch.setattr(gpu, "waits", lambda run: run is runs["b"].run)
    ops.in_turn(runs, 1e-6)
    assert captured == [runs["a"].run]  # what makes the host wait runs as it is


def test_an_op_that_fails_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ops, "in_turn", full)
    assert [r.error for r in ops.measure(fused.registry()["swiglu"], case("swiglu"), FAST, 1.0)] == [
        "out of memory"
    ] * 2


def test_ceilings() -> None:
    limits = ops.ceilings(1e-3, copied=2**16, side=64)
    assert 0 < limits.bytes < 1e13
    assert 0 < limits.flops < 1e14


def test_the_file_has_the_ceilings_and_the_real_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ceilings", lambda _seconds: FAST)
    measured: list[tuple[str, str]] = []

    def measure(op: Any, which: Case, *_: Any) -> list[Any]:
        measured.append((op.name, which.name))
        row = ops.Row("ops", op.name, which.name, 1, "plain", ms=1.0, correct=True)
        row.more = {"tb_s": 1.0, "percent_of_ceiling": 50.0}
        return [row]

    monkeypatch.setattr(ops, "measure", measure)
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["ops", "--op", "swiglu,attention", "--json", str(path)])
    assert result.exit_code == 0, result.output
    ceiling, *rows = json.loads(path.read_text())["rows"]
    assert (ceiling["benchmark"], ceiling["tb_s"], ceiling["tflop_s"]) == ("ceiling", 1.0, 1000.0)
    real = [(op.name, c.name) for op in fused.registry().values() for c in op.cases if "real" in c.tags]
    assert measured == [pair for name in ("swiglu", "attention") for pair in real if pair[0] == name]
    assert len(rows) == len(measured)
