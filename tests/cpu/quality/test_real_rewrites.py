"""compare() over the real accelerate(), on whole pipelines with random weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from support.whole_pipes import SMALL

import fusedit
from fusedit.defaults import request_for
from fusedit.drawing import draw
from fusedit.errors import PlanError
from fusedit.models import FusedModel

PIPES = ("flux", "z_image")


@pytest.fixture(params=PIPES)
def pipe(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(request.getfixturevalue(request.param))


def test_exact_is_exact_and_every_site_runs(pipe: Any) -> None:
    result = fusedit.compare(pipe, ["red fox", ""], seeds=[0, 1], guidance=1.5, **SMALL)
    assert result.verdict.passed, result.verdict.reasons
    assert min(pair.psnr_db for pair in result.pairs) > 100
    assert max(pair.latents_rel_l2 for pair in result.pairs) < 1e-5
    assert result.rewritten
    assert all(site.fused > 0 for site in result.rewritten if site.called), result.notes
    assert any(site.called for site in result.rewritten)
    assert not any("warning" in note for note in result.notes)


def test_one_step_has_nothing_to_keep_and_no_warning(pipe: Any) -> None:
    result = fusedit.compare(pipe, "red fox", seeds=[0], guidance=1.5, **{**SMALL, "steps": 1})
    assert any(site.fused == 0 for site in result.rewritten)
    assert not any("never ran" in note for note in result.notes), result.notes


def test_a_stock_pipeline_is_stock_afterwards(pipe: Any) -> None:
    request = request_for(pipe, "fox", 5, **SMALL)
    state = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    storage = [p.untyped_storage().data_ptr() == p.data_ptr() for p in pipe.transformer.parameters()]
    before = draw(pipe, request).pixels
    fusedit.compare(pipe, "fox", seeds=[0], **SMALL)
    assert np.array_equal(draw(pipe, request).pixels, before)
    assert all((value == state[name]).all() for name, value in pipe.transformer.state_dict().items())
    assert [p.untyped_storage().data_ptr() == p.data_ptr() for p in pipe.transformer.parameters()] == storage
    assert "forward" not in vars(pipe.transformer)


def test_the_callers_handle_stays_in_force_and_its_counters_do_not_move(pipe: Any) -> None:
    handle = fusedit.accelerate(pipe)
    request = request_for(pipe, "fox", 5, **SMALL)
    before = draw(pipe, request).pixels
    counted = handle.report().to_dict()
    result = fusedit.compare(pipe, "fox", seeds=[0], **SMALL)
    assert result.verdict.passed
    assert handle.report().to_dict() == counted
    assert fusedit.accelerate(pipe) is handle
    assert np.array_equal(draw(pipe, request).pixels, before)
    handle.restore()
    assert "forward" not in vars(pipe.transformer)


@pytest.mark.parametrize("factor", [1.3, float("nan")])
@pytest.mark.parametrize(("name", "rewrite"), [("flux", "flux.gelu"), ("flux", "flux.qk_norm_rope")])
def test_a_broken_rewrite_is_named(
    name: str, rewrite: str, factor: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # VFY-02: the rewrite itself computes something wrong; switching it off one by one names it.
    pipe = copy.deepcopy(request.getfixturevalue(name))
    real = FusedModel.site

    def site(self: FusedModel, asked: str, op: Any) -> Any:
        run = real(self, asked, op)
        if asked != rewrite or not self.plan.enabled(asked):
            return run

        def wrong(*args: Any, **kwargs: Any) -> Any:
            made = run(*args, **kwargs)
            for tensor in made if isinstance(made, tuple) else (made,):
                tensor.mul_(factor)
            return made

        return wrong

    monkeypatch.setattr(FusedModel, "site", site)
    result = fusedit.compare(pipe, "red fox", seeds=[0], min_psnr=60, **SMALL)
    assert not result.verdict.passed
    assert result.guilt is not None
    assert result.guilt.rewrites == (rewrite,), result.guilt.sentence
    assert result.guilt.step == (0 if np.isnan(factor) else None)
    assert result.speedup is None


def test_a_rewrite_that_is_off_is_refused_by_the_plan(pipe: Any) -> None:
    name = fusedit.accelerate(pipe).report().rewritten[0].site
    result = fusedit.compare(pipe, "fox", fusedit.Plan().without(name), seeds=[0], **SMALL)
    assert name not in [site.site for site in result.rewritten]
    assert name in [refusal.site for refusal in result.refused]


def test_an_unknown_rewrite(pipe: Any) -> None:
    with pytest.raises(PlanError, match=r"flux\.nothing"):
        fusedit.compare(pipe, "fox", fusedit.Plan().without("flux.nothing"), seeds=[0], **SMALL)


def test_bf16_against_the_yardstick(pipe: Any) -> None:
    import torch

    pipe.to(torch.bfloat16)
    result = fusedit.compare(pipe, ["red fox", "blue cat"], seeds=[0, 1], reference="fp32", **SMALL)
    assert result.dtype == "bf16"
    assert result.verdict.passed, result.verdict.reasons
    assert any("against stock fp32" in check.sentence for check in result.verdict.checks)
