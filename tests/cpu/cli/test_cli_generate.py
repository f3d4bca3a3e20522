from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.broken_rewrites import nan_from

from fusedit.files import read_settings

FAST = ("--size", "48x32", "--steps", "2")


def pixels(path: Any) -> Any:
    with Image.open(path) as image:
        return np.asarray(image)


def test_a_picture_says_how_it_was_made(shell: Any) -> None:
    result = shell("generate", "a red apple, 3d style", "--seed", "7", "-o", "apple.png", *FAST)
    assert result.exit_code == 0, result.output
    assert "apple.png" in result.stdout
    assert shell.files() == ["apple.json", "apple.png"]
    settings = read_settings("apple.png")
    assert settings == json.loads((shell.folder / "apple.json").read_text())
    assert settings["prompt"] == "a red apple, 3d style"
    assert (settings["seed"], settings["size"], settings["steps"], settings["guidance"]) == (7, "48x32", 2, 3.5)
    assert (settings["model"], settings["dtype"], settings["device"]) == ("tiny-flux", "fp32", "cpu")
    assert settings["plan"]["base"] == "exact"
    assert any(site["fused"] > 0 for site in settings["report"]["rewritten"])
    assert pixels("apple.png").shape == (32, 48, 3)


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-z-image"])
def test_each_of_several_pictures_can_be_drawn_alone(shell: Any, model: str) -> None:
    # BAT-10
    told = shell.json("generate", "red fox", "-m", model, "--seed", "7", "--count", "3", "-o", "fox.png", *FAST)
    assert [image["seed"] for image in told["images"]] == [7, 8, 9]
    together = [pixels(image["path"]) for image in told["images"]]
    assert not np.array_equal(together[0], together[1])
    for image, before in zip(told["images"], together, strict=True):
        settings = read_settings(image["path"])
        assert settings["seed"] == image["seed"]
        shell("generate", settings["prompt"], "-m", model, "--seed", str(settings["seed"]), "-o", "alone.png", *FAST)
        assert np.array_equal(pixels("alone.png"), before)
        # Each picture has counts of its own, not those of the pictures before it.
        counts = [
            sum(site["fused"] for site in read_settings(path)["report"]["rewritten"])
            for path in (image["path"], "alone.png")
        ]
        assert counts[0] == pytest.approx(counts[1], rel=0.2)


def test_a_plan_of_the_pictures_name_is_not_overwritten(shell: Any) -> None:
    plan = shell.folder / "apple.json"
    plan.write_text('{"schema": 1, "base": "exact", "rewrites": {}}')
    before = plan.read_bytes()
    result = shell("generate", "a", "--plan", "apple.json", "-o", "apple.png", *FAST)
    assert result.exit_code == 2
    assert "'apple.json' is there and is not from fusedit" in result.output
    assert (shell.files(), plan.read_bytes()) == (["apple.json"], before)
    for _ in range(2):  # its own are replaced
        assert shell("generate", "a", "--plan", "apple.json", "-o", "b.png", *FAST).exit_code == 0


def test_the_empty_prompt(shell: Any) -> None:
    # SRV-08
    assert shell("generate", "", "-o", "a.png", *FAST).exit_code == 0
    assert read_settings("a.png")["prompt"] == ""
    assert shell("generate").exit_code == 2


def test_guidance_zero_is_kept(shell: Any) -> None:
    shell("generate", "fox", "--guidance", "0", "-o", "a.png", *FAST)
    assert read_settings("a.png")["guidance"] == 0.0


