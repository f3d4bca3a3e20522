from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.whole_pipes import SMALL

import fusedit
from fusedit import loading
from fusedit.defaults import defaults_for, model_name, request_for
from fusedit.drawing import draw
from fusedit.errors import ArgumentError, ModelNotFoundError, NonFiniteError, UnsupportedPipelineError


@pytest.fixture(scope="session")
def saved(flux: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "my-flux"
    flux.save_pretrained(folder)
    return folder


def test_a_directory_loads_and_draws_the_same(saved: Path, flux: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = fusedit.load(saved)
    assert type(pipe) is type(flux)
    assert pipe.transformer.dtype == torch.float32
    assert model_name(pipe) == "my-flux"
    request = request_for(flux, "fox", 1, **SMALL)
    assert np.abs(draw(pipe, request).pixels - draw(flux, request).pixels).max() < 1e-5
    assert capfd.readouterr() == ("", "")


def test_an_embedded_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "embedded_models", lambda: {"tiny-flux": saved})
    pipe = fusedit.load("tiny-flux/")
    assert model_name(pipe) == "tiny-flux"
    assert str(defaults_for(pipe).size) == "256x256"
    assert defaults_for(pipe).steps == 20


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "bfloat16"])
def test_dtype(saved: Path, dtype: Any) -> None:
    assert fusedit.load(saved, dtype=dtype).transformer.dtype == torch.bfloat16


def test_library_settings_come_back(saved: Path) -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    logs: tuple[Any, ...] = (diffusers_logging, transformers_logging)
    before = [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs]
    fusedit.load(saved)
    assert [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs] == before


@pytest.mark.parametrize("name", ["nope", "./nope", "/no/such/place", "", "  ", "a/b/c", Path("nope")])
def test_unknown_names(name: Any) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        fusedit.load(name)
    assert "\n" not in str(error.value)


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"nobody/nothing.*local cache") as error:
        fusedit.load("nobody/nothing")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None


def test_no_pipeline_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedPipelineError, match=r"model_index\.json"):
        fusedit.load(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UnsupportedPipelineError, match="cannot be loaded"):
        fusedit.load(tmp_path)
    (tmp_path / "model_index.json").write_text("not json")
    with pytest.raises(UnsupportedPipelineError, match="cannot be loaded"):
        fusedit.load(tmp_path)


def test_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedPipelineError, match="from_single_file"):
        fusedit.load(tmp_path / "model.safetensors")


def test_a_missing_part(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "vae")
    with pytest.raises(UnsupportedPipelineError, match="part"):
        fusedit.load(tmp_path / "part")


@pytest.mark.parametrize(
    "settings", [{"dtype": "fp16"}, {"dtype": torch.float16}, {"dtype": "x"}, {"device": "x"}, {"device": "mps"}]
)
def test_bad_settings(saved: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        fusedit.load(saved, **settings)


def test_nan_in_the_weights(saved: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(saved, tmp_path / "bad")
    path = tmp_path / "bad" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["proj_out.bias"][0] = float("inf")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"transformer\.proj_out\.bias") as error:
        fusedit.load(tmp_path / "bad")
    assert error.value.stage == "weights"


def test_a_distilled_flux_has_other_defaults() -> None:
    from support import whole_pipes

    from fusedit.defaults import guidance_note

    schnell = whole_pipes.flux_pipe(guidance_embeds=False)
    assert (defaults_for(schnell).steps, defaults_for(schnell).guidance) == (4, 0.0)
    assert "no effect" in (guidance_note(schnell, 3.5) or "")
    assert guidance_note(schnell, None) is None


def test_the_text_length_is_the_shortest_that_holds_the_prompt(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "embedded_models", lambda: {"tiny-flux": saved})
    pipe = fusedit.load("tiny-flux")
    lengths = [request_for(pipe, "cat " * words, 0).text_tokens for words in (0, 32, 33, 128, 129, 600)]
    assert lengths == [32, 32, 128, 128, 512, 512]
    assert request_for(pipe, "cat", 0, negative="cat " * 100).text_tokens == 128
    assert request_for(pipe, "cat", 0, text_tokens=77).text_tokens == 77


def test_other_pipelines_keep_their_own_text_length(flux: Any) -> None:
    assert request_for(flux, "cat", 0).text_tokens is None
