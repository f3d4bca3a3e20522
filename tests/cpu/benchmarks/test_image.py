"""Whole pictures on tiny models: stages, prompts, rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel
from typer.testing import CliRunner

from benchmarks import encoders, image, plans
from benchmarks.__main__ import app
from benchmarks.plans import Laid, SideBySide
from benchmarks.workloads import Workload

SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "T5_XXL": {"vocab_size": 40, "d_model": 24, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "CLIP_L": {**SMALL, "hidden_size": 20, "projection_dim": 20},
    "QWEN3_4B": {**SMALL, "hidden_size": 20, "num_key_value_heads": 2, "head_dim": 8},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in CONFIGS.items():
        monkeypatch.setattr(encoders, name, {**getattr(encoders, name), **config})
    monkeypatch.setattr(plans, "compile_in_place", lambda _transformer, _plan: None)


@pytest.mark.usefixtures("tiny")
def test_rows_of_every_plan(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["image", "--size", "64x48", "--pictures", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["model"], row["plan"]) for row in rows] == [
        (model, plan) for model in ("flux.1-dev", "z-image-turbo") for plan in ("stock", "compile", "exact")
    ]
    for row in rows:
        assert "error" not in row, row
        assert row["steps"] == {"flux.1-dev": 28, "z-image-turbo": 9}[row["model"]]
        assert row["pictures"] == 1
        stages = [row[f"{stage}_s"] for stage in ("text", "denoise", "vae")]
        assert all(seconds > 0 for seconds in stages)
        assert sum(stages) == pytest.approx(row["ms"] / 1e3, rel=0.5)
        assert stages[1] > stages[2]
        assert row["correct"] is (row["rel_error"] <= 1.05 * row["stock_rel_error"])
        assert "not the picture" in row["checked"]


@pytest.mark.usefixtures("tiny", "torchao")
def test_fp8_is_held_against_a_peer_that_draws_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    line = ["image", "--model", "z-image-turbo", "--plans", "stock,torchao-fp8-eager,fp8", "--size", "64x48"]
    result = CliRunner().invoke(app, [*line, "--pictures", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = {row["plan"]: row for row in json.loads(path.read_text())["rows"]}
    peer, ours = rows["torchao-fp8-eager"], rows["fp8"]
    assert not [row["error"] for row in rows.values() if "error" in row]
    assert (peer["ms"], ours["ms"] > 0) == (None, True)
    assert ours["peer_rel_error"] == peer["rel_error"]
    assert ours["correct"] is (ours["rel_error"] <= peer["rel_error"])


def test_no_plan_is_given_the_prompt_of_another_picture(workload: Workload) -> None:
    whole, prompt = encoders.with_text(workload)
    assert len({prompt(number) for number in range(5)}) == 5
    words = {"flux.1-dev": 60, "z-image-turbo": 198}[workload.name]
    assert {len(prompt(number).split()) for number in range(5)} == {words}
    tokens = whole.pipe.tokenizer(prompt(0)).input_ids
    assert len(tokens) == words
    assert whole.pipe.tokenizer.unk_token_id not in tokens


def test_what_stood_on_the_pipeline_comes_back(workload: Workload) -> None:
    whole, prompt = encoders.with_text(workload)
    calls: list[str] = []
    encode = whole.pipe.encode_prompt

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append("encode")
        return encode(*args, **kwargs)

    vars(whole.pipe)["encode_prompt"] = own
    with SideBySide(whole) as bench:
        laid = bench.lay("stock")
        arguments = {"prompt": prompt(0), "width": 64, "height": 48, "num_inference_steps": 2, "guidance_scale": 0.0}
        picture = image.draw(laid, arguments, 0)
    assert calls == ["encode"]
    assert len(picture.seconds) == len(image.STAGES)
    assert vars(whole.pipe)["encode_prompt"] is own
    assert "decode" not in vars(whole.pipe.vae)


@pytest.mark.usefixtures("tiny")
def test_a_plan_that_does_not_fit_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay = SideBySide.lay

    def full(self: SideBySide, plan: str) -> Laid:
        if plan == "exact":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lay(self, plan)

    monkeypatch.setattr(SideBySide, "lay", full)
    path = tmp_path / "rows.json"
    line = ["image", "--model", "z-image-turbo", "--size", "64x48", "--pictures", "1", "--json", str(path)]
    assert CliRunner().invoke(app, line).exit_code == 0
    rows = {row["plan"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["exact"]["error"] == "out of memory"
    assert rows["stock"]["ms"] > 0
    assert rows["compile"]["ms"] > 0


def test_encoders_are_of_the_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def billions(make: Any) -> float:
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters()) / 1e9

    assert billions(lambda: T5EncoderModel(T5Config(**encoders.T5_XXL))) == pytest.approx(4.762, abs=0.01)
    assert billions(lambda: CLIPTextModel(CLIPTextConfig(**encoders.CLIP_L))) == pytest.approx(0.1231, abs=0.001)
    assert billions(lambda: Qwen3Model(Qwen3Config(**encoders.QWEN3_4B))) == pytest.approx(4.022, abs=0.01)
