"""Progress where nobody watches: few lines, none of a short run, and none that could end a long one."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from support.whole_pipes import flux_pipe
from typer.testing import CliRunner

from fusedit import progress
from fusedit.progress import LineProgress, Progress, progress_on


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_long_run_says_now_and_then_how_far_it_is() -> None:
    out, clock = io.StringIO(), Clock()
    told = LineProgress(out, clock)
    told.begin("looking at what layers read", 4)
    for _ in range(4):
        clock.now += 2.0
        told.finish_picture()
    told.begin("quantising", 500)
    for _ in range(500):
        clock.now += 0.03
        told.picture("a layer")
        told.finish_picture()
    told.begin("drawing", 2)
    clock.now += 7
    told.step(3, 20)
    assert out.getvalue().splitlines() == [
        "fusedit: looking at what layers read, 3 of 4 (6 s)",
        "fusedit: quantising, 100 of 500 (11 s)",
        "fusedit: quantising, 267 of 500 (16 s)",
        "fusedit: quantising, 434 of 500 (21 s)",
        "fusedit: drawing, 0 of 2, step 3 of 20 (30 s)",
    ]


def test_a_short_run_says_nothing() -> None:
    out, clock = io.StringIO(), Clock()
    told = LineProgress(out, clock)
    told.begin("drawing", 1)
    clock.now += progress.QUIET - 0.1
    told.step(1, 2)
    told.finish_picture()
    assert out.getvalue() == ""


def test_a_log_that_takes_nothing_ends_no_run() -> None:
    out, clock = io.StringIO(), Clock()
    told = LineProgress(out, clock)
    out.close()
    clock.now += 60
    told.begin("drawing", 1)
    assert told.total == 1


def test_who_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_on(io.StringIO()), LineProgress)
    monkeypatch.setattr(sys, "stderr", None)
    assert type(progress_on()) is Progress


def test_quantising_into_a_log_tells_of_the_pictures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.cli import app

    pipe: Any = flux_pipe()
    pipe.save_pretrained(tmp_path / "stock")
    monkeypatch.setattr(progress, "QUIET", 0.0)
    command = ["quantize", str(tmp_path / "stock"), "--dtype", "fp32"]
    lines = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "a")]).stderr.splitlines()
    titles = [line.removeprefix("fusedit: ").partition(" (")[0] for line in lines]
    assert titles[:5] == [f"looking at what layers read, {n} of 4" for n in range(5)]
    assert titles[5].startswith("quantising, 0 of ")
    assert CliRunner().invoke(app, [*command, "-o", str(tmp_path / "b"), "--json"]).stderr == ""
