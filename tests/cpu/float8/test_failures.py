"""Whatever fails in the middle of a conversion or its undoing, the pipeline is what it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import bits, converted, from_folder
from support.runs import FLUX, fused, site

import fusedit
from fusedit.errors import DeviceMemoryError, PlanError
from fusedit.float8 import conversion, linear
from fusedit.plan import Plan

FAILURES: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 144.00 MiB. GPU 0 has"),
    "interrupt": KeyboardInterrupt,
    "bug": lambda: RuntimeError("boom"),
}
RAISED = {"memory": DeviceMemoryError, "interrupt": KeyboardInterrupt, "bug": RuntimeError}


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int, error: BaseException) -> list[int]:
    """Let the function or method raise in its call number `after`; the list counts calls."""
    right, calls = getattr(owner, name), [0]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after:
            raise error
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, name, staticmethod(wrong) if isinstance(owner, type) and name == "convert" else wrong)
    return calls


@pytest.mark.parametrize(
    ("failure", "originals"), [("memory", "cpu"), ("interrupt", "cpu"), ("bug", "reload"), ("memory", "drop")]
)
def test_a_conversion_that_fails_changes_nothing(
    failure: str, originals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = from_folder(FLUX, tmp_path)
    stock, before = FLUX.call(pipe), bits(pipe)
    with monkeypatch.context() as patch:
        calls = failing(patch, linear.Float8Linear, "convert", 20, FAILURES[failure]())
        with pytest.raises(RAISED[failure]) as caught:
            fusedit.accelerate(pipe, "fp8", originals=originals)
    assert calls == [20]
    if failure == "memory":
        assert str(caught.value) == (
            "the weights of FluxTransformer2DModel cannot be converted (CUDA out of memory); nothing was changed, free "
            "some memory or call pipe.enable_model_cpu_offload() first"
        )
    assert before.differing(bits(pipe)) == []
    assert converted(pipe) == {}
    assert "forward" not in pipe.transformer.__dict__
    assert torch.equal(FLUX.call(pipe), stock)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    FLUX.call(pipe)
    assert site(handle, "flux.fp8").fused > 0


def test_room_is_asked_for_before_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    before = bits(pipe)
    failing(monkeypatch, conversion, "quantise_weight", 1, FAILURES["memory"]())
    monkeypatch.setattr(linear.Float8Linear, "convert", staticmethod(lambda *_, **__: pytest.fail("it was touched")))
    with pytest.raises(DeviceMemoryError):
        fusedit.accelerate(pipe, "fp8")
    assert before.differing(bits(pipe)) == []


@pytest.mark.parametrize("first", ["exact", "fp8"])
def test_the_former_plan_stays_in_force_where_another_one_fails(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, first)
    drawn = FLUX.call(pipe)
    other = Plan(base="fp8", precision={"sites": {"transformer_blocks.0.*": "model"}})
    with monkeypatch.context() as patch:
        failing(patch, linear.Float8Linear, "convert", 20, FAILURES["bug"]())
        with pytest.raises(RuntimeError, match="boom"):
            fusedit.accelerate(pipe, other)
    assert handle.report().active
    assert fusedit.accelerate(pipe, first) is handle
    count = fused(handle)
    assert torch.equal(FLUX.call(pipe), drawn)
    assert fused(handle) > count
    handle.restore()
    assert torch.equal(FLUX.call(pipe), FLUX.call(FLUX.pipe()))


def test_a_plan_that_is_wrong_leaves_the_former_one_in_force() -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    drawn = FLUX.call(pipe)
    with pytest.raises(PlanError, match="matches no linear layer"):
        fusedit.accelerate(pipe, Plan(base="fp8", precision={"sites": {"nothing": "model"}}))
    assert handle.report().active
    assert torch.equal(FLUX.call(pipe), drawn)


@pytest.mark.parametrize(("failure", "originals"), [("memory", "cpu"), ("interrupt", "reload")])
@pytest.mark.parametrize("how", ["restore", "paused", "exact"])
def test_an_undoing_that_fails_changes_nothing(
    how: str, failure: str, originals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = from_folder(FLUX, tmp_path)
    stock = FLUX.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    drawn, before = FLUX.call(pipe), bits(pipe)
    attempts: dict[str, Callable[[], Any]] = {
        "restore": handle.restore,
        "paused": lambda: handle.paused().__enter__(),
        "exact": lambda: fusedit.accelerate(pipe, "exact"),
    }
    with monkeypatch.context() as patch:
        calls = failing(patch, linear.Float8Linear, "revert", 20, FAILURES[failure]())
        with pytest.raises(RAISED[failure]) as caught:
            attempts[how]()
    assert calls == [20]
    if failure == "memory":
        assert "no room for the original weights" in str(caught.value)
    assert before.differing(bits(pipe)) == []
    assert handle.report().active
    count = fused(handle)
    assert torch.equal(FLUX.call(pipe), drawn)
    assert fused(handle) > count
    handle.restore()
    assert torch.equal(FLUX.call(pipe), stock)


def test_a_pause_whose_end_fails_is_not_taken_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    stock = FLUX.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    drawn = FLUX.call(pipe)
    pause = handle.paused()
    with monkeypatch.context() as patch:
        pause.__enter__()
        assert torch.equal(FLUX.call(pipe), stock)
        failing(patch, linear.Float8Linear, "convert", 5, FAILURES["memory"]())
        with pytest.raises(DeviceMemoryError):
            pause.__exit__(None, None, None)
    with pytest.raises(fusedit.errors.UsageError, match="the weights of transformer are stock's at the moment"):
        FLUX.call(pipe)
    fusedit.accelerate(pipe, "fp8")
    assert torch.equal(FLUX.call(pipe), drawn)
