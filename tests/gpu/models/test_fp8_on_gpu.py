"""The fp8 tier on a GPU, at the real width: error, memory, kernels, graphs, moves, offload, LoRA, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu import draw, freed, peak_bytes
from support.gpu_runs import GpuKind, cached
from support.pipes import parameters_of, relative

import fusedit
from benchmarks.compilations import variants
from benchmarks.workloads import Workload
from fusedit import ops
from fusedit.float8.conversion import layers_of
from fusedit.models import registry
from fusedit.models._precision import chosen_precisions
from fusedit.plan import Plan

ATTENTION = {"flux": "flux.fp8_attention", "z_image": "z_image.fp8_attention"}
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="e4m3 needs 8.9"
)


def ran(handle: fusedit.Handle, name: str) -> int:
    return next(site.fused for site in handle.report().rewritten if site.site == name)


@pytest.mark.parametrize(("width", "height", "batch"), [(512, 512, 1), (1024, 1024, 1), (272, 528, 3)])
def test_latents_stay_near_stock_and_the_same_bits_come_again(
    kind: GpuKind, shallow: Workload, width: int, height: int, batch: int
) -> None:
    stock = draw(shallow, width, height, batch)
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    ours = draw(shallow, width, height, batch)
    assert 0 < relative(ours, stock) < 0.2
    assert torch.equal(draw(shallow, width, height, batch), ours)
    assert ran(handle, f"{kind.name}.fp8") > 0
    handle.restore()


def test_the_products_run_on_codes(kind: GpuKind, shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    before = {op.name: dict(op.ran) for op in (ops.scaled_linear, ops.scaled_linear_gelu, ops.scaled_linear_swiglu)}
    draw(shallow, 1024, 1024)
    end = ops.scaled_linear_gelu if kind.name == "flux" else ops.scaled_linear_swiglu
    if torch.cuda.get_device_capability() == (9, 0):
        assert end.ran["hopper"] > before[end.name].get("hopper", 0), "the kernel with the activation serves 1024x1024"
    assert ops.scaled_linear.ran["dequantised"] == before["scaled_linear"].get("dequantised", 0)
    handle.restore()


def test_fp8_attention_is_close_to_the_library_s(kind: GpuKind, shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    bf16 = draw(shallow, 1024, 1024)
    handle = fusedit.accelerate(shallow.pipe, Plan(base="fp8", rewrites={ATTENTION[kind.name]: True}))
    codes = draw(shallow, 1024, 1024)
    assert 0 < relative(codes, bf16) < 0.2
    assert ran(handle, ATTENTION[kind.name]) > 0
    handle.restore()


def test_weights_take_half_and_a_picture_less_than_stock(kind: GpuKind, shallow: Workload) -> None:
    """Every weight of the model's table takes a byte instead of two and four bytes a row, all else what it took."""
    model = shallow.pipe.transformer
    draw(shallow, 1024, 1024)
    stock = peak_bytes(lambda: draw(shallow, 1024, 1024))
    saved = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    names = {"fp8": f"{kind.name}.fp8", "weights": f"{kind.name}.fp8"}
    chosen = chosen_precisions(model, registry()[kind.name].precisions, Plan(base="fp8"), names)
    layers = [model.get_submodule(path) for path, found in chosen.items() if found.value != "model"]
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    saved -= sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert saved == sum(layer.weight.numel() - 4 * len(layer.weight) for layer in layers) > 0
    # The step is captured in the second draw, where its memory would count twice: while it is captured, and as the
    # graph's afterwards.
    for _ in range(2):
        draw(shallow, 1024, 1024)
    rows = room_for_rows(model, layers, 4096 + 512)
    assert peak_bytes(lambda: draw(shallow, 1024, 1024)) < stock - saved + rows
    handle.restore()
    freed()


def room_for_rows(model: Any, layers: list[Any], tokens: int) -> int:
    """Bytes that the tier takes and stock does not: codes of a feed-forward layer's activation and of two normed
    inputs; and two fp32 copies of 4096 rows of a weight, of which bounds are made."""
    width = model.inner_dim if hasattr(model, "inner_dim") else model.dim
    return tokens * (max(layer.in_features for layer in layers) + 2 * width) + 2 * 4 * 4096 * width


def test_new_sizes_and_a_lora_compile_nothing(kind: GpuKind, shallow: Workload) -> None:
    from peft import LoraConfig

    handle = fusedit.accelerate(shallow.pipe, "fp8")
    draw(shallow, 512, 512)
    draw(shallow, 1024, 1024)
    before = variants()
    for width, height, batch in [(256, 256, 1), (272, 528, 1), (1024, 768, 1), (640, 512, 3)]:
        draw(shallow, width, height, batch)
    assert variants() == before
    config = LoraConfig(r=16, target_modules=list(kind.lora[:2]), init_lora_weights=False)
    without = draw(shallow)
    shallow.pipe.transformer.add_adapter(config, "a")
    assert relative(draw(shallow), without) > 1e-3
    shallow.pipe.delete_adapters("a")
    assert torch.equal(draw(shallow), without)
    handle.restore()


def test_restore_is_bit_identical_after_moves(shallow: Workload) -> None:
    before = parameters_of(shallow.pipe)
    stock = draw(shallow)
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    ours = draw(shallow)
    shallow.pipe.transformer.to("cpu")
    shallow.pipe.transformer.to("cuda")
    assert torch.equal(draw(shallow), ours)
    assert all(layer.weight.dtype is torch.float8_e4m3fn for _, layer in layers_of(shallow.pipe.transformer))
    with handle.paused():
        assert torch.equal(draw(shallow), stock)
    assert torch.equal(draw(shallow), ours)
    handle.restore()
    after = parameters_of(shallow.pipe)
    for name, (value, *_) in before.items():
        assert torch.equal(after[name][0], value), name
    assert torch.equal(draw(shallow), stock)


def test_small_steps_are_captured_and_replayed(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe, "fp8")
    first = draw(shallow, 256, 256, num_inference_steps=6)
    again = draw(shallow, 256, 256, num_inference_steps=6)
    assert torch.equal(first, again)
    assert cached(handle.report(), "graphs").hits > 0
    handle.restore()


def test_offload_and_checkpoints(kind: GpuKind, tmp_path: Path) -> None:
    workload = kind.make(**kind.one)
    handle = fusedit.accelerate(workload.pipe, "fp8", originals="drop")
    resident = draw(workload)
    workload.pipe.transformer.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="fusedit"):
        type(workload.pipe.transformer).from_pretrained(tmp_path)
    workload.pipe.enable_model_cpu_offload()
    offloaded: Any = draw(workload)
    assert relative(offloaded, resident) < 0.05, "separate products may round otherwise, nothing more"
    workload.pipe.remove_all_hooks()
    with pytest.raises(fusedit.errors.RestoreError, match="dropped"):
        handle.restore()
    assert handle.report().active
    del workload, handle
    freed()
