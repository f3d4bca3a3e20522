"""Cold starts: what the child process measures, and what the parent makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cold_child, cold_start, plans
from benchmarks.__main__ import app
from benchmarks.cold_child import NEW_SIZES, NewSize


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["flux.1-dev", "z-image-turbo"])
def test_the_child_measures_each_stage(name: str) -> None:
    made = cold_child.start(name, "exact", (64, 48), (NewSize(48, 64, (5,)), NewSize(32, 32, (1, 40, 9))))
    assert json.loads(json.dumps(made)) == {**made, "new_sizes": json.loads(json.dumps(made["new_sizes"]))}
    assert len(made["steps_s"]) == 4
    assert all(seconds > 0 for seconds in (*made["steps_s"], made["import_s"], made["load_s"], made["lay_s"]))
    assert made["kernels"] == {"compiled": 0, "loaded": 0}
    assert [found["size"]["tokens"] for found in made["new_sizes"]] == [(5,), (1, 40, 9)]
    for found in made["new_sizes"]:
        assert len(found["steps_s"]) == 4
        assert (found["kernels"], found["new_variants"]) == ({"compiled": 0, "loaded": 0}, 0)


@pytest.mark.usefixtures("tiny")
def test_the_child_compiles_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, plan: asked.append(plan))
    cold_child.start("flux.1-dev", "compile", (64, 48), ())
    cold_child.start("flux.1-dev", "stock", (64, 48), ())
    assert asked == ["compile"]


@pytest.mark.usefixtures("tiny")
def test_a_new_size_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = cold_child._steps

    def full(pipe: Any, arguments: dict[str, Any]) -> list[float]:
        if arguments["width"] == 2048:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps(pipe, arguments)

    monkeypatch.setattr(cold_child, "_steps", full)
    made = cold_child.start("flux.1-dev", "exact", (64, 48), (NewSize(2048, 2048, (5,)), NewSize(32, 32, (5,))))
    assert made["new_sizes"][0]["error"] == "out of memory"
    assert len(made["new_sizes"][1]["steps_s"]) == 4


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("plan", ["fp8", "torchao-fp8"])
def test_the_child_converts_before_the_first_step(plan: str, torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, plan: compiled.append(plan))
    precisions: list[str] = []
    steps = cold_child._steps

    def note(pipe: Any, arguments: dict[str, Any]) -> list[float]:
        precisions.append(torch.get_float32_matmul_precision())
        return steps(pipe, arguments)

    monkeypatch.setattr(cold_child, "_steps", note)
    made = cold_child.start("z-image-turbo", plan, (64, 48), (NewSize(48, 64, (5,)),))
    assert len(made["steps_s"]) == len(made["new_sizes"][0]["steps_s"]) == 4
    if plan == "fp8":
        assert (compiled, torchao.taken, precisions) == ([], [], ["highest"] * 2)
    else:
        assert (compiled, precisions) == (["torchao-fp8"], ["high"] * 2)
        assert torchao.taken
    assert torch.get_float32_matmul_precision() == "highest"


def test_new_sizes_are_as_many_and_as_varied_as_promised() -> None:
    assert len(NEW_SIZES) == len(set(NEW_SIZES)) == 10
    assert all(new.width % 16 == new.height % 16 == 0 for new in NEW_SIZES)
    areas = [new.width * new.height for new in NEW_SIZES]
    assert (min(areas), max(areas)) == (256**2, 2048**2)
    assert sum(new.width != new.height for new in NEW_SIZES) >= 4
    assert {len(new.tokens) for new in NEW_SIZES} == {1, 2, 3, 4}
    lengths = [length for new in NEW_SIZES for length in new.tokens]
    assert (min(lengths), max(lengths)) == (1, 512)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    new = [
        {
            "size": NewSize(512, 768, (37, 300))._asdict(),
            "steps_s": [0.5, 0.1, 0.1, 0.1],
            "kernels": {"compiled": 0, "loaded": 1},
            "new_variants": 1,
        },
        {"size": NewSize(2048, 2048, (512,))._asdict(), "error": "out of memory"},
    ]
    return {
        "import_s": 9.123,
        "load_s": 4.0,
        "lay_s": 0.25,
        "steps_s": [1.75, 0.1, 0.1, 0.1],
        "kernels": {"compiled": 11, "loaded": 2},
        "new_sizes": new if request["new_sizes"] else [],
    }


def test_rows_of_every_plan_and_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def child(request: dict[str, Any]) -> dict[str, Any] | str:
        requests.append(request)
        return "ValueError: no" if request["plan"] == "compile" else answer(request)

    monkeypatch.setattr(cold_start, "_child", child)
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["cold-start", "--model", "flux.1-dev", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    cold = [row for row in rows if row["benchmark"] == "cold-start"]
    assert [(row["plan"], row.get("variant", "")) for row in cold] == [
        ("stock", ""),
        ("compile", "empty cache"),
        ("compile", "filled cache"),
        ("exact", "empty cache"),
        ("exact", "filled cache"),
    ]
    assert cold[1]["error"] == "ValueError: no"
    assert (cold[3]["ms"], cold[3]["ready_s"], cold[3]["import_s"]) == (2000.0, 2.0, 9.12)
    assert (cold[3]["kernels_compiled"], cold[3]["kernels_loaded"]) == (11, 2)
    assert (cold[3]["lay_s"], cold[3]["first_step_s"]) == (0.25, 1.75)
    assert "kernels_compiled" not in cold[0]
    new = [row for row in rows if row["benchmark"] == "new-size"]
    assert [(row["size"], row["batch"], row["variant"]) for row in new] == [
        ("512x768", 2, "37+300 tokens"),
        ("2048x2048", 1, "512 tokens"),
    ]
    assert (new[0]["first_step_ms"], new[0]["ms"], new[0]["plan_ms"]) == (500.0, 100.0, 400.0)
    assert (new[0]["kernels_compiled"], new[0]["new_variants"]) == (0, 1)
    assert "NVRTC is not counted" in new[0]["note"]
    assert new[1]["error"] == "out of memory"
    assert [request["new_sizes"] for request in requests] == [False, False, False, False, True]


def test_fp8_meets_new_sizes_too_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def child(request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        return answer(request)

    monkeypatch.setattr(cold_start, "_child", child)
    path = tmp_path / "rows.json"
    line = ["cold-start", "--model", "flux.1-dev", "--plans", "fp8,torchao-fp8-eager", "--json", str(path)]
    assert CliRunner().invoke(app, line).exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    new = [row for row in rows if row["benchmark"] == "new-size"]
    assert [(row["plan"], row["size"]) for row in new] == [("fp8", "512x768"), ("fp8", "2048x2048")]
    cold = [(row["plan"], row.get("variant", "")) for row in rows if row["benchmark"] == "cold-start"]
    assert cold == [("fp8", "empty cache"), ("fp8", "filled cache"), ("torchao-fp8-eager", "")]
    assert "kernels_compiled" in rows[0]
    assert CliRunner().invoke(app, [*line, "--no-new-sizes"]).exit_code == 0
    assert [request["new_sizes"] for request in requests] == [False, True, False] + [False] * 3


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (1, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to\n", "out of memory"),
        (-9, "", "exit code -9"),
    ],
)
def test_a_child_that_fails_says_why(code: int, stderr: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, code, None, stderr))
    assert cold_start._child({}) == said


def test_the_child_is_a_process_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "benchmarks.cold_child"]
        assert (Path(options["cwd"]) / "benchmarks" / "cold_child.py").exists()
        Path(command[4]).write_text(command[3])
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert cold_start._child({"model": "flux.1-dev"}) == {"model": "flux.1-dev"}


def test_the_child_reads_its_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def start(*given: Any) -> dict[str, Any]:
        seen.append(given)
        return {"steps_s": []}

    monkeypatch.setattr(cold_child, "start", start)
    request = {"model": "flux.1-dev", "plan": "exact", "size": [1024, 1024], "new_sizes": True}
    monkeypatch.setattr(sys, "argv", ["x", json.dumps(request), str(tmp_path / "answer.json")])
    cold_child.main()
    assert seen == [("flux.1-dev", "exact", (1024, 1024), NEW_SIZES)]
    assert json.loads((tmp_path / "answer.json").read_text()) == {"steps_s": []}
