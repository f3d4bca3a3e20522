"""The embedded LoRAs load with plain diffusers, fit their size budget, change the picture as named, and come off."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors import safe_open

from fusedit.assets import embedded_loras, embedded_models

STYLES = {"tiny-flux-blueprint": "tiny-flux", "tiny-z-image-risograph": "tiny-z-image"}
LAYERS = {"tiny-flux": 12 + 10 * 5, "tiny-z-image": 12 * 7}  # attention and feed-forward of every block
FILE_BYTES = 1_000_000
STEPS = 6


def draw(pipe: DiffusionPipeline) -> np.ndarray:
    """Return a picture of a house on white as floats [H, W, 3] in [0, 1]."""
    guidance = {} if hasattr(pipe, "text_encoder_2") else {"guidance_scale": 0.0}
    image = pipe(
        prompt="house, 3d style, white background",
        width=128,
        height=128,
        num_inference_steps=STEPS,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
        **guidance,
    ).images[0]
    return np.asarray(image)


@pytest.fixture(scope="module", params=sorted(STYLES))
def drawn(request: pytest.FixtureRequest) -> tuple[str, DiffusionPipeline, list[np.ndarray]]:
    """Name, pipeline with the LoRA still on, and the pictures without and with it."""
    name = request.param
    pipe = DiffusionPipeline.from_pretrained(embedded_models()[STYLES[name]])
    pipe.set_progress_bar_config(disable=True)
    pictures = [draw(pipe)]
    file = embedded_loras()[name]
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    return name, pipe, [*pictures, draw(pipe)]


def test_the_loras_are_found_by_folder() -> None:
    assert set(embedded_loras()) == set(STYLES)


def test_finding_them_imports_nothing_heavy() -> None:
    code = "import sys, fusedit.assets as a; a.embedded_loras(); print({'diffusers', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", sorted(STYLES))
def test_a_file_is_small_and_says_what_it_is(name: str) -> None:
    file = embedded_loras()[name]
    assert file.stat().st_size <= FILE_BYTES
    with safe_open(file, "pt") as opened:
        about, tensors = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert f"{about['model']}-{about['style']}" == name
    assert about["model"] == STYLES[name]
    assert about["licence"].startswith("Apache-2.0")
    assert int(about["steps"]) > 0
    assert len(tensors) == 2 * LAYERS[STYLES[name]]
    for key, tensor in tensors.items():
        assert key.startswith("transformer.")
        assert int(about["rank"]) in tensor.shape
        assert torch.isfinite(tensor).all()
        assert tensor.abs().max() > 0, key


def test_the_picture_takes_on_the_style(drawn: tuple[str, DiffusionPipeline, list[np.ndarray]]) -> None:
    name, _, (without, with_lora) = drawn
    paper = np.concatenate([with_lora[:4].reshape(-1, 3), with_lora[-4:].reshape(-1, 3)]).mean(axis=0)
    assert np.abs(with_lora - without).mean() > 0.05
    if name.endswith("blueprint"):
        assert paper[2] > paper[0] + 0.2
        assert with_lora.mean() < 0.6
    else:
        assert paper[0] > paper[2] + 0.02  # cream
        assert with_lora.mean() > 0.4


def test_every_layer_of_the_file_reaches_its_module(drawn: tuple[str, DiffusionPipeline, list[np.ndarray]]) -> None:
    name, pipe, _ = drawn
    wrapped = [module for module in pipe.transformer.modules() if hasattr(module, "lora_A")]
    assert len(wrapped) == LAYERS[STYLES[name]]


def test_the_picture_comes_back_when_the_lora_comes_off(
    drawn: tuple[str, DiffusionPipeline, list[np.ndarray]],
) -> None:
    _, pipe, (without, _) = drawn
    pipe.unload_lora_weights()
    assert np.array_equal(draw(pipe), without)
