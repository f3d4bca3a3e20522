"""What is said of how codes were chosen is true of the codes that are there, whoever made them and whatever came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import converted
from support.whole_pipes import flux_pipe, z_image_pipe

import fusedit
from fusedit import calibration
from fusedit.errors import RestoreError, UnsupportedPipelineError
from fusedit.float8 import choice
from fusedit.float8.linear import quantise_weight
from fusedit.float8.rounding import Moments
from fusedit.plan import Plan
from fusedit.quality.reference import twin
from fusedit.report import SiteReport

ROUNDING = {"flux": "flux.fp8_rounding", "z_image": "z_image.fp8_rounding"}
PIPES = {"flux": flux_pipe, "z_image": z_image_pipe}
each_name = pytest.mark.parametrize("name", list(PIPES))
UNROUNDED = Plan(base="fp8", rewrites={"flux.fp8_rounding": False})


def made(name: str = "flux") -> Any:
    pipe: Any = PIPES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def codes_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {path: layer.weight.data.view(torch.uint8).clone() for path, layer in converted(pipe).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(codes, b[path]) for path, codes in a.items())


def said(handle: fusedit.Handle) -> list[str]:
    """What the report says of codes."""
    return [note for note in handle.report().notes if note.startswith("transformer: the codes of")]


def of(count: int, words: str) -> str:
    return f"transformer: the codes of {count} layer{'s' if count > 1 else ''} are {words}"


def site(handle: fusedit.Handle, name: str = "flux.fp8_rounding") -> SiteReport:
    return next(site for site in handle.report().rewritten if site.site == name)


def products(pipe: Any) -> list[str]:
    """Layers whose activations are quantised: they are rounded for nothing but pictures."""
    return [path for path, layer in converted(pipe).items() if layer.activations]


def is_nearest(pipe: Any, path: str) -> bool:
    layer = converted(pipe)[path]
    assert layer.original is not None
    return torch.equal(layer.weight.data.view(torch.uint8), quantise_weight(layer.original)[0].view(torch.uint8))


@each_name
@pytest.mark.parametrize("first", [True, False])
def test_a_plan_that_rounds_otherwise_converts_anew(name: str, first: bool) -> None:
    pipe = made(name)
    plans = [Plan(base="fp8", rewrites={ROUNDING[name]: on}) for on in (first, not first)]
    for on, plan in zip((first, not first), plans, strict=True):
        handle = fusedit.accelerate(pipe, plan)
        nearest = [is_nearest(pipe, path) for path in products(pipe)]
        assert all(nearest) is not on
        assert any(choice.READ in words for words in said(handle)) is on
    fusedit.accelerate(pipe, plans[1], originals="cpu")
    handle.restore()
    assert not converted(pipe)


def test_a_plan_that_rounds_otherwise_needs_the_originals() -> None:
    pipe = made()
    handle = fusedit.accelerate(pipe, "fp8", originals="drop")
    codes = codes_of(pipe)
    with pytest.raises(
        RestoreError, match=r"needs the original weights of transformer, .* dropped .* load the model"
    ) as e:
        fusedit.accelerate(pipe, UNROUNDED, originals="drop")
    assert "give originals='drop' again" not in str(e.value)
    assert same(codes, codes_of(pipe))
    assert handle.report().active


@pytest.mark.parametrize("first", [True, False])
def test_beside_another_pipeline_rounding_may_not_differ(first: bool) -> None:
    pipe = made()
    other = twin(pipe)
    plans = {on: Plan(base="fp8", rewrites={"flux.fp8_rounding": on}) for on in (True, False)}
    fusedit.accelerate(pipe, plans[first])
    codes = codes_of(pipe)
    words = ("on", "off") if first else ("off", "on")
    match = f"another pipeline that shares transformer has flux.fp8_rounding {words[0]}, not {words[1]}; give the same"
    with pytest.raises(UnsupportedPipelineError, match=match):
        fusedit.accelerate(other, plans[not first])
    assert fusedit.accelerate(other, plans[first]).report().active
    assert same(codes, codes_of(pipe))


@each_name
def test_whoever_finds_converted_weights_counts_their_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = made(name)
    other = twin(pipe)
    first = fusedit.accelerate(pipe, "fp8")
    monkeypatch.setattr(calibration, "_drawn", lambda *_: pytest.fail("it drew again"))
    second = fusedit.accelerate(other, "fp8")
    assert site(second, ROUNDING[name]) == site(first, ROUNDING[name])
    assert site(second, ROUNDING[name]).fused == 1
    third = fusedit.accelerate(other, Plan(base="fp8", cache={"graphs": False}))
    assert (site(third, ROUNDING[name]).fused, site(third, ROUNDING[name]).stock) == (1, 0)


def test_a_reason_for_nearest_codes_is_found_by_the_next_pipeline() -> None:
    pipe = made()
    other = twin(pipe)
    kept = pipe.tokenizer
    pipe.register_modules(tokenizer=None)
    fusedit.accelerate(pipe, "fp8")
    pipe.register_modules(tokenizer=kept)
    found = site(fusedit.accelerate(other, "fp8"))
    assert (found.fused, found.reasons) == (0, {"without tokenizer the pipeline cannot draw from a prompt": 1})


def test_a_session_that_is_taken_up_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.session import Session

    pipe = made()
    handle = fusedit.accelerate(pipe, "fp8")
    before, install = site(handle), Session.install

    def fail(self: Session, *given: Any) -> None:
        if self.model.plan.cache["graphs"]:
            install(self, *given)
        else:
            raise RuntimeError("boom")

    monkeypatch.setattr(Session, "install", fail)
    with pytest.raises(RuntimeError, match="boom"):
        fusedit.accelerate(pipe, Plan(base="fp8", cache={"graphs": False}))
    assert site(handle) == before
    assert before.fused == 1


def test_weights_changed_in_a_pause_are_no_longer_called_rounded() -> None:
    pipe = made()
    handle = fusedit.accelerate(pipe, "fp8")
    layers = len(converted(pipe))
    assert said(handle) == [of(layers, choice.READ)]
    path = products(pipe)[3]
    with handle.paused(), torch.no_grad():
        pipe.transformer.get_submodule(path).weight.mul_(1.1)
    assert is_nearest(pipe, path)
    changed = of(1, "the nearest ones: their weights were changed in a pause")
    assert sorted(said(handle)) == sorted([of(layers - 1, choice.READ), changed])
    with handle.paused():
        pass
    assert sorted(said(handle)) == sorted([of(layers - 1, choice.READ), changed])


def test_of_nearest_codes_that_were_asked_for_nothing_is_said() -> None:
    pipe = made()
    handle = fusedit.accelerate(pipe, UNROUNDED)
    before = said(handle)
    assert all(choice.MADE_UP in words for words in before)
    path = products(pipe)[0]
    with handle.paused(), torch.no_grad():
        pipe.transformer.get_submodule(path).weight.mul_(1.1)
    pipe.transformer.load_state_dict({f"{path}.weight": torch.randn(converted(pipe)[path].weight.shape)}, strict=False)
    assert said(handle) == before


@pytest.mark.parametrize("originals", ["cpu", "reload", "drop"])
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_no_longer_called_rounded(originals: str, assign: bool, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    pipe: Any = fusedit.load(tmp_path, dtype="fp32", device="cpu")
    state = {key: t.clone() for key, t in pipe.transformer.state_dict().items()}
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    codes, layers = codes_of(pipe), len(converted(pipe))
    # The very weights that it was made of: where those can be had again, the codes of them stay.
    pipe.transformer.load_state_dict(state, assign=assign)
    loaded = "the nearest ones: their weights were loaded after the conversion"
    assert same(codes, codes_of(pipe)) is (originals != "drop")
    assert said(handle) == [of(layers, loaded if originals == "drop" else choice.READ)]
    first, *others = codes
    state[f"{first}.weight"] = state[f"{first}.weight"] * 1.1
    pipe.transformer.load_state_dict(state, assign=assign)
    if originals != "drop":
        assert sorted(said(handle)) == sorted([of(layers - 1, choice.READ), of(1, loaded)])
        assert all(torch.equal(codes[path], codes_of(pipe)[path]) for path in others)
        handle.restore()
        assert all(torch.equal(t, state[key]) for key, t in pipe.transformer.state_dict().items())


def test_loaded_codes_are_called_that_and_its_own_change_nothing() -> None:
    pipe, other = made(), made()
    handle = fusedit.accelerate(pipe, "fp8")
    fusedit.accelerate(other, UNROUNDED)
    layers, before = len(converted(pipe)), codes_of(pipe)
    pipe.transformer.load_state_dict(pipe.transformer.state_dict())
    assert same(before, codes_of(pipe))
    assert said(handle) == [of(layers, choice.READ)]
    assert all(layer.original is not None for layer in converted(pipe).values())
    pipe.transformer.load_state_dict(other.transformer.state_dict())
    changed = [path for path, codes in codes_of(pipe).items() if not torch.equal(codes, before[path])]
    assert set(products(pipe)) <= set(changed)
    assert of(len(changed), choice.LOADED) in said(handle)


def test_moments_without_a_factor_give_nearest_codes_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.float8 import rounding

    monkeypatch.setattr(rounding, "DAMPING", -2.0)  # as little as it needs for no matrix to be positive definite
    pipe = made()
    handle = fusedit.accelerate(pipe, "fp8")
    assert all(is_nearest(pipe, path) for path in converted(pipe))
    reason = "the second moments of what they read are not positive definite"
    assert said(handle) == [of(len(converted(pipe)), f"the nearest ones: {reason}")]
    assert (site(handle).fused, site(handle).reasons) == (0, {reason: 1})


@pytest.mark.parametrize(
    ("value", "reason"), [(torch.nan, "finite"), (torch.inf, "finite"), (1.0, ""), (3e38, ""), (0.0, "")]
)
def test_moments_know_whether_they_can_be_used(value: float, reason: str) -> None:
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    x[3, 2] = value
    assert Moments(x).reason == (reason and f"the second moments of what they read are not {reason}")


@pytest.mark.parametrize("originals", ["drop", "reload"])
def test_other_originals_are_refused_in_a_pause(originals: str) -> None:
    pipe = made()
    handle = fusedit.accelerate(pipe, "fp8")
    with handle.paused():
        with pytest.raises(UnsupportedPipelineError, match=r"is paused, .*; leave the paused\(\) block first"):
            fusedit.accelerate(pipe, "fp8", originals=originals)
        assert fusedit.accelerate(pipe, "fp8") is handle
    assert handle.report().active
    assert any("the originals lie on the CPU" in note for note in handle.report().notes)
