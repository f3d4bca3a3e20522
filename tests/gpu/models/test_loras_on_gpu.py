"""LoRAs at the real width on a GPU: nothing compiles, memory comes back, graphs follow, fusing leaves no bit behind."""

from __future__ import annotations

import pytest
import torch
from support.gpu import freed
from support.gpu_runs import GpuKind, graphs_of, picture
from support.pipes import lora_state, relative

import fusedit
from benchmarks.compilations import variants
from benchmarks.workloads import Workload
from fusedit.lora.adapters import tuner_layers


def close(workload: Workload, handle: fusedit.Handle) -> None:
    """The picture is stock's of this moment, but for rounding."""
    fused = picture(workload)
    with handle.paused():
        stock = picture(workload)
    assert relative(fused, stock) < 0.03


@pytest.mark.parametrize("plan", ["exact", "fp8"])
def test_swaps_compile_nothing_and_graphs_follow(kind: GpuKind, shallow: Workload, plan: str) -> None:  # noqa: ARG001
    pipe = shallow.pipe
    handle = fusedit.accelerate(pipe, plan)
    states = [lora_state(pipe, rank=rank, scale=0.02, seed=rank) for rank in (16, 32)]
    for _ in range(4):
        plain = picture(shallow)
    fusedit.load_lora(pipe, states[0], "a")
    for _ in range(4):  # the last from a graph, where there is one
        first = picture(shallow)
    before = variants()
    for state in (states[1], states[0]):
        fusedit.unload_lora(pipe, "a")
        assert relative(picture(shallow), plain) < 1e-3
        fusedit.load_lora(pipe, state, "a")
        for _ in range(4):
            again = picture(shallow)
        if plan == "exact":
            close(shallow, handle)
    assert variants() == before
    assert relative(again, first) < 1e-3
    assert relative(first, plain) > 1e-2
    fusedit.set_loras(pipe, {"a": 0.0})
    assert relative(picture(shallow), first) > 1e-2
    fusedit.unload_lora(pipe, "a")
    assert graphs_of(handle).hits > 0
    handle.restore()


def test_a_hundred_swaps_leave_the_gpus_memory_where_it_was(shallow: Workload) -> None:
    pipe = shallow.pipe
    handle = fusedit.accelerate(pipe)
    states = [lora_state(pipe, rank=rank, scale=0.02) for rank in (8, 32)]
    picture(shallow)
    for i in range(2):
        fusedit.load_lora(pipe, states[i], "a")
        picture(shallow)
        fusedit.unload_lora(pipe, "a")
    picture(shallow)
    before = freed()
    for i in range(100):
        fusedit.load_lora(pipe, states[i % 2], "a")
        if i % 25 == 0:
            picture(shallow)
        fusedit.unload_lora(pipe, "a")
    picture(shallow)
    assert freed() <= before
    handle.restore()


def test_fused_and_unfused_on_the_gpu_bit_for_bit(shallow: Workload) -> None:
    pipe = shallow.pipe
    weights = {name: p.detach().clone() for name, p in pipe.transformer.named_parameters()}
    handle = fusedit.accelerate(pipe)
    plain = picture(shallow)
    fusedit.load_lora(pipe, lora_state(pipe, rank=32, scale=0.02), "a", 0.7)
    unfused = picture(shallow)
    pipe.fuse_lora()
    assert relative(picture(shallow), unfused) < 0.03
    close(shallow, handle)
    pipe.unfuse_lora()
    fusedit.unload_lora(pipe, "a")
    assert [name for name, p in pipe.transformer.named_parameters() if not torch.equal(p, weights[name])] == []
    assert torch.equal(picture(shallow), plain)
    handle.restore()


def test_on_fp8_a_fused_one_stays_as_a_side_branch_under_graphs(shallow: Workload) -> None:
    pipe = shallow.pipe
    handle = fusedit.accelerate(pipe, "fp8")
    for _ in range(4):
        plain = picture(shallow)
    fusedit.load_lora(pipe, lora_state(pipe, rank=16, scale=0.02), "a")
    unfused = picture(shallow)
    pipe.fuse_lora()
    for _ in range(4):
        assert relative(picture(shallow), unfused) < relative(plain, unfused) / 4
    pipe.unload_lora_weights()
    assert tuner_layers(pipe.transformer) == []
    for _ in range(4):
        assert relative(picture(shallow), unfused) < relative(plain, unfused) / 4
    handle.restore()
