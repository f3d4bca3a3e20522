"""Which layers a plan makes e4m3: the models' own tables, sites of a plan, rewrites, and what the report says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.fp8 import converted
from support.pipes import relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, site

import fusedit
from fusedit.catalogue import catalogue
from fusedit.errors import PlanError, UnsupportedPipelineError
from fusedit.float8.refusals import device_refusal
from fusedit.models import registry
from fusedit.models._converted import precisions
from fusedit.plan import Plan


def sites(**patterns: str) -> dict[str, Any]:
    return {"sites": patterns}


def made(kind: Kind, plan: Plan) -> dict[str, str]:
    pipe = kind.pipe()
    return precisions(pipe.transformer, registry()[kind.name], plan).wanted


def test_tables_of_the_models() -> None:
    """LQ-09: embedders, final layers and Z-Image's modulation stay; FLUX's modulation is stored in 8 bits."""
    flux, z_image = made(FLUX, Plan(base="fp8")), made(Z_IMAGE, Plan(base="fp8"))
    assert {path for path, value in flux.items() if value == "weights"} == {
        *(f"transformer_blocks.{i}.{norm}.linear" for i in range(2) for norm in ("norm1", "norm1_context")),
        *(f"single_transformer_blocks.{i}.norm.linear" for i in range(3)),
        "norm_out.linear",
    }
    for paths, prefixes in ((flux, ("transformer_blocks.", "single_transformer_blocks.", "norm_out")),
                            (z_image, ("layers.", "noise_refiner."))):  # fmt: skip
        assert all(path.startswith(prefixes) for path in paths)
    assert not any("adaLN" in path for path in z_image)
    assert {"transformer_blocks.0.attn.to_q", "single_transformer_blocks.2.proj_out"} <= flux.keys()
    assert {"layers.0.attention.to_q", "layers.2.feed_forward.w2"} <= z_image.keys()
    assert made(FLUX, Plan()) == made(Z_IMAGE, Plan()) == {}


def test_the_last_pattern_that_matches_counts() -> None:
    first = {"single_transformer_blocks.1.*": "fp8", "single_transformer_blocks.*": "model"}
    assert not any("single" in path for path in made(FLUX, Plan(base="fp8", precision={"sites": first})))
    turned = dict(reversed(first.items()))
    found = made(FLUX, Plan(base="fp8", precision={"sites": turned}))
    assert {path.split(".")[1] for path in found if "single" in path} == {"1"}
    assert found["single_transformer_blocks.1.norm.linear"] == "fp8"


def test_a_default_of_model_leaves_what_sites_name() -> None:
    plan = Plan(base="fp8", precision={"default": "model", "sites": {"layers.1.*.w2": "fp8", "layers.0.*": "weights"}})
    found = made(Z_IMAGE, plan)
    assert found.pop("layers.1.feed_forward.w2") == "fp8"
    assert set(found.values()) == {"weights"}
    assert all(path.startswith("layers.0.") for path in found)


@pytest.mark.parametrize("pattern", ["transformer_block.*", "attn.to_q", "*.to_Q", ""])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    pipe = FLUX.pipe()
    with pytest.raises(
        PlanError, match=r"^plan precision of '.*' matches no linear layer of Flux.*`fusedit sensitivity"
    ):
        fusedit.accelerate(pipe, Plan(base="fp8", precision={"sites": {"*": "model", pattern: "fp8"}}))
    assert "forward" not in pipe.transformer.__dict__


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"default": "int8"}, r"precision.default is 'int8'; tier 'fp8' allows 'fp8' or 'model'"),
        ({"sites": {"*": "fp4"}}, r"precision of '\*' is 'fp4'; give one of model, fp8, weights"),
        ({"sites": ["*"]}, r"precision.sites must be an object of pattern to precision, not list"),
        ({"site": {}}, r"unknown key 'site' in plan 'precision'; known keys: default, sites"),
    ],
)
def test_bad_precisions(precision: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({"schema": 1, "base": "fp8", "precision": precision})


def test_an_exact_plan_has_no_precision_and_no_rewrite_of_the_tier() -> None:
    with pytest.raises(PlanError, match=r"tier 'exact' computes in the model's dtype, use base 'fp8'"):
        Plan(precision={"sites": {"*": "fp8"}})
    with pytest.raises(PlanError, match=r"precision.default is 'fp8'; tier 'exact' allows 'model'"):
        Plan(precision={"default": "fp8"})
    with pytest.raises(PlanError, match=r"^rewrite 'flux.fp8' belongs to tier 'fp8', not 'exact'; change the base$"):
        fusedit.accelerate(FLUX.pipe(), Plan(rewrites={"flux.fp8": True}))
    assert fusedit.accelerate(FLUX.pipe(), Plan(rewrites={"flux.fp8": False})).report().active


def test_round_trip() -> None:
    plan = Plan(
        base="fp8", precision={"sites": {"b": "model", "a": "weights"}}, rewrites={"flux.fp8_modulation": False}
    )
    again = Plan.from_dict(json.loads(plan.to_json()))
    assert again == plan
    assert list(again.precision["sites"]) == ["b", "a"], "the order counts"
    assert again.precision["default"] == "fp8"
    assert plan.without("flux.gelu").precision == plan.precision


@each_kind
def test_everything_in_e4m3_draws_and_the_dtype_stays(kind: Kind) -> None:
    """But for what decides the dtype: stock casts inputs to that of the weight there."""
    pipe = kind.pipe().to(torch.bfloat16)
    stock = kind.call(pipe)
    handle = fusedit.accelerate(pipe, Plan(base="fp8", precision={"sites": {"*": "fp8"}}))
    assert pipe.transformer.dtype is torch.bfloat16
    drawn = kind.call(pipe)
    assert drawn.dtype is stock.dtype
    assert torch.isfinite(drawn).all()
    assert 0 < relative(drawn.float(), stock.float()) < 0.5
    kept = {path for path, m in pipe.transformer.named_modules() if type(m) is torch.nn.Linear}
    assert kept == (
        {"x_embedder", "time_text_embed.timestep_embedder.linear_1"}
        if kind is FLUX
        else {"all_x_embedder.2-1", "t_embedder.mlp.0", "t_embedder.mlp.2"}
    )
    notes = "\n".join(handle.report().notes)
    assert "diffusers reads the model's dtype from this weight" in notes
    with handle.paused():
        assert torch.equal(kind.call(pipe), stock)


@each_kind
@pytest.mark.parametrize("value", ["model", "weights", "fp8"])
def test_precision_of_some_blocks_and_streams(kind: Kind, value: str) -> None:
    """Text in one precision and image in another, one block in a third, odd layers of a packed group alone."""
    patterns = {
        "transformer_blocks.*.ff_context.*": value,
        "transformer_blocks.*.add_*_proj": value,
        "transformer_blocks.1.*": value,
        "single_transformer_blocks.1.*": value,
        "single_transformer_blocks.2.attn.to_q": value,
    }
    if kind is Z_IMAGE:
        patterns = {"noise_refiner.*": value, "layers.1.*": value, "layers.2.attention.to_k": value,
                    "layers.0.feed_forward.w2": value, "context_refiner.0.feed_forward.w1": value}  # fmt: skip
    pipe = kind.pipe()
    stock = kind.call(pipe)
    fusedit.accelerate(pipe, Plan(base="fp8", precision={"sites": patterns}))
    chosen = {path: layer.activations for path, layer in converted(pipe).items()}
    name = "single_transformer_blocks.2.attn.to_q" if kind is FLUX else "layers.2.attention.to_k"
    assert chosen.get(name) is {"model": None, "weights": False, "fp8": True}[value]
    assert 0 < relative(kind.call(pipe), stock) < 0.06


def test_switched_off_rewrites_are_refusals_with_their_reason() -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, Plan(base="fp8", rewrites={"flux.fp8_modulation": False}))
    assert not any("norm" in path for path in converted(pipe))
    report = handle.report()
    assert {r.site: r.reason for r in report.refused} == {
        "flux.fp8_modulation": "switched off by the plan",
        "flux.fp8_attention": "off unless a plan names it",
    }
    assert any("flux.fp8_modulation is switched off by the plan" in note for note in report.notes)
    FLUX.call(pipe)
    assert site(handle, "flux.fp8").fused > 0
    handle = fusedit.accelerate(pipe, Plan(base="fp8", rewrites={"flux.fp8": False}))
    assert {path.rpartition(".")[2] for path in converted(pipe)} == {"linear"}
    FLUX.call(pipe)
    assert site(handle, "flux.fp8_modulation").fused > 0


@each_kind
def test_a_rewrite_without_layers_is_refused_and_not_said_to_be_in_force(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe, Plan(base="fp8", precision={"default": "model"}))
    kind.call(pipe)
    report = handle.report()
    tier = {rewrite.name for rewrite in registry()[kind.name].rewrites if rewrite.tier == "fp8" and rewrite.default}
    assert {r.site for r in report.refused if "stay in the model's dtype" in r.reason} == tier
    assert not tier & {s.site for s in report.rewritten}
    assert converted(pipe) == {}
    handle.restore()


@pytest.mark.parametrize("pattern", ["*.to_out.0", "*.norm1.linear", "*.ff.net.2", "*.w2", "*.proj_out"])
def test_a_rewrite_with_few_layers_is_counted_where_it_ran(pattern: str) -> None:
    kind = Z_IMAGE if "w2" in pattern else FLUX
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe, Plan(base="fp8", precision={"default": "model", "sites": {pattern: "fp8"}}))
    assert converted(pipe)
    kind.call(pipe)
    report = handle.report()
    lossy = {s.site: s.fused for s in report.rewritten if s.exactness == "lossy" and "rounding" not in s.site}
    assert set(lossy) <= {"flux.fp8", "flux.fp8_modulation", "z_image.fp8"}
    assert len(lossy) == 1
    assert all(lossy.values())


def test_layers_that_share_a_weight_stay_as_they_are() -> None:
    pipe = FLUX.pipe()
    attn = pipe.transformer.transformer_blocks[0].attn
    attn.to_v.weight = attn.to_k.weight
    stock = FLUX.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    assert type(attn.to_k) is type(attn.to_v) is torch.nn.Linear
    assert any("shares its weight with another module" in note for note in handle.report().notes)
    assert relative(FLUX.call(pipe), stock) < 0.06
    handle.restore()
    assert attn.to_v.weight is attn.to_k.weight
    assert torch.equal(FLUX.call(pipe), stock)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_gpus_without_such_products_are_refused_with_what_runs_instead(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8-01."""
    reason = device_refusal(capability)
    assert reason is not None
    assert reason.startswith(f"compute capability {capability[0]}.{capability[1]} has no products in e4m3")
    assert reason.endswith("the weights stay in the model's dtype and the exact rewrites run")
    pipe = FLUX.pipe()
    exact = FLUX.call(pipe)
    monkeypatch.setattr("fusedit.float8.refusals.device_refusal", lambda _: device_refusal(capability))
    handle = fusedit.accelerate(pipe, Plan(base="fp8", rewrites={"flux.fp8_attention": True}))
    assert relative(FLUX.call(pipe), exact) < 2e-5
    report = handle.report()
    names = ("flux.fp8", "flux.fp8_attention", "flux.fp8_modulation", "flux.fp8_rounding")
    assert {r.site: r.reason for r in report.refused} == dict.fromkeys(names, reason)
    assert not any("fp8" in s.site for s in report.rewritten)
    assert all(s.fused for s in report.rewritten if s.site.startswith("flux."))
    assert converted(pipe) == {}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0), None])
