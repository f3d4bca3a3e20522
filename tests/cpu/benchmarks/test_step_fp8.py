"""`python -m benchmarks step` with the plans in fp8: yardsticks, floors, memory, and a peer that is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import plans
from benchmarks.__main__ import app
from benchmarks.plans import Laid, SideBySide
from benchmarks.results import Row
from benchmarks.side import judge

pytestmark = pytest.mark.usefixtures("tiny")
LINE = ("--model", "z-image-turbo", "--size", "64x48", "--batch", "1")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, _plan: None)


def run(tmp_path: Path, *line: str) -> tuple[dict[str, dict[str, Any]], str]:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["step", "--seconds", "0.01", "--json", str(path), *line])
    assert result.exit_code == 0, result.output
    return {row["plan"]: row for row in json.loads(path.read_text())["rows"]}, result.stdout


@pytest.mark.usefixtures("torchao")
def test_fp8_is_held_against_the_peer_and_the_floor_in_fp8(tmp_path: Path) -> None:
    rows, said = run(tmp_path, *LINE, "--plans", "stock,exact,torchao-fp8,torchao-fp8-eager,fp8")
    asked = ["stock", "exact", "torchao-fp8", "torchao-fp8-eager", "fp8", "floor", "fp8-floor"]
    assert list(rows) == asked
    assert not [row["error"] for row in rows.values() if "error" in row]
    peer, eager, ours = rows["torchao-fp8"], rows["torchao-fp8-eager"], rows["fp8"]
    assert peer["rel_error"] == eager["rel_error"] > rows["exact"]["rel_error"]
    for row in (peer, eager, ours):
        assert row["stock_rel_error"] == rows["stock"]["rel_error"]
        assert row["peer_rel_error"] == peer["rel_error"]
        assert row["floor_ms"] == rows["fp8-floor"]["ms"]
        assert row["correct"] is (row["rel_error"] <= peer["rel_error"])
        assert row["lay_s"] > 0
        assert row["weights_bytes"] == 0  # the stand-in for the allocator never moves
    for row in (rows["stock"], rows["exact"]):
        assert row["floor_ms"] == rows["floor"]["ms"]
        assert "peer_rel_error" not in row
        assert row["weights_bytes"] > 0
        assert row["transformer_peak_bytes"] < row["peak_bytes"]
    assert (eager["ms"], eager["launches"]) == (None, None)
    assert "cold_s" in peer
    assert "first_step_s" in ours
    assert (peer["fused_projections"], peer["fp8_layers"] > 0) == (False, True)
    assert rows["fp8-floor"]["ms"] > 0
    assert "fell_back" not in ours
    assert "torchao-fp8-eager not timed" in said
    assert said.count("looked at ") == 5
    assert said.count("launches ") == len(asked) - 1


def test_without_torchao_its_row_says_so_and_fp8_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    rows, said = run(tmp_path, *LINE, "--plans", "stock,torchao-fp8,fp8")
    why = rows["torchao-fp8"]["error"]
    assert why.startswith("MissingExtraError: the peer needs torchao, which cannot be imported (")
    assert why.endswith("; install the release that matches this torch")
    assert rows["fp8"]["ms"] > 0
    assert rows["fp8"]["rel_error"] > 0
    assert rows["fp8"]["correct"] is None
    line = next(line for line in said.splitlines() if " batch 1 fp8 " in line)
    assert "of floor" not in line
    assert not line.endswith("x")


def test_kernels_are_counted_only_where_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[str] = []
    lay = SideBySide.lay

    def note(self: SideBySide, plan: str) -> Laid:
        laid.append(plan)
        return lay(self, plan)

    monkeypatch.setattr(SideBySide, "lay", note)
    rows, _ = run(tmp_path, *LINE, "--plans", "stock", "--no-launches")
    assert laid == ["stock"]
    assert list(rows) == ["stock", "floor"]
    assert rows["stock"]["launches"] is None


@pytest.mark.parametrize(
    ("errors", "verdicts"),
    [
        ({"stock": 0.01, "fp8": 0.03, "torchao-fp8": 0.04}, {"stock": True, "fp8": True, "torchao-fp8": True}),
        ({"fp8": 0.05, "torchao-fp8": 0.04}, {"fp8": False, "torchao-fp8": True}),
        ({"fp8": 0.05, "torchao-fp8-eager": 0.06}, {"fp8": True, "torchao-fp8-eager": True}),
        ({"fp8": 0.05, "torchao-fp8": 0.04, "torchao-fp8-eager": 0.06}, {"fp8": False, "torchao-fp8-eager": True}),
        ({"fp8": 0.0101}, {"fp8": None}),
        ({"fp8": None, "torchao-fp8": None}, {"fp8": None, "torchao-fp8": None}),
        ({"fp8": float("nan"), "torchao-fp8": 0.04}, {"fp8": False}),
        ({"fp8": 0.01, "torchao-fp8": float("nan")}, {"fp8": False, "torchao-fp8": False}),
        ({"torchao-fp8": float("inf")}, {"torchao-fp8": False}),
        ({"exact": 0.011, "fp8": 0.2, "torchao-fp8": 0.3}, {"exact": False, "fp8": True}),
    ],
)
def test_verdicts(errors: dict[str, float | None], verdicts: dict[str, bool | None]) -> None:
    rows = {plan: Row("step", "m", "1x1", 1, plan) for plan in errors}
    judge(rows, errors, 0.01)
    assert {plan: rows[plan].correct for plan in verdicts} == verdicts


def test_a_peer_that_fails_after_its_check_is_still_the_yardstick() -> None:
    rows = {plan: Row("step", "m", "1x1", 1, plan) for plan in ("fp8", "torchao-fp8")}
    rows["torchao-fp8"].error = "out of memory"
    judge(rows, {"torchao-fp8": 0.04, "fp8": 0.03}, 0.01)
    assert rows["fp8"].correct
    assert rows["fp8"].peer_rel_error == 0.04


def test_a_copy_that_does_not_fit_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plans.copy, "deepcopy", full)
    rows, _ = run(tmp_path, *LINE, "--plans", "stock,fp8", "--no-launches")
    assert rows["fp8"]["error"] == "out of memory"
    assert rows["stock"]["ms"] > 0
    assert rows["fp8-floor"]["ms"] > 0
