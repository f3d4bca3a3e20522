"""The benchmarks on a CPU: tiny models, and stand-ins for what only a GPU has."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from support.pipes import tiny_vae
from tiny_workloads import ENVIRONMENT, TINY

from benchmarks import gpu, kernels, results, step, sustained, workloads
from benchmarks.workloads import Workload


class WallMarks:
    """As gpu.Marks, on the wall clock."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self) -> None:
        self.times.append(time.perf_counter())

    def gaps(self) -> list[float]:
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.times)]


class StepCount:
    """As kernels.KernelCount: 84 kernels, whatever runs."""

    def start(self) -> None: ...

    def stop(self) -> int:
        return 84


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "present", lambda: True)
    monkeypatch.setattr(gpu, "Marks", WallMarks)
    monkeypatch.setattr(gpu, "capture", lambda run: run)
    monkeypatch.setattr(gpu, "waits", lambda _run: False)
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 4096)
    monkeypatch.setattr(gpu, "allocated", lambda: 1_000_000)
    monkeypatch.setattr(gpu, "peaks", lambda: (3_000_000, 4_000_000))
    monkeypatch.setattr(gpu, "idle_in_graphs", lambda: 0)
    for name in ("synchronize", "free", "reset_peaks"):
        monkeypatch.setattr(gpu, name, lambda: None)
    monkeypatch.setattr(kernels, "KernelCount", StepCount)
    monkeypatch.setattr(results, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(sustained, "BURST_S", 0.0)
    monkeypatch.setattr(workloads, "_vae", lambda: tiny_vae().to(torch.bfloat16).requires_grad_(False))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's models are tiny, prompts and calls short."""
    for name, make in TINY.items():
        monkeypatch.setitem(workloads.WORKLOADS, name, make)
        monkeypatch.setitem(workloads.TOKENS, name, 24)
    monkeypatch.setattr(step, "STEPS", 4)
    monkeypatch.setattr(kernels, "STEPS", 4)


@pytest.fixture(params=list(TINY))
def workload(request: pytest.FixtureRequest) -> Workload:
    return TINY[request.param]()
