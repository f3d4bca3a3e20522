"""Gates of the tier, comparisons with an fp8 plan from end to end, and the search for who spoiled a picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.whole_pipes import flux_pipe

import fusedit
from fusedit import calibration, ops
from fusedit.errors import RestoreError, UnsupportedPipelineError
from fusedit.float8.rounding import Moments
from fusedit.models import registry
from fusedit.plan import Plan
from fusedit.quality import compare
from fusedit.quality.gates import Gates

SMALL = {"width": 96, "height": 96, "steps": 2}


@pytest.fixture(scope="module", params=["tiny-flux", "tiny-z-image"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return fusedit.load(request.param, dtype="fp32", device="cpu")


def test_gates_of_the_tier() -> None:
    for dtype in ("fp32", "bf16"):
        gates = Gates.of(dtype, tier="fp8")
        assert (gates.min_psnr, gates.min_ssim, gates.on, gates.yardstick) == (30.0, 0.95, "min", False)
    assert Gates.of("bf16", tier="fp8", fp32_reference=True).yardstick is False, "a lossy tier has no such yardstick"
    assert Gates.of("bf16", tier="fp8", min_psnr=35.0).min_psnr == 35.0
    assert Gates.of("bf16", tier="fp8", min_psnr=35.0).min_ssim == 0.95


def test_a_comparison_from_end_to_end(pipe: Any) -> None:
    before = {name: p.detach().clone() for name, p in pipe.transformer.named_parameters()}
    result = compare(pipe, ["a fox"], plan="fp8", seeds=[0], search=False, **SMALL)
    assert all(20 < pair.psnr_db < 80 for pair in result.pairs), "noise, or nothing lossy happened"
    worst = min(pair.psnr_db for pair in result.pairs), min(pair.ssim for pair in result.pairs)
    assert result.verdict.passed == (worst[0] >= 30 and worst[1] >= 0.95)
    assert result.plan["base"] == "fp8"
    assert {site.site for site in result.rewritten if site.exactness == "lossy" and site.fused}
    assert any("linear layers in e4m3" in note for note in result.notes)
    for name, p in pipe.transformer.named_parameters():
        assert torch.equal(p, before[name]), name


def test_without_originals_there_is_nothing_to_compare_with() -> None:
    pipe: Any = fusedit.load("tiny-z-image", dtype="fp32", device="cpu")
    handle = fusedit.accelerate(pipe, "fp8", originals="drop")
    with pytest.raises(UnsupportedPipelineError, match="another pipeline that shares transformer has originals='drop'"):
        compare(pipe, ["a fox"], plan="fp8", seeds=[0], **SMALL)
    assert handle.report().active


def test_a_checkpoint_has_no_stock_to_compare_with(flux_folders: Any) -> None:
    pipe = fusedit.load(flux_folders.quantised, dtype="fp32")
    with pytest.raises(RestoreError, match="e4m3 when they were loaded; load the unquantised model for them"):
        compare(pipe, ["red fox"], plan="fp8", seeds=[0], width=48, height=32, steps=2)


def test_the_guilty_rewrite_of_the_tier_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = fusedit.load("tiny-z-image", dtype="fp32", device="cpu")
    right = ops.scaled_linear.unchecked

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = right(*args, **kwargs)
        return made.copy_(made.roll(1, dims=-1))  # a factor would pass: Z-Image normalises each branch

    monkeypatch.setattr(ops.scaled_linear, "unchecked", spoiled)
    others = (r.name for model in registry().values() for r in model.rewrites if r.name.partition(".")[2] != "fp8")
    plan = Plan(base="fp8").without(*others, "flux.fp8")
    result = compare(pipe, ["a fox"], plan=plan, seeds=[0], width=96, height=96, steps=2)
    assert not result.verdict.passed
    assert result.guilt is not None
    assert "z_image.fp8" in result.guilt.rewrites, result.guilt.sentence


def test_a_search_finds_bad_rounding_and_draws_for_codes_only_where_others_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe: Any = flux_pipe()
    right, draw, drawn = Moments.round, calibration._drawn, []

    def spoiled(self: Moments, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = right(self, weight)
        return codes.view(torch.uint8).flip(0).view(codes.dtype), scale

    def counted(pipe: Any, module: Any, layers: Any, progress: Any) -> Any:
        drawn.append(len(layers))
        return draw(pipe, module, layers, progress)

    monkeypatch.setattr(Moments, "round", spoiled)
    monkeypatch.setattr(
        registry()["flux"], "typical", classmethod(lambda *_: None)
    )  # else modulation is rounded anyway
    monkeypatch.setattr(calibration, "_drawn", counted)
    others = (r.name for model in registry().values() for r in model.rewrites if r.tier == "exact")
    plan = Plan(base="fp8").without(*others)
    result = compare(pipe, ["red fox"], plan=plan, seeds=[0], width=48, height=32, steps=2, min_psnr=55)
    assert result.guilt is not None
    tried = dict(result.guilt.tried)
    assert tried == {"flux.fp8": False, "flux.fp8_rounding": True, "flux.fp8_modulation": False}
    assert result.guilt.rewrites == ("flux.fp8_rounding",)
    every, *others_drawn = drawn
    assert len(others_drawn) == 2, "without the products, and without the modulation"
    assert sum(others_drawn) == every
