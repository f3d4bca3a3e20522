"""Launches: of a step, counted behind the warm steps; of a block, as a difference."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_workloads import TINY
from typer.testing import CliRunner

from benchmarks import kernels, launches, plans
from benchmarks.__main__ import app
from benchmarks.plans import Laid, SideBySide
from benchmarks.workloads import Workload

BLOCKS = {"double": "transformer_blocks", "single": "single_transformer_blocks", "layer": "layers"}


@pytest.mark.parametrize(
    ("kind", "name", "counts"),
    [
        ("CUDA", "void cutlass::Kernel<...>", True),
        ("CUDA", "_kernel", True),
        ("CUDA", "Memcpy DtoD (Device -> Device)", False),
        ("CUDA", "Memset (Device)", False),
        ("CUDA", "MemEfficientAttention", True),
        ("CPU", "cudaLaunchKernel", False),
    ],
)
def test_what_counts_as_a_kernel(kind: str, name: str, counts: bool) -> None:
    assert kernels._is_kernel(SimpleNamespace(device_type=SimpleNamespace(name=kind), name=name)) is counts


def test_the_last_steps_are_counted(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    workload.pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    spans: list[tuple[int, int]] = []

    class Count:
        def start(self) -> None:
            self.began = len(calls)

        def stop(self) -> int:
            spans.append((self.began, len(calls)))
            return 30

    monkeypatch.setattr(kernels, "KernelCount", Count)
    with SideBySide(workload) as bench:
        assert kernels.of_a_step(bench.lay("stock"), workload.arguments(64, 48, 1, (5,))) == 15.0
    assert spans == [(8, 10)]  # two calls of five steps
    assert kernels.of(lambda: None) == 30.0


def test_preparing_keeps_the_profiler_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "unset")
    kernels.prepare()
    assert (kernels.os.environ["DISABLE_CUPTI_LAZY_REINIT"], kernels.os.environ["TEARDOWN_CUPTI"]) == ("1", "0")


def test_a_block_is_what_one_more_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, depths in launches.DEPTHS.items():
        monkeypatch.setitem(launches.DEPTHS, name, depths._replace(make=TINY[name]))
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, _plan: None)

    def count(laid: Laid, _arguments: dict[str, Any]) -> float:
        if laid.plan == "compile":
            raise RuntimeError("no compiler")
        each = {"stock": 100, "exact": 10}[laid.plan]
        weight = {"double": 3, "single": 2, "layer": 1}
        blocks = {kind: getattr(laid.pipe.transformer, name, ()) for kind, name in BLOCKS.items()}
        return float(7 + sum(each * weight[kind] * len(found) for kind, found in blocks.items()))

    monkeypatch.setattr(kernels, "of_a_step", count)
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["launches", "--size", "64x48", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["model"], row["variant"], row["plan"], row["launches"]) for row in rows] == [
        ("flux.1-dev", "double", "stock", 300),
        ("flux.1-dev", "double", "compile", None),
        ("flux.1-dev", "double", "exact", 30),
        ("flux.1-dev", "single", "stock", 200),
        ("flux.1-dev", "single", "compile", None),
        ("flux.1-dev", "single", "exact", 20),
        ("z-image-turbo", "layer", "stock", 100),
        ("z-image-turbo", "layer", "compile", None),
        ("z-image-turbo", "layer", "exact", 10),
    ]
    assert all(row["error"] == "RuntimeError: no compiler" for row in rows if row["plan"] == "compile")
    assert "launches flux.1-dev 64x48 batch 1 exact double: 30" in result.stdout
