from __future__ import annotations

import math
from typing import Any

import pytest

from fusedit import validation
from fusedit.errors import ArgumentError


@pytest.mark.parametrize("height", range(16, 257, 4))
def test_size_check_agrees_with_the_pipeline(height: int, z_image: Any) -> None:
    # RES-03: the check and the pipeline take and refuse the same sizes, in both directions.
    for width in range(16, 257, 4):
        ours = theirs = True
        try:
            validation.check_size(width, height)
        except ArgumentError:
            ours = False
        multiple = z_image.vae_scale_factor * 2  # what ZImagePipeline.__call__ checks
        theirs = width % multiple == 0 and height % multiple == 0
        assert ours == theirs, (width, height)


@pytest.mark.parametrize(("width", "height"), [(40, 32), (32, 40), (32, 24)])
def test_the_pipeline_really_refuses_what_the_check_refuses(width: int, height: int, z_image: Any) -> None:
    with pytest.raises(ValueError, match="divisible by 16"):
        z_image(prompt="a", width=width, height=height, num_inference_steps=1, guidance_scale=0.0)
    with pytest.raises(ArgumentError):
        validation.check_size(width, height)


@pytest.mark.parametrize(
    ("text", "near"), [("250x256", ("240", "256")), ("256x1000", ("992", "1008")), ("8x16", ("16", "32"))]
)
def test_a_size_between_the_multiples_names_the_two_nearest(text: str, near: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError) as error:
        validation.parse_size(text)
    assert all(number in str(error.value) for number in near)


def test_width_comes_first() -> None:
    assert validation.parse_size("320x256") == validation.Size(width=320, height=256)
    assert str(validation.Size(320, 256)) == "320x256"


@pytest.mark.parametrize("text", ["", "256", "256x", "x256", "256x256x3", "-16x16", "16.0x16", "a x b", "0x16"])
def test_bad_size_text(text: str) -> None:
    with pytest.raises(ArgumentError):
        validation.parse_size(text)


def test_more_steps_than_levels_of_noise_are_refused() -> None:
    assert validation.check_steps(1000) == 1000
    with pytest.raises(ArgumentError, match="steps is 1001; give 1 to 1000"):
        validation.check_steps(1001)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None, math.nan])
def test_steps_and_counts_are_whole_and_positive(value: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.check_steps(value)
    with pytest.raises(ArgumentError):
        validation.check_count(value)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_good_seeds(seed: int) -> None:
    assert validation.check_seed(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "7", None, False])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.check_seed(seed)


@pytest.mark.parametrize("seeds", [7, "7", [], [1, 1], [1, -1], None])
def test_bad_seed_lists(seeds: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.check_seeds(seeds)


def test_zero_guidance_is_a_value() -> None:
    assert validation.check_guidance(0) == 0.0
    assert validation.check_guidance(0.0) == 0.0


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", None, True])
def test_bad_guidance(value: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.check_guidance(value)


def test_prompts_are_copied_and_the_empty_one_is_valid() -> None:
    given = ["", "a"]
    taken = validation.check_prompts(given)
    assert taken == ("", "a")
    given[0] = "changed"
    assert taken == ("", "a")
    assert validation.check_prompts("") == ("",)


@pytest.mark.parametrize("prompts", [[], None, 3, [None], ["a", 1], b"a", "\udcff", ["a", "\ud800"]])
def test_bad_prompts(prompts: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.check_prompts(prompts)


def test_dtype_names() -> None:
    import torch

    assert validation.dtype_name("bf16") == validation.dtype_name(torch.bfloat16) == "bfloat16"
    assert validation.dtype_name("fp32") == "float32"


@pytest.mark.parametrize("dtype", ["fp16", "half", "int8", "", None])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError):
        validation.dtype_name(dtype)


def test_fp16_is_refused_with_the_remedy() -> None:
    # NAN-01: these models overflow fp16 and stock then draws a black picture.
    with pytest.raises(ArgumentError, match="bf16"):
        validation.dtype_name("fp16")


@pytest.mark.parametrize(
    ("value", "check"), [(-1, "psnr"), (math.nan, "psnr"), ("x", "psnr"), (1.1, "ssim"), (math.nan, "ssim")]
)
def test_bad_thresholds(value: Any, check: str) -> None:
    with pytest.raises(ArgumentError):
        getattr(validation, f"check_{check}")(value)


def test_an_infinite_psnr_asks_for_identical_pictures() -> None:
    assert validation.check_psnr(math.inf) == math.inf
