from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.broken_rewrites import nan_from, scaled
from support.whole_pipes import SMALL

import fusedit
from fusedit.errors import ArgumentError, MissingExtraError, NonFiniteError, PlanError, UnsupportedPipelineError
from fusedit.quality import compare
from fusedit.quality.output import write_comparisons
from fusedit.quality.reference import fp32_twin, twin

pytestmark = pytest.mark.usefixtures("broken")  # accelerate() is a stub whose rewrites the tests choose


def strict_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False), parse_constant=pytest.fail)


def test_a_good_comparison(flux: Any) -> None:
    result = compare(flux, ["red fox", ""], seeds=[0, 7], guidance=2.0, **SMALL)
    assert result.verdict.passed
    assert result.verdict.reasons == ()
    assert [(pair.prompt, pair.seed) for pair in result.pairs] == [("red fox", 0), ("red fox", 7), ("", 0), ("", 7)]
    assert all(pair.psnr_db > 80 and pair.ssim > 0.99 for pair in result.pairs)
    assert result.speedup is not None
    assert result.speedup > 0
    assert result.noise.repeats
    assert result.noise.pairs == 3
    assert [site.site for site in result.rewritten] == ["stub.gentle", "stub.other"]
    assert all(site.fused > 0 for site in result.rewritten)
    assert result.guilt is None


def test_the_json_has_the_promised_shape(flux: Any, broken: Any) -> None:
    broken.effects = {"stub.same": scaled(1.0)}
    data = strict_json(compare(flux, ["red fox"], seeds=[3], **SMALL).to_dict())
    assert data["size"] == "48x32"
    assert data["device"] == "cpu"
    assert data["dtype"] == "fp32"
    assert data["steps"] == 2
    assert data["plan"]["base"] == "exact"
    for arm in ("stock", "fused"):
        assert data[arm]["step_ms"] > 0
        assert data[arm]["total_s"] > 0
        assert data[arm]["peak_bytes"] is None
    assert data["pairs"][0]["psnr_db"] == "inf"
    assert data["pairs"][0]["max_abs_diff"] == 0.0
    assert (data["pairs"][0]["prompt"], data["pairs"][0]["seed"]) == ("red fox", 3)
    assert data["rewritten"] == [
        {
            "site": "stub.same",
            "exactness": "reordered",
            "summary": "a stub",
            "fused": 4,
            "stock": 0,
            "reasons": {},
            "called": True,
        }
    ]
    assert data["refused"] == []
    assert data["verdict"]["passed"] is True
    assert data["verdict"]["reasons"] == []
    assert isinstance(data["speedup"], float)
    assert data["environment"]["versions"]["torch"]


def test_a_red_verdict_shows_no_speedup_and_names_the_rewrite(flux: Any, broken: Any, tmp_path: Path) -> None:
    # VFY-02
    broken.effects = {"stub.gentle": scaled(1 + 1e-6), "stub.wrong": scaled(1.1), "stub.other": scaled(1.0)}
    result = compare(flux, ["red fox", "cat"], seeds=[0], **SMALL)
    assert not result.verdict.passed
    assert "PSNR" in result.verdict.reasons[0]
    assert result.guilt is not None
    assert result.guilt.rewrites == ("stub.wrong",)
    assert result.speedup is None
    assert result.speedup_step is None
    data = strict_json(result.to_dict())
    assert data["speedup"] is None
    assert data["speedup_step"] is None
    assert data["guilt"]["rewrites"] == ["stub.wrong"]
    text = str(result)
    assert "FAILED" in text
    assert "stub.wrong" in text
    ratios = [line for line in text.splitlines() if "ratio" in line]
    assert len(ratios) == 2
    assert not any(character.isdigit() for line in ratios for character in line)
    write_comparisons(tmp_path, [result], data, "t")
    page = (tmp_path / "report.html").read_text()
    assert "stock time by fused time" not in page


