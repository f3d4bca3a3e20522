"""From one plan to another and back, pauses, and copies of what is accelerated."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import bits, converted, from_folder
from support.loras import mixed_state
from support.pipes import relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, fused

import fusedit
from fusedit.errors import LoraError, UnsupportedPipelineError
from fusedit.plan import Plan

OTHER = Plan(base="fp8", precision={"sites": {"*.to_out.0": "model"}})


@each_kind
def test_plans_follow_each_other_in_any_order(kind: Kind) -> None:
    pipe = kind.pipe()
    before = bits(pipe)
    first: dict[Any, torch.Tensor] = {}
    for plan in ("exact", "fp8", "exact", "fp8", OTHER, "fp8", OTHER, "exact"):
        handle = fusedit.accelerate(pipe, plan)
        drawn, count = kind.call(pipe), len(converted(pipe))
        assert torch.equal(drawn, first.setdefault(plan if isinstance(plan, str) else "other", drawn)), plan
        assert (count > 0) == (plan != "exact")
        assert fused(handle) > 0
    assert len({float(drawn.sum()) for drawn in first.values()}) == 3, "the plans draw alike: the test shows nothing"
    handle.restore()
    assert before.differing(bits(pipe)) == []


@each_kind
def test_an_equal_plan_returns_the_same_handle(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    places = {path: layer.weight.data_ptr() for path, layer in converted(pipe).items()}
    assert fusedit.accelerate(pipe, Plan(base="fp8")) is handle
    assert fusedit.accelerate(pipe, Plan(base="fp8", precision={"default": "fp8"})) is handle
    assert {path: layer.weight.data_ptr() for path, layer in converted(pipe).items()} == places


@each_kind
def test_paused_is_stock_bit_for_bit_and_nests(kind: Kind) -> None:
    pipe = kind.pipe()
    stock = kind.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    drawn, count = kind.call(pipe), fused(handle)
    with handle.paused():
        with handle.paused():
            assert torch.equal(kind.call(pipe), stock)
        assert torch.equal(kind.call(pipe), stock), "the inner block brought the codes back"
        assert fusedit.accelerate(pipe, "fp8") is handle
    assert fused(handle) == count
    assert torch.equal(kind.call(pipe), drawn)
    assert fused(handle) > count


def test_what_happens_in_a_pause_counts_after_it() -> None:
    pipe, other = FLUX.pipe(), FLUX.pipe(seed=9)
    handle = fusedit.accelerate(pipe, "fp8")
    with handle.paused():
        pipe.transformer.load_state_dict(other.transformer.state_dict())
        with pytest.raises(
            UnsupportedPipelineError, match=r"transformer is paused, .*leave the paused\(\) block first"
        ):
            fusedit.accelerate(pipe, "exact")
    fusedit.accelerate(other, "fp8")
    assert relative(FLUX.call(pipe), FLUX.call(other)) < 0.01
    with handle.paused():
        handle.restore()
    assert not converted(pipe)
    assert torch.equal(FLUX.call(pipe), FLUX.call(FLUX.pipe(seed=9)))


@each_kind
def test_a_fused_lora_is_in_the_pause_too_and_the_same_after_it(kind: Kind) -> None:
    pipe, stock = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    for each in (pipe, stock):
        fusedit.load_lora(each, mixed_state(stock, names=("to_q", "to_out", "net", "feed_forward")).tensors, "a")
        each.fuse_lora()
    drawn = kind.call(pipe)
    with handle.paused():
        assert relative(kind.call(pipe), kind.call(stock)) < 1e-5
        with pytest.raises(LoraError, match=r"cannot be fused while an fp8 plan is paused; leave the paused\(\) block"):
            pipe.fuse_lora()
        with pytest.raises(LoraError, match="cannot be unfused while an fp8 plan is paused"):
            pipe.unfuse_lora()
    assert torch.equal(kind.call(pipe), drawn)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    handle.restore()
    assert torch.equal(kind.call(pipe), kind.call(kind.pipe()))


@pytest.mark.parametrize(
    ("kind", "originals", "how"),
    [
        (FLUX, "cpu", "deepcopy"),
        (FLUX, "reload", "pickle"),
        (Z_IMAGE, "cpu", "pickle"),
        (Z_IMAGE, "reload", "deepcopy"),
    ],
)
def test_a_copy_is_a_stock_pipeline_where_the_originals_can_be_had(
    kind: Kind, originals: str, how: str, tmp_path: Path
) -> None:
    pipe = from_folder(kind, tmp_path)
    stock, config = kind.call(pipe), dict(pipe.transformer.config)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    drawn = kind.call(pipe)
    if how == "pickle":
        pickled = pickle.dumps(pipe)
        assert b"fusedit" not in pickled
        copied = pickle.loads(pickled)
    else:
        copied = copy.deepcopy(pipe)
    assert dict(copied.transformer.config) == config
    count = fused(handle)
    assert torch.equal(kind.call(copied), stock)
    assert fused(handle) == count
    again = fusedit.accelerate(copied, "fp8")
    assert torch.equal(kind.call(copied), drawn)
    again.restore()
    assert torch.equal(kind.call(copied), stock)
    assert torch.equal(kind.call(pipe), drawn)


@pytest.mark.parametrize(("originals", "how"), [("cpu", "deepcopy"), ("cpu", "pickle"), ("drop", "pickle")])
def test_a_copy_has_the_lora_that_was_fused_and_can_unfuse_it(originals: str, how: str) -> None:
    pipe, stock = Z_IMAGE.pipe(), Z_IMAGE.pipe()
    fusedit.accelerate(pipe, "fp8", originals=originals)
    for each in (pipe, stock):
        fusedit.load_lora(each, mixed_state(Z_IMAGE.pipe(), names=("to_q", "to_v", "feed_forward")).tensors, "a")
        each.fuse_lora()
    copied = copy.deepcopy(pipe) if how == "deepcopy" else pickle.loads(pickle.dumps(pipe))
    limit = 1e-5 if originals == "cpu" else 0.1
    assert relative(Z_IMAGE.call(copied), Z_IMAGE.call(stock)) < limit
    for each in (copied, stock):
        each.unfuse_lora()
        each.unload_lora_weights()
    assert relative(Z_IMAGE.call(copied), Z_IMAGE.call(stock)) < limit


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_without_originals_is_a_quantised_pipeline(how: str) -> None:
    pipe = Z_IMAGE.pipe()
    fusedit.accelerate(pipe, "fp8", originals="drop")
    drawn = Z_IMAGE.call(pipe)
    copied = copy.deepcopy(pipe) if how == "deepcopy" else pickle.loads(pickle.dumps(pipe))
    assert converted(copied).keys() == converted(pipe).keys()
    with pytest.raises(UnsupportedPipelineError, match="e4m3 when they were loaded, and plan 'exact' wants"):
        fusedit.accelerate(copied, "exact")
    assert relative(Z_IMAGE.call(copied), drawn) < 0.05, "its layers run by themselves under stock's forward"
    handle = fusedit.accelerate(copied, "fp8")
    assert torch.equal(Z_IMAGE.call(copied), drawn)
    assert fused(handle) > 0
    place = converted(copied)["layers.0.attention.to_q"].weight.data_ptr()
    assert place != converted(pipe)["layers.0.attention.to_q"].weight.data_ptr()
