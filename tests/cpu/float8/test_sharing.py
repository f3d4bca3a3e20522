"""Pipelines that share a transformer whose weights a plan converted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline, ZImageImg2ImgPipeline
from support.fp8 import bits, converted
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, fused, picture, with_image

import fusedit
from fusedit.errors import RestoreError, UnsupportedPipelineError, UsageError
from fusedit.plan import Plan

OTHER = Plan(base="fp8", precision={"sites": {"*.to_out.0": "model"}})


def from_pipe(kind: Kind, pipe: Any, how: str = "components") -> Any:
    if how == "components":
        return with_image(pipe)
    made: Any = (FluxImg2ImgPipeline if kind is FLUX else ZImageImg2ImgPipeline).from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


def draw(kind: Kind, pipe: Any) -> torch.Tensor:
    return kind.call(pipe, image=picture(), strength=0.7)


@each_kind
@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_one_that_is_not_accelerated_raises(kind: Kind, originals: str) -> None:
    pipe = kind.pipe()
    other = from_pipe(kind, pipe)
    stock = draw(kind, other)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    with pytest.raises(UsageError, match=r"shares its transformer with an accelerated pipeline .* e4m3; accelerate it"):
        draw(kind, other)
    assert fused(handle) == 0
    made_later = from_pipe(kind, pipe, "from_pipe")
    with pytest.raises(UsageError, match=r"or restore\(\) the other one"):
        draw(kind, made_later)
    if originals == "cpu":
        handle.restore()
        assert torch.equal(draw(kind, other), stock)


@each_kind
def test_the_same_plan_joins_and_each_can_leave(kind: Kind) -> None:
    pipe = kind.pipe()
    other, before = from_pipe(kind, pipe), bits(pipe)
    a = fusedit.accelerate(pipe, "fp8")
    drawn = kind.call(pipe)
    places = {path: layer.weight.data_ptr() for path, layer in converted(pipe).items()}
    b = fusedit.accelerate(other, "fp8")
    assert {path: layer.weight.data_ptr() for path, layer in converted(pipe).items()} == places, "converted twice"
    second = draw(kind, other)
    assert fused(b) > 0
    a.restore()
    assert torch.equal(draw(kind, other), second), "the one that left took the weights along"
    with pytest.raises(UsageError, match="accelerate it with the same plan"):
        kind.call(pipe)
    again = fusedit.accelerate(pipe, "fp8")
    assert torch.equal(kind.call(pipe), drawn)
    b.restore()
    assert torch.equal(kind.call(pipe), drawn)
    again.restore()
    assert before.differing(bits(pipe)) == []


@pytest.mark.parametrize("plan", ["exact", OTHER])
def test_another_plan_is_refused_and_changes_nothing(plan: Any) -> None:
    pipe = FLUX.pipe()
    other = from_pipe(FLUX, pipe)
    fusedit.accelerate(pipe, "fp8")
    drawn, before = FLUX.call(pipe), bits(pipe)
    with pytest.raises(
        UnsupportedPipelineError, match=r"another pipeline that shares transformer converted its weights"
    ):
        fusedit.accelerate(other, plan)
    with pytest.raises(UnsupportedPipelineError, match=r"has originals='cpu', not 'drop'; give the same"):
        fusedit.accelerate(other, "fp8", originals="drop")
    report = fusedit.accelerate(other, plan, strict=False).report()
    assert any("converted its weights by another plan" in refusal.reason for refusal in report.refused)
    assert before.differing(bits(pipe)) == []
    assert torch.equal(FLUX.call(pipe), drawn)


def test_neither_may_change_its_plan_alone() -> None:
    pipe = FLUX.pipe()
    other = from_pipe(FLUX, pipe)
    fusedit.accelerate(pipe, "fp8")
    handle = fusedit.accelerate(other, "fp8")
    drawn = FLUX.call(pipe)
    with pytest.raises(UnsupportedPipelineError, match="converted its weights by another plan; restore that first"):
        fusedit.accelerate(other, OTHER)
    assert handle.report().active
    fusedit.accelerate(other, Plan(base="fp8", cache={"graphs": False}))
    assert torch.equal(FLUX.call(pipe), drawn)


def test_fp8_beside_exact_is_refused() -> None:
    pipe = FLUX.pipe()
    other = from_pipe(FLUX, pipe)
    handle = fusedit.accelerate(pipe, "exact")
    drawn, before = FLUX.call(pipe), bits(pipe)
    with pytest.raises(UnsupportedPipelineError, match=r"shares transformer is accelerated in the model's dtype"):
        fusedit.accelerate(other, "fp8")
    assert before.differing(bits(pipe)) == []
    assert torch.equal(FLUX.call(pipe), drawn)
    assert fusedit.accelerate(other, "exact").report().active
    assert handle.report().active


@each_kind
def test_a_pause_of_one_is_no_pause_of_the_other(kind: Kind) -> None:
    pipe = kind.pipe()
    other, stock = from_pipe(kind, pipe), kind.call(pipe)
    a, b = fusedit.accelerate(pipe, "fp8"), fusedit.accelerate(other, "fp8")
    drawn = draw(kind, other)
    with a.paused():
        assert torch.equal(kind.call(pipe), stock)
        with pytest.raises(UsageError, match=r"stock's at the moment, since another pipeline .* is paused"):
            draw(kind, other)
        with b.paused():
            draw(kind, other)
        assert torch.equal(kind.call(pipe), stock)
    assert torch.equal(draw(kind, other), drawn)
    with a.paused():
        a.restore()
    assert torch.equal(draw(kind, other), drawn)


@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_a_pipeline_that_is_gone_has_left_its_weights(originals: str) -> None:
    pipe = Z_IMAGE.pipe()
    other = from_pipe(Z_IMAGE, pipe)
    stock = draw(Z_IMAGE, other)
    fusedit.accelerate(pipe, "fp8", originals=originals)
    transformer = pipe.transformer
    del pipe
    gc.collect()
    with pytest.raises(UsageError, match=r"e4m3 for an accelerated pipeline that is gone; call fusedit.accelerate"):
        draw(Z_IMAGE, other)
    with pytest.raises(UsageError, match="that is gone"):
        transformer([], torch.ones(1), [])
    fp8 = fusedit.accelerate(other, "fp8", originals=originals)
    draw(Z_IMAGE, other)
    assert fused(fp8) > 0
    if originals == "drop":
        with pytest.raises(RestoreError, match="this plan needs the original weights of transformer"):
            fusedit.accelerate(other, "exact")
    else:
        fusedit.accelerate(other, "exact")
        assert not converted(other)
        fusedit.accelerate(other, "exact").restore()
        assert torch.equal(draw(Z_IMAGE, other), stock)


def test_exact_takes_the_weights_back_that_a_pipeline_left_which_is_gone() -> None:
    pipe = Z_IMAGE.pipe()
    other = from_pipe(Z_IMAGE, pipe)
    stock, before = draw(Z_IMAGE, other), bits(pipe)
    fusedit.accelerate(pipe, "fp8")
    del pipe
    gc.collect()
    handle = fusedit.accelerate(other, "exact")
    assert fused(handle) == 0
    handle.restore()
    assert before.differing(bits(other)) == []
    assert torch.equal(draw(Z_IMAGE, other), stock)
