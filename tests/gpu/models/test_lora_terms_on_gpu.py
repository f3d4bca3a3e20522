"""LoRAs inside the products at the real width: by the kernels that are meant to serve, and never stale in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu_runs import GpuKind, cached, graphs_of, picture
from support.pipes import lora_state, relative

import fusedit
from benchmarks.workloads import Workload
from fusedit import ops
from fusedit.lora.adapters import tuner_layers


@pytest.mark.parametrize("plan", ["exact", "fp8"])
def test_the_term_is_part_of_the_product(kind: GpuKind, shallow: Workload, plan: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel was written for compute capability 9.0")
    handle = fusedit.accelerate(shallow.pipe, plan)
    plain = picture(shallow, 1024, 1024)
    state = {key: t for key, t in lora_state(shallow.pipe, rank=32, scale=0.02).items() if "embedder" not in key}
    fusedit.load_lora(shallow.pipe, state, "a")
    gated = "linear_gelu" if kind.name == "flux" else "linear_swiglu"
    names = ("linear_low_rank", gated) if plan == "exact" else ("scaled_linear", f"scaled_{gated}")
    first = "low_rank" if plan == "exact" else "scaled_low_rank"
    for name in (*names, first):
        ops.registry()[name].ran.clear()
    made = picture(shallow, 1024, 1024)
    assert all(ops.registry()[name].ran["hopper"] for name in names), {n: ops.registry()[n].ran for n in names}
    assert set(ops.registry()[first].ran) == {"triton"}
    assert cached(handle.report(), "LoRA terms").reasons == {}
    with handle.paused():
        stock = picture(shallow, 1024, 1024)
    assert relative(made, stock) < (0.03 if plan == "exact" else 0.2)
    assert relative(made, plain) > 0.01
    fusedit.unload_lora(shallow.pipe, "a")
    assert torch.equal(picture(shallow, 1024, 1024), plain)
    assert cached(handle.report(), "LoRA terms").bytes == 0
    handle.restore()


@pytest.mark.parametrize("plan", ["exact", "fp8"])
def test_edits_in_place_are_read_by_graphs(kind: GpuKind, shallow: Workload, plan: str) -> None:  # noqa: ARG001
    """By version within a run, and through `.data` from one run to the next; each replay is what an eager run gives."""
    pipe = shallow.pipe
    state = lora_state(pipe, rank=16, scale=0.02)

    def edit(by: float, *, hidden: bool) -> None:
        for _, layer in tuner_layers(pipe.transformer):
            for half in (layer.lora_A, layer.lora_B):
                weight = half["a"].weight
                (weight.data if hidden else weight).mul_(by)

    def script() -> list[Any]:
        fusedit.load_lora(pipe, state, "a")
        drawn = [picture(shallow) for _ in range(4)]
        with torch.no_grad():
            for by, hidden in ((0.5, False), (1.5, True)):
                edit(by, hidden=hidden)
                drawn += [picture(shallow), picture(shallow)]
        fusedit.set_loras(pipe, {"a": 0.3})
        drawn += [picture(shallow) for _ in range(4)]
        fusedit.unload_lora(pipe, "a")
        return drawn

    handle = fusedit.accelerate(pipe, plan)
    with_graphs = script()
    assert graphs_of(handle).hits > 0
    handle.restore()
    handle = fusedit.accelerate(pipe, fusedit.Plan(base=plan, cache={"graphs": False}))
    eager = script()
    handle.restore()
    assert [torch.equal(a, b) for a, b in zip(with_graphs, eager, strict=True)] == [True] * len(eager)
    assert not torch.equal(eager[3], eager[4])
    assert not torch.equal(eager[5], eager[6])
