"""The benchmarks on a CPU: tiny models, and stand-ins for what only a GPU has."""

from __future__ import annotations

import itertools
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from support.pipes import tiny_vae
from tiny_workloads import ENVIRONMENT, TINY

from benchmarks import gpu, kernels, peer, results, step, sustained, workloads
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


class FakeTorchao(ModuleType):
    """torchao.quantization as far as the peer needs it: rounds weights to e4m3, and sets switches as torchao does."""

    def __init__(self) -> None:
        super().__init__("torchao.quantization")
        self.taken: list[str] = []

    @staticmethod
    def PerRow() -> str:
        return "a row"

    @staticmethod
    def Float8DynamicActivationFloat8WeightConfig(granularity: Any) -> dict[str, Any]:
        return {"granularity": granularity}

    def quantize_(self, model: torch.nn.Module, config: dict[str, Any], filter_fn: Any) -> None:
        from torch._inductor import config as inductor

        assert config == {"granularity": "a row"}
        torch.set_float32_matmul_precision("high")
        inductor.coordinate_descent_tuning = True
        for name, module in model.named_modules():
            if filter_fn(module, name):
                self.taken.append(name)
                weight: Any = module.weight
                scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> FakeTorchao:
    """Stands in for torchao, and lets the peer take the narrow layers of tiny models."""
    fake = FakeTorchao()
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    monkeypatch.setattr(peer, "LARGE", 16)
    return fake


@pytest.fixture(params=list(TINY))
def workload(request: pytest.FixtureRequest) -> Workload:
    return TINY[request.param]()