def test_the_models_own_settings(shell: Any) -> None:
    told = shell.json("generate", "fox", "-m", "tiny-z-image", "--size", "32x32")
    assert (told["steps"], told["guidance"]) == (9, 0.0)
    assert shell.files() == ["fusedit.json", "fusedit.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "250x256"), ("240", "256", "width")),
        (("--size", "256"), ("WIDTHxHEIGHT",)),
        (("--size", "0x16"), ("0",)),
        (("--steps", "0"), ("steps",)),
        (("--steps", "-3"), ("steps",)),
        (("--count", "0"), ("count",)),
        (("--seed", "-1"), ("seed -1",)),
        (("--seed", str(2**63)), ("seed",)),
        (("--seed", str(2**63 - 1), "--count", "2"), ("seed",)),
        (("--guidance", "-2"), ("guidance",)),
        (("--guidance", "nan"), ("guidance",)),
        (("--dtype", "fp16"), ("bf16",)),
        (("--dtype", "int3"), ("int3",)),
        (("--device", "tpu"), ("tpu",)),
        (("--plan", "warp"), ("warp", "exact")),
        (("--model", "nope"), ("nope", "tiny-flux")),
        (("--model", "some/where"), ("some/where",)),
        (("--model", "."), ("model_index.json",)),
        (("--lora", "no.safetensors"), ("no.safetensors",)),
        (("--negative", "blue"), ("true CFG",)),
        (("--negative", "blue", "--true-cfg", "1"), ("true CFG", "above 1")),
        (("--negative", "blue \udcff", "--true-cfg", "2"), ("prompt", "character 6")),
        (("--true-cfg", "0"), ("true CFG scale 0", "negative prompt")),
        (("--true-cfg", "3"), ("true CFG scale 3", "negative prompt")),
        (("-o", "a.jpg"), (".png",)),
        (("-o", "taken/a.png"), ("taken",)),
        (("--text-tokens", "513"), ("512",)),
    ],
)
def test_wrong_use(shell: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    (shell.folder / "taken").write_text("a file in the way")
    message = shell.refused("generate", "fox", *arguments)
    assert all(word in message for word in words), message


def test_a_prompt_that_is_no_unicode_text(shell: Any) -> None:
    said = shell.refused("generate", "a \udcff", "--size", "64x64", "--steps", "1", "-o", "q.png")
    assert said.strip().endswith(
        "a prompt must be valid Unicode text; its character 3 is '\\udcff', half of a surrogate pair"
    )
    assert not (shell.folder / "q.png").exists()


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_folder_where_the_json_beside_the_picture_goes(shell: Any, count: str) -> None:
    (shell.folder / ("fox.json" if count == "1" else "fox-1.json")).mkdir()
    assert "is a folder" in shell.refused("generate", "fox", "-o", "fox.png", "--count", count)


def test_json_errors(shell: Any) -> None:
    told = shell.json("generate", "fox", "--steps", "0", code=2)
    assert told == {"error": {"type": "ArgumentError", "message": "steps is 0; give 1 to 1000"}}


def test_no_gpu(shell: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "no usable GPU" in shell.refused("generate", "fox", "--device", "cuda")


def test_a_bad_picture_is_no_success_and_no_file(shell: Any, broken: Any) -> None:
    # NAN-01
    broken.effects = {"stub.nan": nan_from(1)}
    result = shell("generate", "fox", "-o", "a.png", *FAST)
    assert result.exit_code == 1
    assert "after step 2 of 2" in result.stderr
    assert result.stderr.count("\n") == 1
    assert shell.files() == []


def test_weights_with_nan(shell: Any, models: Any) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(models["tiny-flux"], shell.folder / "bad")
    path = shell.folder / "bad" / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_in.weight"][0, 0, 0, 0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    assert "vae.decoder.conv_in.weight" in shell.refused("generate", "fox", "--model", "bad")


def test_a_directory_whose_weights_are_cut_off(shell: Any, models: Any) -> None:
    import shutil

    shutil.copytree(models["tiny-flux"], shell.folder / "cut")
    path = shell.folder / "cut" / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "'cut' cannot be loaded" in shell.refused("generate", "fox", "--model", "cut")


def test_a_defect_is_one_sentence_too(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit import generate

    monkeypatch.setattr(generate, "generate_files", lambda *_, **__: 1 / 0)
    result = shell("generate", "fox")
    assert result.exit_code == 3
    assert "unexpected ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr
