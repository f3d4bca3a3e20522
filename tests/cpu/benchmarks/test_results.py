"""Rows and files of results: keys, verdicts, ratios, whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import results, table
from benchmarks.reading import read
from benchmarks.results import Results, Row
from fusedit.errors import OutputError, UsageError

KEYS = {
    "benchmark",
    "model",
    "size",
    "batch",
    "plan",
    "ms",
    "spread",
    "floor_ms",
    "launches",
    "joules",
    "peak_bytes",
    "rel_error",
    "stock_rel_error",
    "correct",
}


def row(plan: str = "exact", ms: float | None = 5.0, error: float | None = 0.1, stock: float | None = 0.1) -> Row:
    made = Row("step", "flux.1-dev", "512x512", 1, plan, ms=ms, spread=(4.0, 6.0), floor_ms=4.0)
    made.judge(error, stock)
    return made


def test_a_row_has_the_keys_that_were_asked_for() -> None:
    assert row().to_dict().keys() == KEYS | {"of_floor"}
    assert Row("step", "m", "1x1", 1, "p").to_dict().keys() == KEYS
    full = Row("cold-start", "m", "1x1", 1, "p", "empty cache", error="out of memory", more={"cold_s": 1.5})
    assert full.to_dict().keys() == KEYS | {"variant", "error", "cold_s"}


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    made = row()
    made.more = {"cold_s": 8.7, "note": "x"}
    path = tmp_path / "deep" / "rows.json"
    kept = Results(path)
    kept.add([made])
    kept.add([row("stock")])
    (run,) = read([path])
    assert [r.to_dict() for r in run.rows] == [
        {**r, "spread": list(r["spread"])} for r in (made.to_dict(), row("stock").to_dict())
    ]
    assert run.environment["device"] == "Paper GPU"
    assert run.when == "2026-01-02T03:04:05+00:00"
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


@pytest.mark.parametrize(
    ("error", "stock", "verdict"),
    [
        (0.1, 0.1, True),
        (0.105, 0.1, True),
        (0.1051, 0.1, False),
        (math.nan, 0.1, False),
        (0.1, math.nan, False),
        (math.inf, 0.1, False),
        (None, 0.1, None),
        (0.1, None, None),
    ],
)
def test_the_verdict_and_no_ratio_beside_a_red_one(
    error: float | None, stock: float | None, verdict: bool | None
) -> None:
    judged = row(error=error, stock=stock)
    assert judged.correct is verdict
    base = row("stock", 10.0)
    line = table.line(judged, base)
    assert (judged.faster_than(base) == 2.0) is (verdict is True)
    assert (judged.of_floor == 1.25) is (verdict is True)
    assert ("2.00x" in line) is (verdict is True)
    assert ("of floor" in line) is (verdict is True)
    assert ("RED" in line) is (verdict is False)


def test_a_plan_in_fp8_survives_the_file_with_its_yardstick(tmp_path: Path) -> None:
    made = row("fp8")
    made.judge(0.03, 0.01, 0.04)
    made.more = {"weights_bytes": 5, "transformer_peak_bytes": 7, "lay_s": 2.5}
    assert made.to_dict().keys() == KEYS | {"of_floor", "peer_rel_error", "weights_bytes", "lay_s"} | {
        "transformer_peak_bytes"
    }
    path = tmp_path / "rows.json"
    Results(path).add([made])
    (run,) = read([path])
    (again,) = run.rows
    assert (again.correct, again.peer_rel_error, again.more) == (True, 0.04, made.more)
    made.judge(0.05, 0.01, 0.04)
    assert "RED: the peer's error is 4.00e-02" in table.line(made, None)
    untimed = row("torchao-fp8-eager", None)
    untimed.judge(0.04, 0.01, 0.04)
    assert "not timed" in table.line(untimed, None)
    assert "error 4.00e-02" in table.line(untimed, None)


def test_no_ratio_without_both_times() -> None:
    assert row().faster_than(None) is None
    assert row().faster_than(row("stock", None)) is None
    assert row(ms=None).faster_than(row("stock")) is None
    failed = row()
    failed.error = "out of memory"
    assert failed.faster_than(row("stock")) is None
    assert table.line(failed, row("stock")).endswith("out of memory")
    broken = row("stock")
    broken.error = "out of memory"
    assert row().faster_than(broken) is None


def test_not_finite_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    Results(path).add([row(error=math.nan)])
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert data["rows"][0]["rel_error"] == "nan"
    assert data["rows"][0]["correct"] is False


def test_a_write_that_fails_leaves_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    kept = Results(path)
    kept.add([row()])
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OutputError("no space left")

    monkeypatch.setattr(results, "write_together", fail)
    with pytest.raises(OutputError):
        kept.add([row("stock")])
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}], "date": "2026-01-01"}', '{"rows": 3}'])
def test_files_that_are_none_of_ours(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no results file"):
        read([path])
    with pytest.raises(UsageError, match="no such file"):
        read([tmp_path / "absent.json"])


def test_runs_are_read_oldest_first(tmp_path: Path) -> None:
    for name, when in (("a", "2026-02-01T10:00:00+00:00"), ("b", "2026-02-01T09:00:00+00:00"), ("c", "2026-01-31")):
        data = {"device": "x", "date": when[:10], "rows": []} | ({"time": when} if "T" in when else {})
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert [run.name for run in read(sorted(tmp_path.iterdir()))] == ["c.json", "b.json", "a.json"]
