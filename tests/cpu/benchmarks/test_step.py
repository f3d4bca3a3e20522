"""`python -m benchmarks step` from the command line to the file, on tiny models."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import errors, gpu, plans, step
from benchmarks.__main__ import app
from benchmarks.plans import Laid, SideBySide

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, _plan: None)


def run(tmp_path: Path, *line: str) -> tuple[dict[str, Any], str]:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["step", "--seconds", "0.01", "--json", str(path), *line])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.stdout


def test_rows_of_every_plan_size_and_batch(tmp_path: Path) -> None:
    data, said = run(tmp_path, "--size", "64x48,48x64", "--batch", "1,2")
    rows = data["rows"]
    places = [(r["model"], r["size"], r["batch"], r["plan"]) for r in rows]
    assert places == [
        (model, size, batch, plan)
        for model in ("flux.1-dev", "z-image-turbo")
        for size in ("64x48", "48x64")
        for batch in (1, 2)
        for plan in ("stock", "compile", "exact", "floor")
    ]
    for row in rows:
        assert "error" not in row, row
        assert row["benchmark"] == "step"
        assert row["spread"][0] <= row["ms"] <= row["spread"][1]
        assert row["floor_ms"] > 0
        assert row["launches"] == (84 if row["plan"] == "floor" else 42)
        if row["plan"] == "floor":
            assert (row["ms"], row["correct"], row["attention"]) == (row["floor_ms"], None, "torch's choice")
            continue
        assert row["correct"] is (row["rel_error"] <= 1.05 * row["stock_rel_error"])
        if row["correct"]:
            assert row["of_floor"] == pytest.approx(row["ms"] / row["floor_ms"], abs=1e-3)
        assert row["reserved_bytes"] == row["peak_bytes"] + 1_000_000
        assert ("cold_s" in row) is (row["plan"] == "compile")
        assert ("first_step_s" in row) is (row["plan"] == "exact")
        assert "fell_back" not in row
    assert {row["rel_error"] for row in rows if row["plan"] == "compile"} == {
        row["rel_error"] for row in rows if row["plan"] == "stock"
    }
    assert (data["device"], data["commit"]) == ("Paper GPU", "0123456789abcdef")
    assert said.count("launches ") == len(rows)


def test_only_the_plans_that_were_asked_for(tmp_path: Path) -> None:
    data, said = run(tmp_path, "--model", "z-image-turbo", "--plans", "exact", "--size", "64x48", "--batch", "1")
    assert [row["plan"] for row in data["rows"]] == ["exact", "floor"]
    assert "x\n" not in said  # no stock in this run, no ratio


def test_a_plan_that_does_not_fit_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay = SideBySide.lay

    def full(self: SideBySide, plan: str) -> Laid:
        if plan == "compile":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return lay(self, plan)

    monkeypatch.setattr(SideBySide, "lay", full)
    data, said = run(tmp_path, "--model", "flux.1-dev", "--size", "64x48", "--batch", "1")
    rows = {row["plan"]: row for row in data["rows"]}
    assert rows["compile"]["error"] == "out of memory"
    assert rows["compile"]["ms"] is None
    assert "compile       out of memory" in said
    assert all(rows[plan]["ms"] > 0 for plan in ("stock", "exact", "floor"))


def test_where_stock_does_not_fit_every_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(errors, "watch", full)
    data, _ = run(tmp_path, "--model", "flux.1-dev", "--size", "64x48", "--batch", "1")
    assert [row["error"] for row in data["rows"]] == ["out of memory"] * 4


def test_no_ratio_beside_a_red_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = plans.fusedit.accelerate

    def wrong(pipe: Any, plan: str) -> Any:
        handle = accelerate(pipe, plan)
        session = handle._sessions[-1] if handle._sessions[-1].model.denoiser else handle._sessions[0]
        forward = session.model.forward

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            (first,) = forward(*args, **kwargs)
            return ([2 * item for item in first],) if isinstance(first, list) else (2 * first,)

        session.model.forward = spoiled  # type: ignore[method-assign]
        return handle

    monkeypatch.setattr(plans.fusedit, "accelerate", wrong)
    data, said = run(tmp_path, "--model", "flux.1-dev", "--size", "64x48", "--batch", "1")
    row = next(row for row in data["rows"] if row["plan"] == "exact")
    assert row["correct"] is False
    assert row["rel_error"] > 0.5
    assert row["ms"] > 0
    assert "of_floor" not in row
    line = next(line for line in said.splitlines() if " exact " in line)
    assert "RED" in line
    assert "of floor" not in line
    assert not line.rstrip().endswith("x")


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, calls = step.truth, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return truth(*args)

    monkeypatch.setattr(step, "truth", interrupted)
    path = tmp_path / "rows.json"
    line = ["step", "--model", "flux.1-dev", "--size", "64x48", "--batch", "1,2", "--seconds", "0.01"]
    result = CliRunner().invoke(app, [*line, "--json", str(path)])
    assert result.exit_code != 0
    assert [(row["batch"], row["plan"]) for row in json.loads(path.read_text())["rows"]] == [
        (1, plan) for plan in ("stock", "compile", "exact", "floor")
    ]


def test_a_count_that_fails_keeps_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no profiler here\nat all")

    monkeypatch.setattr(step.kernels, "of_a_step", broken)
    data, _ = run(tmp_path, "--model", "flux.1-dev", "--size", "64x48", "--batch", "1")
    for row in data["rows"]:
        if row["plan"] != "floor":
            assert row["launches"] is None
            assert row["not_counted"] == "RuntimeError: no profiler here"
            assert row["ms"] > 0


def test_memory_is_the_plans_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak 3,000,000 of which 1,000,000 were there before, of which the plan owns its weights and arguments; and what
    its graphs hold, here 600."""
    owned: dict[str, int] = {}
    own_bytes = Laid.own_bytes

    def note(self: Laid, arguments: dict[str, Any]) -> int:
        owned[self.plan] = own_bytes(self, arguments)
        return owned[self.plan]

    monkeypatch.setattr(Laid, "own_bytes", note)
    idle = itertools.cycle((100, 700))
    monkeypatch.setattr(gpu, "idle_in_graphs", lambda: next(idle))
    data, _ = run(tmp_path, "--model", "z-image-turbo", "--size", "64x48", "--batch", "1")
    for row in data["rows"]:
        if row["plan"] in owned:
            assert row["peak_bytes"] == 3_000_600 - (1_000_000 - owned[row["plan"]])
    assert copy.copy(owned).keys() == {"stock", "compile", "exact"}
    assert len(set(owned.values())) == 1