def test_nan_names_the_step_and_the_rewrite_and_saves_no_picture(flux: Any, broken: Any, tmp_path: Path) -> None:
    # NAN-01, VFY-02
    broken.effects = {"stub.gentle": scaled(1 + 1e-6), "stub.nan": nan_from(1)}
    result = compare(flux, ["fox"], seeds=[0, 1], **SMALL)
    assert not result.verdict.passed
    failure = result.pairs[0].failures[0]
    assert (failure.arm, failure.stage, failure.step) == ("fused", "latents", 1)
    assert result.guilt is not None
    assert result.guilt.rewrites == ("stub.nan",)
    assert result.guilt.step == 1
    assert "step 2 of 2" in result.guilt.sentence
    assert result.pairs[0].psnr_db is None
    assert result.pairs[0].fused is None
    data = strict_json(result.to_dict())
    (tmp_path / "01-seed0-fused.png").write_bytes(b"of an earlier, better run")
    written = write_comparisons(tmp_path, [result], data, "t")
    assert any("stock" in path.name for path in written)
    assert not any("fused" in path.name for path in tmp_path.iterdir())
    assert "no picture" in (tmp_path / "report.html").read_text()


def test_nan_in_stock_too_blames_no_rewrite(flux: Any) -> None:
    pipe = copy.deepcopy(flux)
    pipe.transformer.register_forward_hook(lambda _m, _a, output: (output[0] * float("nan"),))
    result = compare(pipe, "fox", seeds=[0], **SMALL)
    assert not result.verdict.passed
    assert result.guilt is not None
    assert result.guilt.rewrites == ()
    assert result.guilt.sentence.startswith("stock shows it too")
    assert result.stock.step_ms is None
    strict_json(result.to_dict())


def test_a_bad_weight_is_an_error_that_names_it(flux: Any, broken: Any) -> None:
    pipe = copy.deepcopy(flux)
    pipe.transformer.proj_out.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"transformer\.proj_out\.weight"):
        compare(pipe, "fox", seeds=[0], **SMALL)
    assert not broken.made[-1].active


def test_inputs_are_not_changed(z_image: Any) -> None:
    # Stock ZImagePipeline writes the chat template into the caller's list.
    prompts, seeds = ["red fox", ""], [4, 2]
    scheduler = z_image.scheduler
    state = {key: id(value) for key, value in vars(scheduler).items()}
    compare(z_image, prompts, seeds=seeds, **SMALL)
    assert prompts == ["red fox", ""]
    assert seeds == [4, 2]
    assert z_image.scheduler is scheduler
    assert {key: id(value) for key, value in vars(scheduler).items()} == state
    assert "progress_bar" not in vars(z_image)


def test_the_arms_alternate_and_everything_is_restored(flux: Any, broken: Any) -> None:
    order: list[str] = []
    pipe = copy.deepcopy(flux)
    pipe.transformer.register_forward_hook(lambda *_: order.append("stock" if broken.made[-1].resting else "fused"))
    compare(pipe, "fox", seeds=[0, 1], width=32, height=32, steps=1)
    warm_up = ["stock", "stock", "fused"]
    assert order == [*warm_up, "stock", "fused", "fused", "stock"]
    assert all(not handle.active for handle in broken.made)


def test_a_rewrite_that_never_runs_is_a_warning(flux: Any, broken: Any) -> None:
    # ATT-03
    result = compare(flux, "fox", plan=fusedit.Plan(rewrites={"stub.other": False}), seeds=[0], **SMALL)
    assert [refusal.site for refusal in result.refused] == ["stub.other"]
    assert not any("warning" in note for note in result.notes)
    broken.effects = {}
    result = compare(flux, "fox", seeds=[0], **SMALL)
    assert any("compares stock with stock" in note for note in result.notes)


def test_the_yardstick(flux: Any) -> None:
    import torch

    pipe = copy.deepcopy(flux).to(torch.bfloat16)
    result = compare(pipe, ["red fox", "cat"], seeds=[0, 1], reference="fp32", **SMALL)
    assert result.dtype == "bf16"
    for pair in result.pairs:
        assert 25 < pair.stock_fp32_db < 120
        assert abs(pair.fused_fp32_db - pair.stock_fp32_db) < 20
    assert "against stock fp32" in str(result.verdict.checks)
    assert pipe.transformer.dtype == torch.bfloat16
    assert strict_json(result.to_dict())["pairs"][0]["stock_fp32_db"] == result.pairs[0].stock_fp32_db


def test_the_yardstick_of_an_fp32_pipeline_is_stock_itself(flux: Any) -> None:
    result = compare(flux, "fox", seeds=[0], reference="fp32", **SMALL)
    assert result.verdict.passed
    assert any("already" in note for note in result.notes)