def test_gpus_with_such_products(capability: tuple[int, int] | None) -> None:
    assert device_refusal(capability) is None


def test_weights_that_cannot_be_converted_where_they_are() -> None:
    pipe = FLUX.pipe()
    pipe.transformer.double()
    report = fusedit.accelerate(pipe, "fp8").report()
    assert "float64 weights are not converted" in {r.reason for r in report.refused}
    with torch.inference_mode():
        pipe = FLUX.pipe()
    report = fusedit.accelerate(pipe, "fp8").report()
    assert "weights loaded under inference_mode cannot be converted" in {r.reason for r in report.refused}


def test_layerwise_casting_is_refused_before_and_after() -> None:
    pipe = FLUX.pipe()
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(UnsupportedPipelineError, match="already quantised by 8-bit storage"):
        fusedit.accelerate(pipe, "fp8")
    pipe = FLUX.pipe()
    fusedit.accelerate(pipe, "fp8")
    drawn = FLUX.call(pipe)
    with pytest.raises(fusedit.errors.UsageError, match="beside which layerwise casting saves nothing"):
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e5m2, compute_dtype=torch.float32)
    with pytest.raises(fusedit.errors.UsageError, match=r"cannot be moved to torch.float8_e5m2, as layerwise casting"):
        pipe.transformer.transformer_blocks.to(torch.float8_e5m2)
    assert torch.equal(FLUX.call(pipe), drawn)


def test_the_lists_name_the_tier() -> None:
    names = {rewrite["name"]: rewrite["tier"] for model in catalogue()["supported"] for rewrite in model["rewrites"]}
    assert names["flux.fp8"] == names["flux.fp8_modulation"] == names["z_image.fp8"] == "fp8"
    assert names["flux.gelu"] == "exact"
