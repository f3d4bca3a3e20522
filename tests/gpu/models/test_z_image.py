"""The fused Z-Image forward on a GPU, at the real width: error, batches, memory, compilation, offload, restore."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu import compiled_kernels, errors, peak_bytes
from support.pipes import parameters_of, relative

import fusedit
from benchmarks.workloads import Workload, z_image_turbo


@pytest.fixture(scope="module")
def shallow() -> Iterator[Workload]:
    """Real width, 3 layers."""
    yield z_image_turbo(n_layers=3)
    gc.collect()
    torch.cuda.empty_cache()


def draw(workload: Workload, width: int = 512, height: int = 512, batch: int = 1, **changes: Any) -> torch.Tensor:
    torch.manual_seed(0)
    arguments = workload.arguments(width, height, batch)
    arguments |= {"num_inference_steps": 3, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    workload.pipe.set_progress_bar_config(disable=True)
    images: torch.Tensor = workload.pipe(**{**arguments, **changes}).images
    return images


def captions(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(n, 2560, device="cuda", generator=generator).bfloat16() for n in lengths]


@pytest.mark.parametrize(("width", "height", "batch"), [(512, 512, 1), (1024, 1024, 1), (272, 528, 3)])
def test_error_is_not_above_stock(shallow: Workload, width: int, height: int, batch: int) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    ours, stock = errors(shallow, handle, width, height, batch)
    assert ours <= 1.05 * stock
    sites = [site for site in handle.report().rewritten if site.site.startswith("z_image.")]
    assert all(site.stock == 0 for site in sites if site.site != "z_image.hoist"), handle.report()
    handle.restore()


def test_full_depth_error_is_not_above_stock() -> None:
    workload = z_image_turbo()
    handle = fusedit.accelerate(workload.pipe)
    ours, stock = errors(workload, handle, 1024, 1024, 1)
    del workload, handle
    gc.collect()
    torch.cuda.empty_cache()
    assert ours <= 1.05 * stock


@torch.no_grad()
def test_mixed_batch_matches_stock_and_its_solo_runs(shallow: Workload) -> None:
    """BAT-01 at the real width: sizes and caption lengths mixed, the error against fp32 no larger than stock's."""
    model = shallow.pipe.transformer
    images = [torch.randn(16, 1, h, w, device="cuda").bfloat16() for h, w in ((64, 64), (34, 66), (128, 40))]
    texts = captions(5, 200, 70)
    t = torch.tensor([0.3, 0.5, 0.8], device="cuda").bfloat16()
    stock = model(images, t, texts, return_dict=False)[0]
    handle = fusedit.accelerate(shallow.pipe)
    fused = model(images, t, texts, return_dict=False)[0]
    solo = [model(images[i : i + 1], t[i : i + 1], texts[i : i + 1], return_dict=False)[0][0] for i in range(3)]
    handle.restore()
    model.to(torch.float32)
    exact = model([i.float() for i in images], t.float(), [c.float() for c in texts], return_dict=False)[0]
    model.to(torch.bfloat16)
    assert sum(map(relative, fused, exact)) <= 1.05 * sum(map(relative, stock, exact))
    assert sum(map(relative, solo, exact)) <= 1.05 * sum(map(relative, stock, exact))


def test_guidance_and_several_images_a_prompt(shallow: Workload) -> None:
    arguments = {
        "prompt_embeds": captions(40, 200),
        "negative_prompt_embeds": captions(3, 3),
        "guidance_scale": 4.0,
        "num_images_per_prompt": 2,
    }
    stock = draw(shallow, **arguments)
    handle = fusedit.accelerate(shallow.pipe)
    fused = draw(shallow, **arguments)
    handle.restore()
    assert fused.shape[0] == 4
    assert torch.isfinite(fused).all()
    assert relative(fused, stock) < 0.05


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


def test_new_sizes_and_captions_compile_nothing(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    draw(shallow, 512, 512)
    draw(shallow, 512, 512, batch=2)
    before = compiled_kernels()
    for width, height in [(256, 256), (272, 528), (1024, 768), (640, 512)]:
        draw(shallow, width, height)
        draw(shallow, width, height, prompt_embeds=captions(37))
        draw(shallow, width, height, prompt_embeds=captions(5, 37, 90))
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
    workload = z_image_turbo(n_layers=1)
    handle = fusedit.accelerate(workload.pipe)
    resident = draw(workload)
    workload.pipe.enable_model_cpu_offload()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    offloaded = draw(workload)
    with handle.paused():
        stock = draw(workload)
    assert relative(offloaded, resident) <= 2 * relative(resident, stock) + 1e-3
    assert torch.cuda.memory_allocated() <= before + 2**20
    sites = {site.site: site for site in handle.report().rewritten}
    assert sites["z_image.attention"].fused > 0
    assert any("offload" in reason for reason in sites["z_image.packed_qkv"].reasons)
    workload.pipe.remove_all_hooks()
    handle.restore()
    assert "forward" not in workload.pipe.transformer.__dict__
