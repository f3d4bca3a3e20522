"""The page: equal to what the committed results give, newest rows, and no ratio beside a red check."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from tiny_workloads import ENVIRONMENT
from typer.testing import CliRunner

from benchmarks import page
from benchmarks.__main__ import app
from benchmarks.environment import ROOT
from benchmarks.page import RESULTS, pages
from benchmarks.reading import read
from benchmarks.results import Results, Row, Run

BENCHMARKS = (
    *("step", "launches", "image", "cold-start", "new-size", "vae-decode", "vae-encode", "ops", "convolutions"),
    *("layouts", "other"),
)


def rows(exact_error: float = 0.1, benchmark: str = "step", **changes: Any) -> tuple[Row, ...]:
    made = []
    for plan, ms, error in (("stock", 20.0, 0.1), ("compile", 15.0, 0.1), ("exact", 10.0, exact_error)):
        row = Row(benchmark, "flux.1-dev", "512x512", 1, plan, ms=ms, spread=(ms - 1, ms + 1), floor_ms=8.0)
        row.launches, row.joules, row.peak_bytes = 1234.0, 9.5, 3 * 2**30
        row.judge(error, 0.1)
        made.append(row)
    floor = Row(benchmark, "flux.1-dev", "512x512", 1, "floor", ms=8.0, spread=(7.9, 8.1), floor_ms=8.0)
    for row in (*made, floor):
        for name, value in changes.items():
            setattr(row, name, value)
    return (*made, floor)


def run(name: str, *found: Row, **where: Any) -> Run:
    return Run(name, {**ENVIRONMENT, **where}, found)


def line(text: str, *words: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith("|") and all(f"| {word} |" in row for word in words)]
    return found


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    made = pages(read(sorted(RESULTS.glob("*.json"))))
    assert "performance.md" in made
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run `python -m benchmarks page`"


def test_it_says_where_and_that_weights_are_random() -> None:
    text = pages([run("a.json", *rows())])["performance.md"]
    assert "**All weights are random**" in text.replace("\n", " ")
    for word in ("Paper GPU, 100 W", "1.2.3", "torch 2.0", "2026-01-02", "`0123456789ab`", "a.json"):
        assert word in text


def test_a_green_row_has_its_ratios() -> None:
    text = pages([run("a.json", *rows())])["performance.md"]
    cells = ["512x512", "1", "exact", "10.0 (9.0 to 11.0)", "2.00x", "1.250", "1,234", "9.5", "3.00"]
    assert line(text, "exact") == "| " + " | ".join([*cells, "0.1000 / 0.1000", "green", "–", "1"]) + " |"
    assert "| 1.33x |" in line(text, "compile")
    assert "x |" not in line(text, "stock")
    assert "| – | – | 1 |" in line(text, "floor")


@pytest.mark.parametrize("benchmark", ["step", "image", "vae-decode"])
def test_no_ratio_beside_a_red_row(benchmark: str) -> None:
    files = pages([run("a.json", *rows(exact_error=0.2, benchmark=benchmark))])
    red = line(files["performance.md"], "exact")
    assert "**red**" in red
    assert "2.00" not in red
    assert "1.250" not in red
    if benchmark == "step":
        assert "check failed" in files["performance.svg"]
        assert "2.00x" not in files["performance.svg"]


def test_a_row_that_was_not_checked_or_not_measured_has_none_either() -> None:
    unchecked = line(pages([run("a.json", *rows(correct=None))])["performance.md"], "exact")
    assert "not checked" in unchecked
    assert "2.00x" not in unchecked
    failed = pages([run("a.json", *rows(error="out of memory", ms=None))])["performance.md"]
    assert "| out of memory |" in line(failed, "exact")


def test_the_newest_row_wins_and_is_compared_with_its_own_run_only() -> None:
    old = run("old.json", *rows(), time="2026-01-01T00:00:00+00:00")
    again = [row for row in rows() if row.plan == "exact"]
    again[0].ms = 5.0
    text = pages([old, run("new.json", *again)])["performance.md"]
    exact = line(text, "exact")
    assert "| 5.0 (" in exact
    assert "x |" not in exact
    assert exact.endswith("| 2 |")
    assert line(text, "stock").endswith("| 1 |")
    both = pages([old, run("new.json", *rows())])["performance.md"]
    assert "old.json" not in both
    assert "2.00x" in line(both, "exact")


def test_two_models_measured_apart_are_one_page() -> None:
    other = rows(model="z-image-turbo")
    text = pages([run("a.json", *rows()), run("b.json", *other)])["performance.md"]
    assert text.index("### flux.1-dev") < text.index("### z-image-turbo")
    assert text.count("2.00x") == 2


def test_two_devices_have_a_part_each() -> None:
    files = pages([run("a.json", *rows()), run("b.json", *rows(), device="Other GPU")])
    assert files.keys() == {"performance.md", "performance.svg", "performance-2.svg"}
    text = files["performance.md"]
    assert text.index("# Paper GPU") < text.index("# Other GPU")
    assert "Other GPU" in files["performance-2.svg"]


def test_the_chart_is_an_image_that_is_readable_on_light_and_dark() -> None:
    svg = pages([run("a.json", *rows())])["performance.svg"]
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in svg
    bars = {e.get("class"): float(str(e.get("width"))) for e in root.iter() if e.tag.endswith("rect")}
    assert bars["stock"] == 2 * bars["exact"]
    (floor,) = [e for e in root.iter() if e.get("class") == "floor"]
    left = min(float(str(e.get("x"))) for e in root.iter() if e.get("class") == "exact")
    assert float(str(floor.get("x1"))) - left == pytest.approx(0.8 * bars["exact"], abs=0.2)
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert "10.0 ms, 2.00x" in texts


def test_every_benchmark_has_its_section() -> None:
    launches = Row("launches", "flux.1-dev", "512x512", 1, "exact", "double", launches=17.0)
    cold = Row("cold-start", "flux.1-dev", "1024x1024", 1, "exact", "empty cache", ms=2000.0)
    cold.more = {
        "lay_s": 0.25,
        "first_step_s": 1.75,
        "import_s": 9.0,
        "load_s": 4.0,
        "ready_s": 2.0,
        "kernels_compiled": 11,
        "kernels_loaded": 0,
    }
    new = Row("new-size", "flux.1-dev", "256x256", 2, "exact", "1+512 tokens", ms=30.0)
    new.more = {"first_step_ms": 80.0, "plan_ms": 50.0, "kernels_compiled": 0, "new_variants": 0}
    image = [Row("image", "flux.1-dev", "1024x1024", 1, plan, ms=ms) for plan, ms in (("stock", 6e3), ("exact", 4e3))]
    for row in image:
        row.judge(0.1, 0.1)
        row.more = {"text_s": 0.05, "denoise_s": 3.0, "vae_s": 0.1, "steps": 28}
    ceiling = Row("ceiling", "copy and product", "", 1, "plain", more={"tb_s": 4.17, "tflop_s": 748.0})
    ops = [
        Row("ops", "swiglu", "z-image", 1, plan, ms=ms, correct=True) for plan, ms in (("plain", 0.3), ("fused", 0.1))
    ]
    for row in ops:
        row.more = {"tb_s": 3.5, "percent_of_ceiling": 84.0}
    other = rows(benchmark="other", model="something")
    text = pages([run("a.json", launches, cold, new, *image, ceiling, *ops, *other)])["performance.md"]
    assert "| flux.1-dev | double | exact | 17 | 1 |" in text
    assert "| flux.1-dev | exact | empty | 9.00 | 4.00 | 2.00 | 0.25 | 1.75 | 11 | 0 | 1 |" in text
    assert "| flux.1-dev | exact | 256x256 | 1, 512 | 80.0 | 30.0 | 50.0 | 0 | 0 | 1 |" in text
    assert "| 28 | exact | 4.000 | 1.50x | 0.050 | 3.000 | 0.100 |" in text
    assert "| swiglu | z-image | 0.1000 | 0.3000 | 3.00x | 3.50 TB/s | 84 % | green | 1 |" in text
    assert "4.17 TB/s" in text
    assert "## other\n" in text
    for word in (
        "## ceiling",
        "## VAE",
        "## Convolutions",
        "## Memory layouts",
        "benchmarks vae",
        "convolutions",
        "layouts",
    ):
        assert word not in text, word


def test_the_two_halves_of_the_vae_have_a_section_each() -> None:
    shown = ("vae-decode", "vae-encode")
    found = [row for benchmark in shown for row in rows(benchmark=benchmark)]
    text = pages([run("a.json", *found)])["performance.md"]
    assert text.index("## VAE: decode") < text.index("## VAE: encode") < text.index("## Measured on")
    assert "torch.compile` of the encoder" in text
    assert text.count("| exact | 10.0 (9.0 to 11.0) | 2.00x | 1.250 | 1,234 | 9.5 | 3.00 | 0.1000 / 0.1000 |") == 2
    assert "python -m benchmarks vae --json FILE" in text
    assert "performance.svg" not in text  # the chart is of steps


def layer(**ms: float) -> list[Row]:
    made = []
    for plan, value in ms.items():
        row = Row("convolutions", "512->256 3x3", "512x512", 1, plan.replace("_", "-").replace("-bias", "+bias"))
        row.ms, row.rel_error, row.stock_rel_error, row.correct = value, 0.002, 0.002, True
        made.append(row)
    return made


def test_a_layer_is_a_row_with_its_fastest() -> None:
    found = layer(cudnn=0.3, cudnn_bias=0.5, own=0.4, winograd_2=0.2, winograd_4=0.1)
    found[2].error, found[2].ms, found[2].correct = "no such op: conv2d", None, None
    text = pages([run("a.json", *found)])["performance.md"]
    cells = ["512->256 3x3", "512x512", "0.3000", "0.5000", "–", "no such op: conv2d", "0.2000", "0.1000"]
    errors = "0.0020 / 0.0020 / – / – / 0.0020 / 0.0020"
    assert (
        line(text, "512->256 3x3") == "| " + " | ".join([*cells, "–", "–", "winograd-4", errors, "green", "1"]) + " |"
    )
    assert "python -m benchmarks convolutions --json FILE" in text


def test_a_red_layer_is_never_the_fastest() -> None:
    found = layer(cudnn=0.3, cudnn_bias=0.5, winograd_4=0.1)
    found[2].rel_error, found[2].correct = float("nan"), False
    shown = line(pages([run("a.json", *found)])["performance.md"], "512->256 3x3")
    assert "| 0.3000 | 0.5000 | – | – | – | 0.1000 | – | – | cudnn+bias |" in shown
    assert "**red**: winograd-4" in shown


def test_layers_of_two_runs_are_not_compared() -> None:
    old = run("old.json", *layer(cudnn=0.3, own=0.1), time="2026-01-01T00:00:00+00:00")
    shown = line(pages([old, run("new.json", *layer(cudnn=0.2))])["performance.md"], "512->256 3x3")
    assert "| 0.2000 | – | – | – | – | – | – | – | – |" in shown


def test_layouts_have_their_section() -> None:
    found = [
        Row("layouts", "conv 3x3", "128@512x512", 1, plan, variant, ms=ms)
        for plan, variant, ms in (("nchw", "torch", 0.5), ("nhwc", "torch", 0.2), ("nhwc", "own-32", 0.1))
    ]
    for row, error in zip(found, (0.002, 0.002, 0.02), strict=True):
        row.judge(error, 0.002)
    found.append(Row("layouts", "conv 3x3", "128@256x256", 1, "nhwc", "torch", error="out of memory"))
    text = pages([run("a.json", *found)])["performance.md"]
    assert "## Memory layouts" in text
    assert "| conv 3x3 | 128@512x512 | nhwc | torch | 0.2000 | 0.0020 / 0.0020 | green | 1 |" in text
    assert "| conv 3x3 | 128@512x512 | nhwc | own-32 | 0.1000 | 0.0200 / 0.0020 | **red** | 1 |" in text
    assert "| out of memory |" in line(text, "128@256x256")
    assert "python -m benchmarks layouts --json FILE" in text


def test_a_red_op_has_no_ratio() -> None:
    ops = [
        Row("ops", "swiglu", "z-image", 1, plan, ms=ms, correct=correct, more={"tb_s": 3.5, "percent_of_ceiling": 84.0})
        for plan, ms, correct in (("plain", 0.3, True), ("fused", 0.1, False))
    ]
    found = line(pages([run("a.json", *ops)])["performance.md"], "swiglu")
    assert "**red**" in found
    assert "x |" not in found
    assert "%" not in found


def test_failures_of_every_benchmark_are_shown() -> None:
    plans = {"ops": "fused", "convolutions": "own"}
    found = [
        Row(benchmark, "flux.1-dev", f"{place}x{place}", 1, plans.get(benchmark, "exact"), error="no luck")
        for place, benchmark in enumerate(BENCHMARKS)
    ]
    text = pages([run("a.json", *found)])["performance.md"]
    assert text.count("| no luck |") == len(found)
    heads = [row for row in text.splitlines() if row.startswith("|")]
    for above, below in itertools.pairwise(heads):
        if "---" in above or "no luck" in below:
            assert above.count("|") == below.count("|")


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Results(tmp_path / "a.json")
    kept.add(rows())
    out = tmp_path / "docs"
    result = CliRunner().invoke(app, ["page", str(tmp_path / "a.json"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in out.iterdir()) == ["performance.md", "performance.svg"]
    monkeypatch.setattr(page, "RESULTS", tmp_path / "none")
    result = CliRunner().invoke(app, ["page", "--out", str(out)])
    assert result.exit_code == 2
    assert "there is no results file" in result.stderr


def whole(**changes: Any) -> dict[str, Any]:
    row = {"benchmark": "step", "model": "m", "size": "16x16", "batch": 1, "plan": "exact", "ms": 1.0}
    return {"device": "GPU", "date": "2026-01-02", "rows": [{**row, **changes}]}


PICTURES: dict[str, Any] = {
    **{"psnr_db": 46.5, "psnr_lowest_db": 21.0, "ssim": 0.97, "ssim_lowest": 0.94},
    **{"keep_the_rule": 31, "pairs": 50},
}
FOREIGN: list[tuple[Any, str]] = [
    ("", "it is empty (line 1, column 1)"),
    ('{"device": "GPU", "rows": [', "it ends too early (line 1, column 28)"),
    ("root:x:0:0", "it is not JSON (line 1, column 1)"),
    ("[" * 100_000, "it is nested too deep"),
    (b"\xff\xfe", "it is not UTF-8 text"),
    ("1" * 5000, "it holds a number that is too long"),
    ('{"ms": NaN}', "it holds NaN, which is no JSON"),
    ([1], "the file is a list, not an object"),
    ({}, "the file has no 'device'"),
    ({"device": "GPU", "date": 3, "rows": []}, "'date' of the file must be text, not 3"),
    ({"device": "GPU", "date": "2026-01-02"}, "it has no rows"),
    ({"device": "GPU", "date": "2026-01-02", "rows": {}}, "it has no rows"),
    ({"device": "GPU", "date": "2026-01-02", "rows": [1]}, "row 1 is 1, not an object"),
    ({"device": "GPU", "date": "2026-01-02", "rows": [{}]}, "row 1 has no 'benchmark'"),
    ({**whole(), "versions": []}, "'versions' of the file must be an object of texts, not a list"),
    ({**whole(), "power_limit_w": "much"}, "'power_limit_w' of the file must be a number, 0 or more, not \"much\""),
    (whole(ms="fast"), "'ms' of row 1 must be a number above 0, not \"fast\""),
    (whole(ms=0), "'ms' of row 1 must be a number above 0, not 0"),
    (whole(batch=True), "'batch' of row 1 must be a whole number above 0, not true"),
    (whole(spread=[1]), "'spread' of row 1 must be two numbers, 0 or more, not a list"),
    (whole(rel_error={}), "'rel_error' of row 1 must be a number, 0 or more, not an object"),
    (whole(correct="yes"), "'correct' of row 1 must be true or false, not \"yes\""),
    (whole(benchmark="ops", tb_s="x"), "'tb_s' of row 1 must be a number, 0 or more, not \"x\""),
    (whole(benchmark="ceiling"), "row 1 has no 'tb_s'"),
    (whole(benchmark="ceiling", tb_s=None), "'tb_s' of row 1 must be a number, 0 or more, not null"),
    (whole(benchmark="ops", tb_s=None), "'tb_s' of row 1 must be a number, 0 or more, not null"),
    ({**whole(), "versions": None}, "'versions' of the file must be an object of texts, not null"),
    *(
        (whole(benchmark=benchmark, variant=None), "'variant' of row 1 must be text, not null")
        for benchmark in ("cold-start", "new-size", "launches")
    ),
    *(
        (whole(benchmark=benchmark, **{key: -1}), f"'{key}' of row 1 must be a number, 0 or more, not -1")
        for benchmark, keys in {
            "step": (
                *("launches", "joules", "peak_bytes", "rel_error", "stock_rel_error", "peer_rel_error", "cold_s"),
                *("first_step_s", "weights_bytes", "transformer_peak_bytes", "lay_s"),
            ),
            "image": ("text_s", "denoise_s", "vae_s"),
            "cold-start": ("import_s", "load_s", "ready_s", "kernels_compiled", "kernels_loaded"),
            "new-size": ("first_step_ms", "new_variants"),
            "ops": ("tb_s", "tflop_s", "percent_of_ceiling"),
        }.items()
        for key in keys
    ),
    (whole(benchmark="cold-start", load_s="4"), "'load_s' of row 1 must be a number, 0 or more, not \"4\""),
    (whole(benchmark="new-size", plan_ms="4"), "'plan_ms' of row 1 must be a number, not \"4\""),
    (whole(benchmark="image", steps="28 | x"), "'steps' of row 1 must be a whole number above 0, not \"28 | x\""),
    (
        whole(rel_error=10.0, stock_rel_error=0.078, correct=True),
        "'correct' of row 1 is true, which rel_error 10.0 and stock_rel_error 0.078 beside it contradict",
    ),
    (
        whole(rel_error="nan", stock_rel_error=0.078, correct=True),
        "'correct' of row 1 is true, which rel_error \"nan\" and stock_rel_error 0.078 beside it contradict",
    ),
    (
        whole(rel_error=0.078, stock_rel_error=0.078, correct=False),
        "'correct' of row 1 is false, which rel_error 0.078 and stock_rel_error 0.078 beside it contradict",
    ),
    (
        whole(correct=True),
        "'correct' of row 1 is true, which rel_error null and stock_rel_error null beside it contradict",
    ),
    (
        whole(benchmark="ops", rel_error=0.0021, stock_rel_error=0.001, correct=True),
        "'correct' of row 1 is true, which rel_error 0.0021 and stock_rel_error 0.001 beside it contradict",
    ),
    (
        whole(plan="fp8", rel_error=0.05, stock_rel_error=0.05, peer_rel_error=0.04, correct=True),
        "'correct' of row 1 is true, which rel_error 0.05 and peer_rel_error 0.04 beside it contradict",
    ),
    (
        whole(plan="fp8", rel_error=0.05, stock_rel_error=0.05, correct=True),
        "'correct' of row 1 is true, which rel_error 0.05 and peer_rel_error null beside it contradict",
    ),
    (
        whole(plan="exact", rel_error=0.05, stock_rel_error=0.01, peer_rel_error=0.06, correct=True),
        "'correct' of row 1 is true, which rel_error 0.05 and stock_rel_error 0.01 beside it contradict",
    ),
    (
        whole(benchmark="pictures", plan="fp8", variant="bf16", correct=True, **{**PICTURES, "psnr_db": 29.9}),
        "'correct' of row 1 is true, which psnr_db 29.9 and ssim 0.97 beside it contradict",
    ),
    (
        whole(benchmark="pictures", plan="exact", variant="bf16", correct=False, **{**PICTURES, "ssim": 0.99}),
        "'correct' of row 1 is false, which psnr_db 46.5 and ssim 0.99 beside it contradict",
    ),
    *(
        (
            whole(benchmark="pictures", plan="fp8", variant="bf16", correct=True, **{**PICTURES, key: "x"}),
            f"'{key}' of row 1 must be {what}, not \"x\"",
        )
        for key, what in {
            **dict.fromkeys(("psnr_db", "psnr_lowest_db"), "decibels, or inf"),
            **dict.fromkeys(("ssim", "ssim_lowest"), "a number"),
            "keep_the_rule": "a number, 0 or more",
            "pairs": "a whole number above 0",
        }.items()
    ),
    (
        whole(benchmark="convolutions", rel_error=0.001, stock_rel_error=0.001, correct=False),
        "'correct' of row 1 is false, which rel_error 0.001 and stock_rel_error 0.001 beside it contradict",
    ),
    (
        whole(benchmark="convolutions", rel_error="nan", stock_rel_error=0.001, correct=True),
        "'correct' of row 1 is true, which rel_error \"nan\" and stock_rel_error 0.001 beside it contradict",
    ),
]


@pytest.mark.parametrize(("content", "what"), FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_no_results_file_leaves_the_pages_alone(tmp_path: Path, content: Any, what: str) -> None:
    Results(tmp_path / "a.json").add(rows())
    (tmp_path / "performance.md").write_text("as it was")
    path = tmp_path / "b.json"
    path.write_bytes(content if isinstance(content, bytes) else _text(content).encode())
    result = CliRunner().invoke(app, ["page", str(tmp_path / "a.json"), str(path), "--out", str(tmp_path)])
    assert result.exit_code == 2, result.output
    said = f"benchmarks: {str(path)!r} is no results file of these benchmarks: {what}; name one that --json has written"
    assert result.stderr == f"{said}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "performance.md"]
    assert (tmp_path / "performance.md").read_text() == "as it was"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def test_a_folder_or_nothing_is_no_results_file(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none.json", "no such file or directory")):
        result = CliRunner().invoke(app, ["page", str(path), "--out", str(tmp_path / "docs")])
        assert (result.exit_code, f"it cannot be read ({why})" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_files_without_a_measurement_leave_the_pages_alone(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({**whole(), "rows": []}))
    result = CliRunner().invoke(app, ["page", str(path), "--out", str(tmp_path / "docs")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "no measurement in it" in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_verdict_that_its_errors_bear_out_is_read(tmp_path: Path) -> None:
    for place, changes in enumerate(
        (
            {"rel_error": 0.0525, "stock_rel_error": 0.05, "correct": True},
            {"rel_error": "inf", "stock_rel_error": 0.05, "correct": False},
            {"benchmark": "ops", "rel_error": 0.002, "stock_rel_error": 0.001, "correct": True},
            {"benchmark": "ops", "rel_error": 0.001, "stock_rel_error": 0.001, "correct": False},  # for the largest
            {"benchmark": "ops", "correct": True},
            {"benchmark": "convolutions", "rel_error": 0.002, "stock_rel_error": 0.001, "correct": True},
            {"benchmark": "convolutions", "rel_error": 0.003, "stock_rel_error": 0.001, "correct": False},
            {"plan": "fp8", "rel_error": 0.06, "stock_rel_error": 0.01, "peer_rel_error": 0.06, "correct": True},
            {"plan": "fp8", "rel_error": 0.01, "stock_rel_error": 0.01, "correct": None},
            {"benchmark": "vae-decode", "rel_error": 0.0525, "stock_rel_error": 0.05, "correct": True},
            {"benchmark": "new-size", "plan_ms": -0.3},
        )
    ):
        path = tmp_path / f"{place}.json"
        path.write_text(json.dumps(whole(**changes)))
        assert read([path])[0].rows[0].correct is changes.get("correct")


def test_the_least_that_a_results_file_holds_gives_a_page(tmp_path: Path) -> None:
    for benchmark in BENCHMARKS:
        path = tmp_path / f"{benchmark}.json"
        path.write_text(json.dumps(whole(benchmark=benchmark, plan="fused", rel_error="nan", stock_rel_error=0.1)))
        assert "performance.md" in pages(read([path]))
