"""The LoRA benchmark: LoRAs come and go on one pipeline, and the page holds each against the step without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_workloads import ENVIRONMENT, TINY
from typer.testing import CliRunner

from benchmarks import lora, lora_section
from benchmarks.__main__ import app
from benchmarks.newest import Entry, Newest
from benchmarks.results import Row, Run
from benchmarks.workloads import Workload
from fusedit.lora.adapters import tuner_layers


def test_every_linear_layer_of_every_block(workload: Workload) -> None:
    state = lora.state(workload.pipe.transformer, 4)
    named = {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in state}
    linear = {path for path, m in workload.pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear)}
    outside = linear - named
    assert outside
    assert not [
        path for path in outside if "blocks" in path or path.startswith(("layers", "noise_", "context_refiner"))
    ]
    assert {t.dtype for t in state.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("tiny")
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "STEPS", 4)
    monkeypatch.setattr(lora, "FIRST", 2)
    path = tmp_path / "rows.json"
    command = ["lora", "--ranks", "8,4", "--size", "64x48", "--seconds", "0.01", "--json", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    expected = [(m, p, v) for m in TINY for p in ("exact", "fp8") for v in (None, "rank 8", "rank 4")]
    assert [(row["model"], row["plan"], row.get("variant")) for row in rows] == expected
    assert all(row["ms"] > 0 and row["kernels_compiled"] == 0 and row.get("error") is None for row in rows)
    with_one = [row for row in rows if row.get("variant")]
    assert all(row["swap_s"] > 0 and row["layers"] > 10 and row["lora_bytes"] > 0 for row in with_one)
    assert all("settle_s" in row and row["joules"] is None for row in with_one)
    assert all(row["not_inside"] == {} and row["copies_bytes"] > 0 for row in with_one)
    checked = [row for row in rows if row["rel_error"] is not None]
    assert [row["variant"] for row in checked] == ["rank 8"] * 4
    assert all(row["load_s"] > 0 for row in checked)
    assert all(row["correct"] for row in checked if row["plan"] == "exact")
    assert "lora flux.1-dev 64x48 batch 1 exact rank 8" in result.stdout


def test_what_was_there_is_there_again(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "STEPS", 4)
    monkeypatch.setattr(lora, "FIRST", 2)
    weights = [p.detach().clone() for p in workload.pipe.transformer.parameters()]
    rows = lora.measure(workload, (64, 48), ["exact"], [2], 0.01)
    assert [row.error for row in rows] == [None, None]
    assert tuner_layers(workload.pipe.transformer) == []
    assert all(torch.equal(a, b) for a, b in zip(weights, workload.pipe.transformer.parameters(), strict=True))


def test_a_failure_is_said(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(lora, "repeated", fails)
    rows = lora.measure(workload, (64, 48), ["exact"], [2], 0.01)
    assert [row.error for row in rows] == ["RuntimeError: no room"] * 2
    assert tuner_layers(workload.pipe.transformer) == []


def test_ranks_are_whole_numbers() -> None:
    for wrong in ("0", "x", "4,", "-1"):
        result = CliRunner().invoke(app, ["lora", "--ranks", wrong])
        assert result.exit_code == 2
        assert "ranks is 0; give a whole number" in result.stderr


def page(*rows: Row) -> list[str]:
    run = Run("run.json", ENVIRONMENT, rows)
    newest = Newest([run])
    text = lora_section.lora(newest, [Entry(row, run) for row in rows])
    return [line for line in text.splitlines() if line.startswith("| flux")]


def row(variant: str, ms: float | None, **values: Any) -> Row:
    return Row("lora", "flux.1-dev", "1024x1024", 1, "exact", variant, ms, **values)


@pytest.mark.parametrize(("ms", "verdict"), [(105.0, "green"), (105.1, "**red**")])
def test_the_page_holds_each_against_the_step_without(ms: float, verdict: str) -> None:
    more = {"load_s": 0.512, "swap_s": 0.734, "settle_s": 0.25, "copies_bytes": 3 << 20, "kernels_compiled": 0}
    one = row("rank 32", ms, rel_error=0.01, stock_rel_error=0.02, correct=True, more=more)
    lines = page(row("", 100.0), one, row("rank 128", 120.0))
    assert f"| {ms / 100:.3f} | {verdict} | 0.51 | 0.73 | 0.25 | 3 | 0 | 0.0100 / 0.0200 | green | 1 |" in lines[1]
    assert "| none | 100.0 | – | – |" in lines[0]
    assert "| rank 128 | 120.0 | 1.200 | – |" in lines[2]


def test_no_share_beside_a_red_check_or_without_the_step() -> None:
    red = row("rank 32", 101.0, rel_error=0.05, stock_rel_error=0.02, correct=False)
    assert "| 101.0 | – | – |" in page(row("", 100.0), red)[1]
    assert "| 101.0 | – | – |" in page(row("rank 32", 101.0))[0]
    assert "| out of memory | – |" in page(row("rank 32", None, error="out of memory"))[0]