def test_an_offloaded_pipeline_has_no_fp32_twin(flux: Any) -> None:
    from accelerate import cpu_offload

    pipe = copy.deepcopy(flux)
    cpu_offload(pipe.transformer, execution_device="cpu")
    with pytest.raises(ArgumentError, match=r"transformer.*offload"):
        fp32_twin(pipe)


def test_a_twin_shares_components_but_not_state(flux: Any) -> None:
    other = twin(flux)
    assert other.transformer is flux.transformer
    assert other.scheduler is not flux.scheduler
    assert other.image_processor is not flux.image_processor
    assert type(other) is type(flux)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompts": []}, ArgumentError),
        ({"seeds": [-1]}, ArgumentError),
        ({"seeds": 3}, ArgumentError),
        ({"width": 40}, ArgumentError),
        ({"steps": 0}, ArgumentError),
        ({"guidance": float("nan")}, ArgumentError),
        ({"reference": "fp64"}, ArgumentError),
        ({"gate_on": "mean"}, ArgumentError),
        ({"min_psnr": -1}, ArgumentError),
        ({"plan": "warp"}, PlanError),
    ],
)
def test_bad_arguments_draw_nothing(flux: Any, bad: dict[str, Any], error: type[Exception]) -> None:
    drawn: list[int] = []
    hook = flux.transformer.register_forward_pre_hook(lambda *_: drawn.append(1))
    try:
        with pytest.raises(error):
            compare(flux, **({"prompts": "a", "seeds": [0], **SMALL} | bad))
    finally:
        hook.remove()
    assert drawn == []


def test_no_pipeline() -> None:
    with pytest.raises(UnsupportedPipelineError, match="not a object"):
        compare(object(), "a")  # type: ignore[arg-type]


def test_flip_asked_for_and_absent(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "flip_evaluator", None)
    with pytest.raises(MissingExtraError):
        compare(flux, "a", seeds=[0], flip=True, **SMALL)
    result = compare(flux, "a", seeds=[0], **SMALL)
    assert result.pairs[0].flip is None


def test_the_page_escapes_everything_and_stands_alone(flux: Any, tmp_path: Path) -> None:
    nasty = "</q><script>alert(\"x\")</script> & <b onclick='y'>"
    result = compare(flux, nasty, seeds=[0], **SMALL)
    paths = write_comparisons(tmp_path, [result], result.to_dict(), "<i>title</i>")
    page = paths[0].read_text()
    assert "<script" not in page
    assert "<b onclick" not in page
    assert "<i>title</i>" not in page
    assert "&lt;script&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("data:image/png;base64,") == 4
    assert "times 1" in page or "identical" in page


def test_pictures_carry_their_settings(flux: Any, tmp_path: Path) -> None:
    from fusedit.files import read_settings

    result = compare(flux, "red fox", seeds=[7], **SMALL)
    paths = write_comparisons(tmp_path, [result], result.to_dict(), "t")
    pngs = [path for path in paths if path.suffix == ".png"]
    assert {path.name for path in pngs} == {f"01-seed7-{kind}.png" for kind in ("stock", "fused", "difference", "flip")}
    for path in pngs:
        settings = read_settings(path)
        assert settings == json.loads(path.with_suffix(".json").read_text())
        assert (settings["prompt"], settings["seed"], settings["size"]) == ("red fox", 7, "48x32")
        assert settings["plan"]["base"] == "exact"
        assert settings["report"]["rewritten"][0]["fused"] > 0
    assert json.loads((tmp_path / "result.json").read_text())["verdict"]["passed"] is True


def test_the_table_names_both_arms(flux: Any) -> None:
    text = str(compare(flux, "fox", seeds=[0], **SMALL))
    for word in (
        "stock",
        "fused",
        "per step",
        "lowest PSNR",
        "lowest SSIM",
        "largest difference",
        "rewritten",
        "passed",
    ):
        assert word in text


def test_pixels_survive_into_the_result(flux: Any) -> None:
    pair = compare(flux, "fox", seeds=[0], **SMALL).pairs[0]
    assert pair.stock is not None
    assert pair.fused is not None
    assert np.abs(pair.stock - pair.fused).max() == pytest.approx(pair.max_abs_diff)
    assert math.isfinite(pair.psnr_db)
