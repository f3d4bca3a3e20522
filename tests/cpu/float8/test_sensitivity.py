"""sensitivity(): which layers spoil the picture, measured on a pipeline that is the same bit for bit afterwards."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support import whole_pipes
from support.fp8 import bits, converted
from support.whole_pipes import SMALL
from typer.testing import CliRunner

import fusedit
from fusedit import calibration
from fusedit.cli_fp8 import print_sensitivity
from fusedit.defaults import request_for
from fusedit.drawing import draw
from fusedit.errors import ArgumentError, PlanError, UnsupportedPipelineError
from fusedit.float8 import choice
from fusedit.float8.linear import Float8Linear
from fusedit.plan import Plan
from fusedit.sensitivity import GROUPS, Sensitivity, sensitivity

UNROUNDED = Plan(base="fp8", rewrites={"flux.fp8_rounding": False})


@pytest.fixture(scope="module", params=["flux", "z_image"])
def pipe(request: pytest.FixtureRequest) -> Any:
    made = getattr(whole_pipes, f"{request.param}_pipe")()
    made.set_progress_bar_config(disable=True)
    return made


def measure(pipe: Any, **changes: Any) -> Sensitivity:
    request = request_for(pipe, "red fox", 0, **SMALL)
    return sensitivity(pipe, request, **{"samples": 2, **changes})


@pytest.mark.parametrize("by", GROUPS)
def test_groups_cover_every_converted_layer_once_and_their_squares_add_up(pipe: Any, by: str) -> None:
    before = bits(pipe)
    found = measure(pipe, by=by)
    assert before.differing(bits(pipe)) == []
    assert "forward" not in pipe.transformer.__dict__
    assert not pipe.transformer._forward_pre_hooks
    handle = fusedit.accelerate(pipe, "fp8")
    layers = converted(pipe)
    handle.restore()
    assert sum(group.layers for group in found.groups) == len(layers)
    assert sum(group.weights for group in found.groups) == sum(layer.weight.numel() for layer in layers.values())
    assert sum(group.share for group in found.groups) == pytest.approx(1)
    assert [g.error for g in found.groups] == sorted((g.error for g in found.groups), reverse=True)
    assert all(group.error > 0 for group in found.groups)
    root = sum(group.error**2 for group in found.groups) ** 0.5
    assert 0.3 * root < found.total < 3 * root
    assert found.steps == (0, 1)
    assert all(found.kept.values()), "a layer stays without a reason"
    json.dumps(found.to_dict())


def test_the_better_plan_is_accepted_and_better(pipe: Any) -> None:
    found = measure(pipe, by="role")
    better = found.better(2)
    assert Plan.from_dict(json.loads(better.to_json())) == better
    handle = fusedit.accelerate(pipe, better)
    kept = set(handle.plan.precision["sites"])
    assert kept == {group.name for group in found.groups[:2]}
    handle.restore()
    assert measure(pipe, plan=better).total < found.total


def test_a_plan_that_takes_some_modulation_layers_alone_is_told() -> None:
    pipe = whole_pipes.flux_pipe()
    pipe.set_progress_bar_config(disable=True)
    found = measure(pipe, by="block", plan=UNROUNDED)
    blocks = next(count for count, group in enumerate(found.groups, 1) if group.name.endswith(".*"))
    reason = "modulation layers differ in precision"
    mended = found.better(blocks).to_dict()
    mended["precision"]["sites"]["*norm*.linear"] = "weights"
    for plan, mixed in ((found.better(0), False), (found.better(blocks), True), (Plan.from_dict(mended), False)):
        handle = fusedit.accelerate(pipe, plan)
        draw(pipe, request_for(pipe, "red fox", 0, **SMALL))
        site = next(site for site in handle.report().rewritten if site.site == "flux.modulation")
        assert (reason in site.reasons) == mixed == (site.fused == 0)
        handle.restore()
    assert found.drawback(0) == ""
    assert re.match(r"this plan has \d of \d modulation layers in the model's dtype and the", found.drawback(blocks))
    assert measure(pipe, by="block", plan=found.better(blocks)).drawback(0) == found.drawback(blocks)
    assert found.drawback(len(found.groups)) == "", "all of them are kept"


def test_an_interrupted_measurement_leaves_every_bit(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, right, calls = bits(pipe), Float8Linear.convert, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return right(*args, **kwargs)

    monkeypatch.setattr(Float8Linear, "convert", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        measure(pipe)
    assert before.differing(bits(pipe)) == []
    assert not pipe.transformer._forward_pre_hooks


def test_what_cannot_be_measured(pipe: Any) -> None:
    with pytest.raises(ArgumentError, match="by is 'head'; give one of role, block, layer"):
        measure(pipe, by="head")
    with pytest.raises(ArgumentError, match="samples is 3; give 1 to 2, the steps of the run"):
        measure(pipe, samples=3)
    with pytest.raises(PlanError, match="makes no layer e4m3, so there is nothing to measure"):
        measure(pipe, plan="exact")
    handle = fusedit.accelerate(pipe, "fp8")
    with pytest.raises(UnsupportedPipelineError, match="e4m3 already; give the model with its own"):
        measure(pipe)
    handle.restore()


def test_a_group_whose_error_is_not_finite_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    flux: Any = whole_pipes.flux_pipe()
    flux.set_progress_bar_config(disable=True)
    right = Float8Linear.forward

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        made = right(self, x)
        return made / 0 if self is flux.transformer.single_transformer_blocks[0].proj_mlp else made

    monkeypatch.setattr(Float8Linear, "forward", broken)
    found = measure(flux, by="layer")
    assert found.groups[0].name == "single_transformer_blocks.0.proj_mlp"
    assert found.groups[0].error == found.total == float("inf")
    json.loads(json.dumps(found.to_dict()), parse_constant=lambda _: None)


def test_it_says_how_codes_were_chosen_and_why_not_better(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(pipe)
    layers = sum(group.layers for group in found.groups)
    assert found.rounding == f"the codes of {layers} layers are {choice.READ}"
    monkeypatch.setattr(calibration, "LARGEST_ON_A_CPU", 1000)
    found = measure(pipe)
    assert "layers are the nearest ones: drawing with" in found.rounding
    assert "weights on a CPU takes too long; move the pipeline to a GPU before that" in found.rounding
    assert found.to_dict()["rounding"] == found.rounding
    out = io.StringIO()
    print_sensitivity(found, Console(file=out, width=300))
    assert found.rounding in out.getvalue()


def test_the_commands(flux_folders: Any, tmp_path: Path) -> None:
    from fusedit.cli import app

    run, model = CliRunner().invoke, ["--model", str(flux_folders.stock)]
    small = ["--size", "48x32", "--steps", "2", "--samples", "2", "--dtype", "fp32", "--prompt", "red fox"]
    saved = tmp_path / "plan.json"
    result = run(app, ["sensitivity", *model, *small, "--by", "block", "--save", str(saved), "--keep", "1"])
    assert result.exit_code == 0, result.output
    assert "transformer_blocks.0.*" in result.stdout
    assert "warning: this plan has" in result.stderr
    plan = Plan.of(saved)
    assert list(plan.precision["sites"].values()) == ["model"]
    assert fusedit.accelerate(fusedit.load(flux_folders.stock, dtype="fp32"), plan).plan == plan
    data = json.loads(run(app, ["sensitivity", *model, *small, "--json"]).stdout)
    assert sum(group["share"] for group in data["groups"]) == pytest.approx(1)
    out = tmp_path / "q"
    result = run(app, ["quantize", str(flux_folders.stock), "-o", str(out), "--plan", str(saved), "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    assert "linear layers in e4m3" in result.stdout
    again = run(app, ["quantize", str(flux_folders.stock), "-o", str(out)])
    assert again.exit_code == 2
    assert "is there already; name a new folder" in again.stderr
    for arguments in (["quantize", str(flux_folders.stock), "-o", str(tmp_path / "r"), "--plan", "exact"],
                      ["sensitivity", *model, "--plan", "exact"]):  # fmt: skip
        refused = run(app, arguments)
        assert refused.exit_code == 2
        assert "plan 'exact' quantises nothing" in refused.stderr
    drawn = run(app, ["generate", "red fox", "--model", str(out), "--plan", "fp8", "--size", "48x32", "--steps", "2",
                      "--dtype", "fp32", "-o", str(tmp_path / "fox.png")])  # fmt: skip
    assert drawn.exit_code == 0, drawn.output
    refused = run(app, ["generate", "red fox", "--model", str(out), "--plan", "exact", "--size", "48x32",
                        "-o", str(tmp_path / "b.png")])  # fmt: skip
    assert refused.exit_code == 2
    assert "load the unquantised model, or use plan 'fp8'" in refused.stderr
