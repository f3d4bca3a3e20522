"""Plans side by side on one workload: who runs what, what each owns, and everything as before afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipes import parameters_of, relative

from benchmarks import gpu, plans
from benchmarks.errors import watch
from benchmarks.plans import SideBySide, empty_caches, what_ran
from benchmarks.results import FP8
from benchmarks.workloads import Workload
from fusedit.errors import MissingExtraError


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilation without a compiler: notes which module was to be compiled how."""
    asked: list[str] = []

    def compile_in_place(_transformer: Any, plan: str) -> None:
        asked.append(plan)

    monkeypatch.setattr(plans, "compile_in_place", compile_in_place)
    return asked


@pytest.mark.usefixtures("torchao")
def test_each_plan_runs_what_it_is(workload: Workload, eager_backend: list[str]) -> None:
    arguments = workload.arguments(64, 48, 1)
    alone = watch(workload.pipe, arguments)
    with SideBySide(workload) as bench:
        laid = {plan: bench.lay(plan) for plan in plans.PLANS}
        assert eager_backend == ["compile", "compile-whole", "torchao-fp8"]
        assert bench.handles.keys() == {"fp8", "exact"}
        handle = bench.handles["exact"]
        assert handle is not None

        def fused() -> int:
            return sum(site.fused for site in handle.report().rewritten)

        for plan in ("stock", "compile", "compile-whole"):
            with laid[plan].context():
                seen = watch(laid[plan].pipe, arguments)
            assert torch.equal(seen.prediction, alone.prediction), plan
            assert fused() == 0
        with laid["exact"].context():
            seen = watch(laid["exact"].pipe, arguments)
        assert fused() > 0
        assert torch.allclose(seen.prediction, alone.prediction, rtol=0.1, atol=0.3)
        found = what_ran(handle)
        assert "fell_back" not in found, found
        for plan in FP8:
            with laid[plan].context():
                seen = watch(laid[plan].pipe, arguments, alone.latents)
            assert not torch.equal(seen.prediction, alone.prediction), plan
            assert relative(seen.prediction, alone.prediction) < 0.2, plan
        found = what_ran(bench.handles["fp8"])
        assert "fell_back" not in found, found
        assert fused() > 0
    assert not handle.report().active
    assert not bench.handles


def test_a_copy_shares_no_weight(workload: Workload, eager_backend: list[str]) -> None:
    with SideBySide(workload) as bench:
        bench.lay("exact")
        copied = bench.lay("compile").pipe
        assert eager_backend == ["compile"]
        assert copied is not workload.pipe
        assert copied.scheduler is workload.pipe.scheduler
        for name in ("transformer", "vae"):
            own = {p.untyped_storage().data_ptr() for p in getattr(copied, name).parameters()}
            assert own.isdisjoint(p.untyped_storage().data_ptr() for p in getattr(workload.pipe, name).parameters())


@pytest.mark.usefixtures("torchao")
def test_afterwards_the_workload_is_as_before(workload: Workload, eager_backend: list[str]) -> None:
    before = parameters_of(workload.pipe)
    with SideBySide(workload) as bench:
        for plan in plans.PLANS:
            laid = bench.lay(plan)
            with laid.context():
                watch(laid.pipe, workload.arguments(64, 48, 1))
    assert eager_backend
    for name, (value, *layout) in parameters_of(workload.pipe).items():
        assert torch.equal(before[name][0], value), name
        assert list(before[name][1:]) == layout, name


def test_what_a_plan_owns_counts_packed_weights_once(workload: Workload) -> None:
    arguments = workload.arguments(64, 48, 1)
    modules = [m for m in workload.pipe.components.values() if isinstance(m, torch.nn.Module)]
    weights = sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))
    embeds = [v for name, v in arguments.items() if name.endswith("embeds")]
    given = sum(t.nbytes for v in embeds for t in (v if isinstance(v, list) else [v]))
    with SideBySide(workload) as bench:
        laid = bench.lay("exact")
        watch(laid.pipe, arguments)
        assert laid.own_bytes(arguments) == weights + given


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("plan", FP8)
def test_what_a_converted_copy_owns_is_what_its_laying_took(
    workload: Workload, plan: str, eager_backend: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = workload.arguments(64, 48, 1)
    readings = [1000, 1700]
    monkeypatch.setattr(gpu, "allocated", lambda: readings.pop(0))
    with SideBySide(workload) as bench:
        laid = bench.lay(plan)
        assert readings == []
        assert laid.weights_bytes == 700
        assert laid.others_bytes == sum(t.nbytes for t in workload.pipe.vae.state_dict().values())
        embeds = [v for name, v in arguments.items() if name.endswith("embeds")]
        given = sum(t.nbytes for v in embeds for t in (v if isinstance(v, list) else [v]))
        readings.append(1900)
        assert laid.own_bytes(arguments) == 900 + laid.others_bytes + given
    assert eager_backend == (["torchao-fp8"] if plan == "torchao-fp8" else [])


def test_fp8_needs_less_than_the_weights_it_replaces(workload: Workload) -> None:
    """The bf16 originals of the copy are gone, not only replaced."""
    with SideBySide(workload) as bench:
        laid = bench.lay("fp8")
        assert laid.more["lay_s"] > 0
        now = laid.pipe.transformer.state_dict()
        codes = sum(t.nbytes for t in now.values() if t.dtype == torch.float8_e4m3fn)
        scales = sum(t.nbytes for name, t in now.items() if name.endswith("_scale"))
        stock = bench.lay("stock").weights_bytes
        assert codes > scales > 0
        assert sum(t.nbytes for t in now.values()) == stock - codes + scales


def test_a_peer_that_is_missing_leaves_no_copy(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torchao'")

    monkeypatch.setattr(plans.peer, "import_module", missing)
    monkeypatch.setattr(plans.copy, "deepcopy", pytest.fail)
    with SideBySide(workload) as bench, pytest.raises(MissingExtraError, match="the peer needs torchao"):
        bench.lay("torchao-fp8")


def test_compiling_asks_diffusers_for_its_blocks(workload: Workload) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    class Model:
        def compile_repeated_blocks(self, **options: Any) -> None:
            compiled.append(("blocks", options))

        def compile(self, **options: Any) -> None:
            compiled.append(("whole", options))

    plans.compile_in_place(Model(), "compile")
    plans.compile_in_place(Model(), "compile-whole")
    plans.compile_in_place(Model(), "torchao-fp8")
    assert compiled == [("blocks", {"fullgraph": True}), ("whole", {}), ("blocks", {"fullgraph": True})]
    assert hasattr(workload.pipe.transformer, "compile_repeated_blocks")


def test_caches_are_empty_and_go_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with empty_caches() as folder:
        inside = [Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
        assert all(path.parent == folder and not path.exists() for path in inside)
        inside[0].mkdir()
    assert not folder.exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
