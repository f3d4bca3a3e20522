"""What becomes of the original weights: restore() bit for bit, or refused before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8 import bits, converted, each_originals, from_folder
from support.loras import mixed_state
from support.pipes import lora_state, relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, fused

import fusedit
from fusedit.errors import ArgumentError, RestoreError
from fusedit.plan import Plan

WEIGHTS = "diffusion_pytorch_model.safetensors"


@each_kind
@pytest.mark.parametrize("originals", ["cpu", "reload"])
def test_restore_gives_back_every_bit(kind: Kind, originals: str, tmp_path: Path) -> None:
    pipe = from_folder(kind, tmp_path)
    before, stock = bits(pipe), kind.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    lossy = kind.call(pipe)
    assert not torch.equal(lossy, stock)
    assert before.differing(bits(pipe)) != []
    assert all(layer.weight.dtype is torch.float8_e4m3fn for layer in converted(pipe).values())
    handle.restore()
    handle.restore()
    assert before.differing(bits(pipe)) == []
    assert torch.equal(kind.call(pipe), stock)
    assert not handle.report().active


def test_on_a_cpu_the_very_storages_come_back() -> None:
    pipe = FLUX.pipe()
    places = {name: (p.data_ptr(), p.untyped_storage().nbytes()) for name, p in pipe.transformer.named_parameters()}
    handle = fusedit.accelerate(pipe, "fp8")
    FLUX.call(pipe)
    handle.restore()
    now = {name: (p.data_ptr(), p.untyped_storage().nbytes()) for name, p in pipe.transformer.named_parameters()}
    moved = {name.rpartition(".")[2] for name in now if now[name] != places[name]}
    assert moved <= {"bias"}, "biases were packed in e4m3's groups and got storages of their own; weights never moved"


MOVES: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "to_bf16": (torch.bfloat16, lambda pipe: pipe.to(torch.bfloat16)),
    "half": (torch.float16, lambda pipe: pipe.transformer.half()),
    "to_bf16_and_back": (torch.float32, lambda pipe: pipe.to(torch.bfloat16).to(torch.float32)),
}


@pytest.mark.parametrize("originals", ["cpu", "reload"])
@pytest.mark.parametrize("move", MOVES)
def test_restore_after_a_change_of_dtype_gives_what_stock_would_have(move: str, originals: str, tmp_path: Path) -> None:
    pipe = from_folder(Z_IMAGE, tmp_path)
    weights = {name: p.detach().clone() for name, p in pipe.transformer.named_parameters()}
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    dtype, change = MOVES[move]
    paths = list(converted(pipe))
    change(pipe)
    assert pipe.transformer.dtype is dtype
    assert {layer.compute_dtype for layer in converted(pipe).values()} == {dtype}
    handle.restore()
    assert {p.dtype for p in pipe.transformer.parameters()} == {dtype}, "stock cannot compute in a mixture"
    for path in paths:
        assert torch.equal(pipe.transformer.get_submodule(path).weight, weights[f"{path}.weight"].to(dtype))


@pytest.mark.parametrize("originals", ["cpu", "reload"])
@pytest.mark.parametrize("assign", [False, True])
def test_stock_weights_that_were_loaded_are_the_originals_from_then_on(
    assign: bool, originals: str, tmp_path: Path
) -> None:
    pipe, other = from_folder(FLUX, tmp_path), FLUX.pipe(seed=9)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    former = FLUX.call(pipe)
    pipe.transformer.load_state_dict(other.transformer.state_dict(), assign=assign)
    lossy = FLUX.call(pipe)
    fusedit.accelerate(other, "fp8")
    assert relative(lossy, FLUX.call(other)) < 0.01 < relative(former, lossy), "stale codes or bounds"
    handle.restore()
    fresh = FLUX.pipe(seed=9)
    for name, p in pipe.transformer.named_parameters():
        assert torch.equal(p, fresh.transformer.get_parameter(name)), name


@each_kind
def test_restore_after_loras_came_and_went(kind: Kind) -> None:
    pipe = kind.pipe()
    before = bits(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    for how in ("load_lora", "load_lora_weights"):
        state = lora_state(pipe, names=("to_q", "to_out", "net.2", "w1", "norm"))
        if how == "load_lora":
            fusedit.load_lora(pipe, state, "a")
        else:
            pipe.load_lora_weights(state, adapter_name="a")
        kind.call(pipe)
        pipe.unload_lora_weights()
    handle.restore()
    assert before.differing(bits(pipe)) == []


def test_restore_under_a_lora_leaves_the_lora_to_stock() -> None:
    pipe, other = FLUX.pipe(), FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    for each in (pipe, other):
        fusedit.load_lora(each, mixed_state(other).tensors, "a")
    handle.restore()
    assert torch.equal(FLUX.call(pipe), FLUX.call(other))


@each_kind
def test_dropped_originals_are_said_from_the_start_and_refused_before_anything_is_touched(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8", originals="drop")
    assert any("restore() will raise: its originals were dropped" in note for note in handle.report().notes)
    drawn, before = kind.call(pipe), bits(pipe)
    with pytest.raises(RestoreError, match=r"dropped \(originals='drop'\); load the model again"):
        handle.restore()
    with pytest.raises(RestoreError, match="dropped"), handle.paused():
        pytest.fail("paused() ran without stock's weights")
    for plan in ("exact", Plan(base="fp8", precision={"sites": {"*": "model"}})):
        with pytest.raises(RestoreError, match=r"^this plan needs the original weights of transformer, and its orig"):
            fusedit.accelerate(pipe, plan, originals="drop")
    with pytest.raises(RestoreError, match="or give originals='drop' again"):
        fusedit.accelerate(pipe, Plan(base="fp8", cache={"graphs": False}))
    assert before.differing(bits(pipe)) == []
    assert handle.report().active
    count = fused(handle)
    assert torch.equal(kind.call(pipe), drawn)
    assert fused(handle) > count


def test_other_cache_settings_need_no_originals() -> None:
    pipe = FLUX.pipe()
    first = fusedit.accelerate(pipe, "fp8", originals="drop")
    drawn, before = FLUX.call(pipe), {path: layer.weight.data_ptr() for path, layer in converted(pipe).items()}
    second = fusedit.accelerate(pipe, Plan(base="fp8", cache={"graphs": False}), originals="drop")
    assert second is not first
    assert not first.report().active
    assert before.keys() == converted(pipe).keys()
    assert torch.equal(FLUX.call(pipe), drawn)
    assert fused(second) > 0


@each_originals
def test_reload_needs_files_and_says_so_before_anything_is_touched(originals: str) -> None:
    pipe = FLUX.pipe()
    before = bits(pipe)
    if originals == "reload":
        with pytest.raises(ArgumentError, match=r"needs the files that FluxTransformer2DModel was loaded from, and ''"):
            fusedit.accelerate(pipe, "fp8", originals=originals)
        assert before.differing(bits(pipe)) == []
        assert "forward" not in pipe.transformer.__dict__
    else:
        assert fusedit.accelerate(pipe, "fp8", originals=originals).report().active
    with pytest.raises(ArgumentError, match="originals is 'disk'; give one of cpu, reload, drop"):
        fusedit.accelerate(pipe, "fp8", originals="disk")


@pytest.mark.parametrize("fault", ["changed", "gone", "damaged", "without"])
def test_files_that_have_changed_are_noticed_before_anything_is_touched(fault: str, tmp_path: Path) -> None:
    pipe = from_folder(FLUX, tmp_path)
    handle = fusedit.accelerate(pipe, "fp8", originals="reload")
    drawn, before, file = FLUX.call(pipe), bits(pipe), tmp_path / "transformer" / WEIGHTS
    state, kept = load_file(file), file.read_bytes()
    key = f"{list(converted(pipe))[-1]}.weight"
    if fault == "changed":
        state[key][0, 0] += 1
    elif fault == "without":
        del state[key]
    file.unlink()  # another file in its place: tensors that are mapped from the old one keep theirs
    if fault == "damaged":
        file.write_bytes(kept[: len(kept) // 2])
    elif fault != "gone":
        save_file(state, file)
    for attempt in (handle.restore, lambda: fusedit.accelerate(pipe, "exact"), lambda: handle.paused().__enter__()):
        with pytest.raises(RestoreError, match=r"weight of '.*' is not what was converted; put the former files there"):
            attempt()
    assert before.differing(bits(pipe)) == []
    assert torch.equal(FLUX.call(pipe), drawn)
    file.unlink(missing_ok=True)
    file.write_bytes(kept)
    handle.restore()
    assert torch.equal(pipe.transformer.get_parameter(key), load_file(file)[key])


def test_where_originals_lie_can_be_changed_while_they_are_there(tmp_path: Path) -> None:
    pipe = from_folder(FLUX, tmp_path)
    before = bits(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    assert fusedit.accelerate(pipe, "fp8") is handle
    drawn = FLUX.call(pipe)
    other = fusedit.accelerate(pipe, "fp8", originals="reload")
    assert other is not handle
    assert all(layer.original is None for layer in converted(pipe).values())
    assert torch.equal(FLUX.call(pipe), drawn)
    again = fusedit.accelerate(pipe, "fp8", originals="cpu")
    assert all(layer.original is not None for layer in converted(pipe).values())
    again.restore()
    assert before.differing(bits(pipe)) == []
    assert fusedit.accelerate(pipe, "exact", originals="drop") is fusedit.accelerate(pipe, "exact")
