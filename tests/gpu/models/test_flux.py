"""The fused FLUX forward on a GPU, at the real width: error, memory, compilation, offload, restore."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu import compiled_kernels, errors, peak_bytes
from support.pipes import parameters_of

import fusedit
from benchmarks.workloads import Workload, flux_1_dev


@pytest.fixture(scope="module")
def shallow() -> Iterator[Workload]:
    """Real width, 2 double and 3 single blocks."""
    yield flux_1_dev(num_layers=2, num_single_layers=3)
    gc.collect()
    torch.cuda.empty_cache()


def draw(workload: Workload, width: int = 512, height: int = 512, batch: int = 1, **changes: Any) -> torch.Tensor:
    torch.manual_seed(0)
    arguments = workload.arguments(width, height, batch)
    arguments |= {"num_inference_steps": 3, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    workload.pipe.set_progress_bar_config(disable=True)
    images: torch.Tensor = workload.pipe(**{**arguments, **changes}).images
    return images


@pytest.mark.parametrize(("width", "height", "batch"), [(512, 512, 1), (1024, 1024, 1), (272, 528, 3)])
def test_error_is_not_above_stock(shallow: Workload, width: int, height: int, batch: int) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    ours, stock = errors(shallow, handle, width, height, batch)
    assert ours <= 1.05 * stock
    sites = [site for site in handle.report().rewritten if site.site.startswith("flux.")]
    assert all(site.fused > 0 for site in sites), handle.report()
    assert all(site.stock == 0 for site in sites if site.site != "flux.hoist"), (
        handle.report()
    )  # direct calls hoist nothing
    handle.restore()


def test_full_depth_error_is_not_above_stock() -> None:
    workload = flux_1_dev()
    handle = fusedit.accelerate(workload.pipe)
    ours, stock = errors(workload, handle, 1024, 1024, 1)
    del workload, handle
    gc.collect()
    torch.cuda.empty_cache()
    assert ours <= 1.05 * stock


def test_batch_item_equals_its_solo_run(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    arguments = shallow.arguments(512, 512, 2)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    common = {"num_inference_steps": 2, "output_type": "latent", "width": 512, "height": 512}
    embeds = {k: v for k, v in arguments.items() if k.endswith("embeds")}
    both = shallow.pipe(**common, **embeds, generator=generators).images
    with handle.paused():
        stock = shallow.pipe(**common, **embeds, generator=[torch.Generator().manual_seed(i) for i in range(2)]).images
    noise = float((both.float() - stock.float()).norm() / stock.float().norm())
    for i in range(2):
        solo = shallow.pipe(
            **common, **{k: v[i : i + 1] for k, v in embeds.items()}, generator=torch.Generator().manual_seed(i)
        ).images
        difference = float((solo[0].float() - both[i].float()).norm() / both[i].float().norm())
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
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        draw(shallow)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    handle.restore()


def test_new_sizes_compile_nothing(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    draw(shallow, 512, 512)
    draw(shallow, 512, 512, batch=2)
    before = compiled_kernels()
    for width, height, batch in [(256, 256, 1), (272, 528, 1), (1024, 768, 1), (640, 512, 3), (768, 768, 2)]:
        draw(shallow, width, height, batch)
        draw(shallow, width, height, batch, prompt_embeds=torch.randn(batch, 37, 4096, device="cuda").bfloat16())
    assert compiled_kernels() == before
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


def test_model_offload_runs_fused_and_frees_the_gpu() -> None:
    workload = flux_1_dev(num_layers=1, num_single_layers=1)
    handle = fusedit.accelerate(workload.pipe)
    resident = draw(workload)
    workload.pipe.enable_model_cpu_offload()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    offloaded = draw(workload)
    with handle.paused():
        stock = draw(workload)
    noise = float((resident.float() - stock.float()).norm() / stock.float().norm())
    assert float((offloaded.float() - resident.float()).norm() / resident.float().norm()) <= 2 * noise + 1e-3
    assert torch.cuda.memory_allocated() <= before + 2**20
    fused = {site.site: site for site in handle.report().rewritten}
    assert fused["flux.attention"].fused > 0
    assert any("offload" in reason for reason in fused["flux.packed_qkv"].reasons)
    workload.pipe.remove_all_hooks()
    handle.restore()
    assert "forward" not in workload.pipe.transformer.__dict__
