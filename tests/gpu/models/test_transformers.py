"""The fused transformers on a GPU, at the real width: error, batches, memory, compilation, offload, restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu import draw, errors, freed, peak_bytes
from support.gpu_runs import GpuKind
from support.pipes import parameters_of, relative

import fusedit
from benchmarks.compilations import variants
from benchmarks.workloads import Workload


def sites(handle: fusedit.Handle, kind: GpuKind) -> dict[str, Any]:
    return {site.site: site for site in handle.report().rewritten if site.site.startswith(kind.name + ".")}


@pytest.mark.parametrize(("width", "height", "batch"), [(512, 512, 1), (1024, 1024, 1), (272, 528, 3)])
def test_error_is_not_above_stock(kind: GpuKind, shallow: Workload, width: int, height: int, batch: int) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    ours, stock = errors(shallow, handle, width, height, batch)
    assert ours <= 1.05 * stock
    found = sites(handle, kind)
    assert all(site.fused > 0 for site in found.values()), handle.report()
    hoist = found.pop(f"{kind.name}.hoist")  # the measured calls are direct ones, which hoist nothing and say so
    assert all("outside the pipeline" in reason for reason in hoist.reasons)
    assert all(site.stock == 0 for site in found.values()), handle.report()
    handle.restore()


def test_full_depth_error_is_not_above_stock(kind: GpuKind) -> None:
    workload = kind.make()
    handle = fusedit.accelerate(workload.pipe)
    ours, stock = errors(workload, handle, 1024, 1024, 1)
    del workload, handle
    freed()
    assert ours <= 1.05 * stock


def test_batch_item_equals_its_solo_run(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    embeds = {k: v for k, v in shallow.arguments(512, 512, 2).items() if k.endswith("embeds")}

    def run(rows: slice) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(i) for i in range(2)][rows]
        return draw(shallow, **{k: v[rows] for k, v in embeds.items()}, generator=generators)

    both = run(slice(0, 2))
    with handle.paused():
        noise = relative(both, run(slice(0, 2)))
    for i in range(2):
        difference = relative(run(slice(i, i + 1))[0], both[i])
        assert difference <= 2 * noise + 1e-3, "another batch size may choose other library kernels, nothing more"
    handle.restore()


def test_no_memory_above_stock_and_none_left_behind(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    draw(shallow, 1024, 1024)
    fused = peak_bytes(lambda: draw(shallow, 1024, 1024))
    with handle.paused():
        draw(shallow, 1024, 1024)
        stock = peak_bytes(lambda: draw(shallow, 1024, 1024))
    assert fused <= stock
    draw(shallow)
    before = freed()
    for _ in range(5):
        draw(shallow)
    assert freed() <= before
    handle.restore()


def test_new_sizes_batches_and_prompt_lengths_compile_nothing(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    draw(shallow, 512, 512)
    draw(shallow, 512, 512, batch=2)
    before = variants()
    assert before > 0
    for width, height, batch in [(256, 256, 1), (272, 528, 1), (1024, 768, 1), (640, 512, 3), (768, 768, 2)]:
        draw(shallow, width, height, batch)
        tokens = [37 + 7 * item for item in range(batch)]
        draw(shallow, **shallow.arguments(width, height, batch, tokens))
    assert variants() == before
    handle.restore()


def test_restore_after_gpu_runs_and_moves_is_bit_identical(shallow: Workload) -> None:
    before = parameters_of(shallow.pipe)
    stock = draw(shallow)
    handle = fusedit.accelerate(shallow.pipe)
    draw(shallow)
    shallow.pipe.transformer.to("cpu")
    shallow.pipe.transformer.to("cuda")
    draw(shallow)
    handle.restore()
    after = parameters_of(shallow.pipe)
    for name, (value, *layout) in before.items():
        assert torch.equal(after[name][0], value), name
        assert list(after[name][1:]) == layout, name
    assert torch.equal(draw(shallow), stock)


def test_model_offload_runs_fused_and_frees_the_gpu(kind: GpuKind) -> None:
    workload = kind.make(**kind.one)
    handle = fusedit.accelerate(workload.pipe)
    resident = draw(workload)
    workload.pipe.enable_model_cpu_offload()
    before = freed()
    offloaded = draw(workload)
    with handle.paused():
        stock = draw(workload)
    assert relative(offloaded, resident) <= 2 * relative(resident, stock) + 1e-3
    assert freed() <= before + 2**20
    found = sites(handle, kind)
    assert found[f"{kind.name}.attention"].fused > 0
    assert any("offload" in reason for reason in found[f"{kind.name}.packed_qkv"].reasons)
    workload.pipe.remove_all_hooks()
    handle.restore()
    assert "forward" not in workload.pipe.transformer.__dict__
