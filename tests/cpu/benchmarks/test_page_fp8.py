"""The page's section on fp8: memory, what had to be reached, and nothing green beside a red check."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from tiny_workloads import ENVIRONMENT

from benchmarks.page import pages
from benchmarks.results import Row, Run
from benchmarks.targets import TARGETS

H200 = "NVIDIA H200"
GIB = 2**30
STEP: dict[str, tuple[float, float, float, float]] = {
    "stock": (175.0, 121.0, 22.7, 0.0743),
    "torchao-fp8": (99.6, 68.9, 16.4, 0.0800),
    "fp8": (69.0, 59.0, 12.5, 0.0790),
    "exact": (123.0, 89.0, 22.6, 0.0742),
}


def step(plan: str, model: str = "flux.1-dev", **changes: Any) -> Row:
    ms, joules, gib, error = STEP[plan]
    row = Row("step", model, "1024x1024", 1, plan, ms=ms, spread=(ms, ms), floor_ms=75.0, joules=joules)
    row.more = {"weights_bytes": int(gib * GIB) - GIB, "transformer_peak_bytes": int(gib * GIB)}
    if plan == "torchao-fp8":
        row.more |= {"cold_s": 279.0, "lay_s": 1.5}
    for name, value in changes.items():
        if name in ("ms", "joules", "floor_ms", "peak_bytes", "error"):
            setattr(row, name, value)
    error = changes.get("rel_error", error)
    row.judge(error, STEP["stock"][3], STEP["torchao-fp8"][3] if "fp8" in plan else None)
    return row


def floors(model: str = "flux.1-dev") -> list[Row]:
    return [
        Row("step", model, "1024x1024", 1, "floor", ms=115.5, floor_ms=115.5, joules=79.7),
        Row("step", model, "1024x1024", 1, "fp8-floor", ms=75.1, floor_ms=75.1, joules=51.7),
    ]


def cold(seconds: float, variant: str = "filled cache") -> Row:
    row = Row("cold-start", "flux.1-dev", "1024x1024", 1, "fp8", variant, ms=1e3 * seconds + 9e3)
    row.more = {"import_s": 9.0, "load_s": 4.0, "lay_s": 9.0, "first_step_s": seconds, "ready_s": seconds + 9.0}
    return row


def page(*rows: Row, device: str = H200, later: tuple[Row, ...] = ()) -> dict[str, str]:
    runs = [Run("a.json", {**ENVIRONMENT, "device": device}, rows)]
    if later:
        runs.append(Run("b.json", {**ENVIRONMENT, "device": device, "time": "2026-02-02T00:00:00+00:00"}, later))
    return pages(runs)


def reached(text: str, what: str, model: str = "flux.1-dev") -> list[str]:
    part = text.partition("### What it had to reach")[2]
    (line,) = [row for row in part.splitlines() if row.startswith(f"| {what} | {model} |")]
    return line.strip("| ").split(" | ")[2:]


def plans(**changes: Any) -> list[Row]:
    return [step("stock"), step("exact"), step("torchao-fp8"), step("fp8", **changes), *floors()]


def test_figures_stand_beside_stock_peer_and_floor() -> None:
    text = page(*plans(), later=(cold(2.5), cold(20.0, "empty cache")))["performance.md"]
    assert reached(text, "step, ms") == ["175.0", "99.6", "75.1", "<= 81", "<= 70", "69.0", "aim met", "1"]
    assert reached(text, "J a step") == ["121.0", "68.9", "51.7", "<= 60", "–", "59.0", "green", "1"]
    peak = reached(text, "peak of the transformer, GiB")
    assert peak == ["22.70", "16.40", "–", "<= 13", "–", "12.50", "green", "1"]
    errors = reached(text, "error against fp32")
    assert errors == ["0.0743", "0.0800", "–", "the peer's", "–", "0.0790", "green", "1"]
    first = reached(text, "first step, weights converted, kernels cached, s")
    assert first == ["–", "279.0", "–", "<= 3", "–", "2.5", "green", "2"]
    assert reached(text, "step, ms", "z-image-turbo")[-2:] == ["not measured", "–"]
    assert "--plans stock,exact,fp8,torchao-fp8" in text


@pytest.mark.parametrize(
    ("what", "changes", "verdict"),
    [
        ("step, ms", {"ms": 81.0}, "green"),
        ("step, ms", {"ms": 81.1}, "**red**"),
        ("J a step", {"joules": 60.1}, "**red**"),
        ("J a step", {"joules": None}, "not measured"),
        ("error against fp32", {"rel_error": 0.0801}, "**red**"),
        ("step, ms", {"rel_error": 0.0801}, "**red**"),
        ("J a step", {"rel_error": float("nan")}, "**red**"),
        ("step, ms", {"rel_error": None}, "not checked"),
        ("step, ms", {"error": "out of memory"}, "not measured"),
    ],
)
def test_what_is_missed_is_red(what: str, changes: dict[str, Any], verdict: str) -> None:
    assert reached(page(*plans(**changes))["performance.md"], what)[-2] == verdict


def test_a_slow_first_step_is_red() -> None:
    text = page(*plans(), cold(3.1))["performance.md"]
    assert reached(text, "first step, weights converted, kernels cached, s")[-2] == "**red**"


def test_errors_of_the_eager_peer_serve_where_it_was_not_compiled() -> None:
    eager = Row("step", "flux.1-dev", "1024x1024", 1, "torchao-fp8-eager")
    eager.judge(0.08, 0.0743, 0.08)
    text = page(step("stock"), eager, step("fp8"), *floors())["performance.md"]
    assert reached(text, "error against fp32")[1] == "0.0800"
    assert reached(text, "step, ms")[1] == "–"
    assert "| torchao-fp8-eager | – | – | – | – | – | – | 0.0800 / 0.0743 / 0.0800 | green |" in text


def test_memory_of_the_runs_that_hold_fp8_only() -> None:
    other = step("stock", "z-image-turbo")
    text = page(*plans(), other)["performance.md"]
    part = text.partition("## fp8\n")[2].partition("###")[0]
    assert "| flux.1-dev | 1024x1024 | 1 | fp8 | 11.50 | 12.50 | – | – | 1 |" in part
    assert "| flux.1-dev | 1024x1024 | 1 | torchao-fp8 | 15.40 | 16.40 | 1.50 | 279.00 | 1 |" in part
    assert "| flux.1-dev | 1024x1024 | 1 | stock | 21.70 | 22.70 | – | – | 1 |" in part
    assert "z-image-turbo" not in part


def test_another_card_has_no_requirements_and_without_fp8_there_is_no_section() -> None:
    elsewhere = page(*plans(), device="Paper GPU")["performance.md"]
    assert "## fp8\n" in elsewhere
    assert "What it had to reach" not in elsewhere
    without = page(step("stock"), step("exact"), floors()[0])["performance.md"]
    for words in ("fp8", "Lossy"):
        assert words not in without.replace("in fp8 the conversion", "").replace("by `fp8`", "")


def test_the_step_table_shows_all_three_errors() -> None:
    text = page(*plans())["performance.md"]
    line = next(row for row in text.splitlines() if row.startswith("| 1024x1024 | 1 | fp8 |"))
    assert "| 2.54x | 0.920 |" in line
    assert "| 0.0790 / 0.0743 / 0.0800 | green |" in line
    assert "Lossy plans: `fp8` is fusedit" in text
    red = page(*plans(rel_error=0.09))["performance.md"]
    line = next(row for row in red.splitlines() if row.startswith("| 1024x1024 | 1 | fp8 |"))
    assert "**red**" in line
    assert "x |" not in line


def test_the_chart_has_both_floors() -> None:
    svg = page(*plans(floor_ms=75.1))["performance.svg"]
    root = ET.fromstring(svg)
    lines = {e.get("class"): float(str(e.get("x1"))) for e in root.iter() if e.tag.endswith("line")}
    assert lines.keys() == {"floor", "floor in-fp8"}
    bars = {e.get("class") for e in root.iter() if e.tag.endswith("rect")}
    assert bars == {"card", "stock", "exact", "torchao-fp8", "fp8"}
    assert "dashed: in fp8." in svg
    plain = page(step("stock"), step("exact"), floors()[0])["performance.svg"]
    assert "dashed" not in plain


def test_targets_are_those_of_both_models() -> None:
    assert {target.model for target in TARGETS} == {"flux.1-dev", "z-image-turbo"}
    assert all(target.aim is None or target.aim < (target.required or 0) for target in TARGETS)
    assert len({(target.what, target.model) for target in TARGETS}) == len(TARGETS)
