"""`--lora FILE[:SCALE]` of the commands that draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support import whole_pipes
from support.pipes import lora_state

from fusedit.errors import LoraError
from fusedit.files import read_settings
from fusedit.lora.option import LoraOption, lora_options

FAST = ("--size", "48x32", "--steps", "2")


def pixels(path: str) -> Any:
    return np.asarray(Image.open(path))


@pytest.fixture
def style(shell: Any) -> Path:
    """A LoRA for every layer of the tiny FLUX, in a file of this name."""
    file = Path(shell.folder) / "style.safetensors"
    save_file(lora_state(whole_pipes.flux_pipe(), scale=0.5), file)
    return file


def layers(file: Path) -> int:
    from fusedit.lora import read

    return len(read(file).layers)


def test_generate_loads_several_with_scales_and_says_so(shell: Any, style: Path) -> None:
    count = layers(style)
    shell("generate", "fox", "-o", "without.png", *FAST)
    result = shell("generate", "fox", "-o", "with.png", "--lora", "style.safetensors:0.5", "--lora", str(style), *FAST)
    assert result.exit_code == 0, result.output
    assert f"LoRA style at 0.5: matched {count} of {count} layers" in result.stdout
    assert f"LoRA style_2 at 1: matched {count} of {count} layers" in result.stdout
    assert not np.array_equal(pixels("without.png"), pixels("with.png"))
    kept = read_settings("with.png")["loras"]
    assert [(lora["name"], lora["state"], lora["file"]) for lora in kept] == [
        ("style", "at 0.5", "style.safetensors"),
        ("style_2", "at 1", str(style)),
    ]
    assert [(lora["matched"], lora["total"], lora["missing"]) for lora in kept] == [(count, count, [])] * 2
    assert read_settings("without.png")["loras"] == []


def test_generate_adds_up_scales_as_one_lora(shell: Any, style: Path) -> None:
    shell("generate", "fox", "-o", "two.png", "--lora", f"{style}:0.25", "--lora", f"{style}:0.5", *FAST)
    shell("generate", "fox", "-o", "one.png", "--lora", f"{style}:0.75", *FAST)
    difference = np.abs(pixels("one.png").astype(int) - pixels("two.png").astype(int))
    assert difference.max() <= 1


def test_a_partial_match_is_told_by_name(shell: Any) -> None:
    state = lora_state(whole_pipes.flux_pipe(), names=("proj_out",))
    state |= {f"transformer.transformer_blocks.7.attn.to_q.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
    save_file(state, Path(shell.folder) / "part.safetensors")
    result = shell("generate", "fox", "-o", "part.png", "--lora", "part.safetensors", *FAST)
    assert result.exit_code == 0, result.output
    total = len(state) // 2
    assert f"matched {total - 1} of {total} layers" in result.stdout
    assert "warning: LoRA part does not fit transformer_blocks.7.attn.to_q: " in result.stderr
    data = shell.json("generate", "fox", "-o", "part.png", "--lora", "part.safetensors", *FAST)
    assert [path for path, _ in data["loras"][0]["missing"]] == ["transformer_blocks.7.attn.to_q"]


def test_compare_draws_both_with_the_lora(shell: Any, style: Path) -> None:
    result = shell.json("compare", "--prompt", "fox", "--seed", "0", "--lora", f"{style}:0.5", "--out", "out", *FAST)
    assert result["verdict"]["passed"]
    assert result["loras"][0]["state"] == "at 0.5"
    assert result["loras"][0]["matched"] == layers(style)
    text = shell("compare", "--prompt", "fox", "--seed", "0", "--lora", f"{style}:0.5", *FAST)
    assert f"LoRA style at 0.5: matched {layers(style)} of {layers(style)} layers" in text.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no.safetensors", "'no.safetensors' does not exist"),
        ("no.safetensors:0.5", "'no.safetensors:0.5' does not exist"),
        ("", "'' does not exist"),
        (":1", "':1' does not exist"),
        ("style.safetensors:", "LoRA scale '' of"),
        ("style.safetensors:much", "LoRA scale 'much' of"),
        ("style.safetensors:nan", "LoRA scale 'nan' of"),
        ("style.safetensors:inf", "LoRA scale 'inf' of"),
        ("empty", "LoRA folder 'empty' holds 0 .safetensors files"),
    ],
)
@pytest.mark.usefixtures("style")
def test_what_cannot_be_read_is_refused_before_a_model_is_loaded(
    shell: Any, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    from fusedit import loading

    (Path(shell.folder) / "empty").mkdir()
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert words in shell.refused("generate", "fox", "-o", "a.png", "--lora", given, *FAST)
    assert words in shell.refused("compare", "--prompt", "fox", "--lora", given, *FAST)


def test_junk_and_a_lora_for_another_model_are_refused(shell: Any, style: Path) -> None:
    (Path(shell.folder) / "junk.safetensors").write_bytes(b"junk")
    assert "junk.safetensors" in shell.refused("generate", "fox", "-o", "a.png", "--lora", "junk.safetensors")
    assert "flux" in shell.refused("generate", "fox", "-o", "a.png", "--lora", str(style), "--model", "tiny-z-image")


def test_colons_in_names(tmp_path: Path) -> None:
    plain, odd = tmp_path / "a.safetensors", tmp_path / "a.safetensors:0.5"
    plain.touch()
    assert LoraOption.of(f"{plain}:-1.5") == LoraOption(f"{plain}:-1.5", plain, -1.5)
    odd.touch()
    assert LoraOption.of(str(odd)) == LoraOption(str(odd), odd, 1.0), "what exists as a whole has no scale behind it"
    assert LoraOption.of(f"{odd}:2").file == odd
    assert [option.scale for option in lora_options([str(tmp_path / "a.safetensors:0.5:3")])] == [3.0]
    assert lora_options(None) == ()


def test_a_folder_with_one_lora_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    assert LoraOption.of(f"{tmp_path}:0.5").file == tmp_path / "x.safetensors"
    (tmp_path / "y.safetensors").touch()
    with pytest.raises(LoraError, match=r"holds 2 \.safetensors files"):
        LoraOption.of(str(tmp_path))
