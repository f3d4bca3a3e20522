"""Pictures of the embedded models: every prompt once, medians by the tier's rule, and the page's table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_workloads import ENVIRONMENT
from typer.testing import CliRunner

import fusedit
from benchmarks import pictures
from benchmarks.__main__ import app
from benchmarks.page import pages
from benchmarks.reading import read
from benchmarks.results import Row, Run
from fusedit import defaults


def test_fifty_prompts() -> None:
    assert len(set(pictures.PROMPTS)) == 50
    assert all(prompt.count(", ") == 1 and prompt.endswith(" style") for prompt in pictures.PROMPTS)


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PROMPTS", ("fox, 3d style", "owl, flat style"))
    # With the model's own 9 steps the test took 39 CPU seconds, with 3 it takes 27.
    short = {name: replace(own, steps=3) for name, own in defaults.MODELS.items()}
    monkeypatch.setattr(defaults, "MODELS", short)
    path = tmp_path / "rows.json"
    command = ["pictures", "--model", "tiny-z-image", "--dtype", "fp32", "--json", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [row.plan for row in read([path])[0].rows] == ["exact", "fp8"]
    exact, lossy = json.loads(path.read_text())["rows"]
    assert (exact["plan"], lossy["plan"]) == ("exact", "fp8")
    assert exact["variant"] == lossy["variant"] == "fp32"
    assert exact["pairs"] == exact["keep_the_rule"] == 2
    assert exact["correct"]
    assert exact["psnr_db"] > 80 > lossy["psnr_db"] >= lossy["psnr_lowest_db"] > 15
    assert lossy["correct"] == (lossy["psnr_db"] >= 30 and lossy["ssim"] >= 0.95)
    assert "pictures tiny-z-image 256x256 fp8 fp32 median" in result.stdout


def test_pairs_that_could_not_be_measured_leave_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = fusedit.compare
    monkeypatch.setattr(pictures, "PROMPTS", ("fox, 3d style",))

    def broken(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs, steps=1, width=64, height=64)
        return replace(made, pairs=tuple(replace(pair, psnr_db=None) for pair in made.pairs))

    monkeypatch.setattr(fusedit, "compare", broken)
    row = pictures.measure("tiny-z-image", "exact", "fp32")
    assert row.error == "1 of 1 pairs could not be measured"
    assert row.more == {}
    assert row.correct is None


def test_a_failure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "measure", lambda *_: 1 / 0)
    result = CliRunner().invoke(app, ["pictures", "--model", "tiny-flux", "--plans", "fp8"])
    assert result.exit_code == 0
    assert "pictures tiny-flux  fp8 bf16 ZeroDivisionError: division by zero" in result.stdout


@pytest.mark.parametrize("option", [["--model", "flux.1-dev"], ["--plans", "stock"], ["--dtype", "fp16"]])
def test_what_it_does_not_know(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["pictures", *option])
    assert result.exit_code == 2
    assert f"unknown {option[0].strip('-').removesuffix('s')} '{option[1]}'" in result.stderr


def test_the_page() -> None:
    more = {
        "pairs": 50,
        "psnr_db": 31.07,
        "psnr_lowest_db": 22.2,
        "ssim": 0.9846,
        "ssim_lowest": 0.9555,
        "keep_the_rule": 32,
    }
    rows = (
        Row("pictures", "tiny-flux", "256x256", 1, "fp8", "bf16", correct=True, more=more),
        Row("pictures", "tiny-z-image", "256x256", 1, "fp8", "bf16", correct=False, more={**more, "psnr_db": 29.0}),
        Row("pictures", "tiny-z-image", "", 1, "exact", "bf16", error="out of memory"),
    )
    page = pages([Run("a.json", ENVIRONMENT, rows)])["performance.md"]
    assert "| tiny-flux | 256x256 | bf16 | fp8 | 31.1 | 22.2 | 0.985 | 0.956 | 32 of 50 | green | 1 |" in page
    assert "| 29.0 | 22.2 | 0.985 | 0.956 | 32 of 50 | **red** | 1 |" in page
    assert "| exact | out of memory | – |" in page
    assert "python -m benchmarks pictures --json FILE" in page
