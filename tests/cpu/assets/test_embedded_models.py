"""The embedded models work with plain diffusers, fit their size budget and follow prompt, seed and size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, ZImagePipeline

from fusedit.assets import embedded_models

CLASSES = {"tiny-flux": FluxPipeline, "tiny-z-image": ZImagePipeline}
REPOSITORY_BYTES, SHARD_BYTES = 44_000_000, 15_000_000
STEPS = 4


@pytest.fixture(scope="module", params=sorted(CLASSES))
def pipe(request: pytest.FixtureRequest) -> DiffusionPipeline:
    """Load a model the way any diffusers user would."""
    loaded = DiffusionPipeline.from_pretrained(embedded_models()[request.param])
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipe: DiffusionPipeline, prompt: str, seed: int = 0, width: int = 128, height: int = 128) -> np.ndarray:
    """Return a picture as floats [H, W, 3] in [0, 1]."""
    guidance = {"guidance_scale": 0.0} if isinstance(pipe, ZImagePipeline) else {}
    image = pipe(
        prompt=prompt,
        width=width,
        height=height,
        num_inference_steps=STEPS,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **guidance,
    ).images[0]
    return np.asarray(image)


def test_the_models_are_found_by_folder() -> None:
    assert set(embedded_models()) == set(CLASSES)


def test_finding_them_imports_nothing_heavy() -> None:
    code = "import sys, fusedit.assets as a; a.embedded_models(); print('diffusers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_repository_stays_small() -> None:
    files = [f for folder in embedded_models().values() for f in Path(folder).rglob("*") if f.is_file()]
    assert max(f.stat().st_size for f in files) <= SHARD_BYTES
    assert sum(f.stat().st_size for f in files) <= REPOSITORY_BYTES


def test_every_part_is_the_real_class_in_one_dtype(pipe: DiffusionPipeline) -> None:
    assert type(pipe) in CLASSES.values()
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert {weight.dtype for module in modules for weight in module.parameters()} == {torch.float32}
    assert pipe.vae.config.mid_block_add_attention
    assert pipe.vae.config.norm_num_groups == 32


def test_prompt_and_seed_both_matter(pipe: DiffusionPipeline) -> None:
    apple = draw(pipe, "red apple, 3d style")
    assert apple.shape == (128, 128, 3)
    assert np.isfinite(apple).all()
    assert np.array_equal(apple, draw(pipe, "red apple, 3d style"))
    assert np.abs(apple - draw(pipe, "red apple, 3d style", seed=1)).mean() > 0.01
    assert np.abs(apple - draw(pipe, "blue book, flat style")).mean() > 0.03


def test_colours_follow_the_words(pipe: DiffusionPipeline) -> None:
    heart = draw(pipe, "red heart, 3d style, white background")
    red, green, blue = heart[heart.min(axis=-1) < 0.6].mean(axis=0)
    assert red > green + 0.2
    assert red > blue + 0.1
    corners = heart[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.mean() > 0.85


@pytest.mark.parametrize(("width", "height"), [(192, 128), (112, 144)])
def test_other_sizes_than_square(pipe: DiffusionPipeline, width: int, height: int) -> None:
    picture = draw(pipe, "green tree, flat style", width=width, height=height)
    assert picture.shape == (height, width, 3)
    assert picture.std() > 0.02


def test_an_empty_prompt_is_valid(pipe: DiffusionPipeline) -> None:
    assert np.isfinite(draw(pipe, "")).all()
