from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from fusedit.models._sum import Sum
from fusedit.models._vae import VaeModel
from fusedit.models.autoencoder_kl import AutoencoderKL

FAST = ("--size", "32x16", "--seconds", "0.01")
VARIANTS = {"nchw", "nhwc", "fused"}
DECODE = ["conv_in", "mid_block", "up_blocks.0", "up_blocks.1", "up_blocks.2", "up_blocks.3", "conv_out"]
ENCODE = ["conv_in", "down_blocks.0", "down_blocks.1", "down_blocks.2", "down_blocks.3", "mid_block", "conv_out"]
STAGES = {"decode": DECODE, "encode": ENCODE}
ENDS = {"decode": "picture to NCHW", "encode": "latents to NCHW"}


@pytest.fixture
def wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fused convolution and norm reads weights that are a thousandth too large."""
    right = VaeModel.weights

    def weights(self: VaeModel, layer: Any, x: torch.Tensor) -> Any:
        weight, bias = right(self, layer, x)
        return weight * 1.001, bias

    monkeypatch.setattr(VaeModel, "weights", weights)


def test_help_has_an_example_and_a_json_switch(shell: Any) -> None:
    result = shell("layout", "--help")
    assert result.exit_code == 0
    assert "Example: fusedit layout" in " ".join(result.stdout.split())
    assert "--json" in result.stdout


def test_the_table_has_every_stage(shell: Any) -> None:
    result = shell("layout", *FAST)
    assert result.exit_code == 0, result.output
    first, _, second = result.stdout.partition("encode, fp32 on cpu, 32x16, batch 1")
    for told, what in ((first, "decode"), (second, "encode")):
        assert all(stage in told for stage in [*STAGES[what], "input to NHWC", ENDS[what], "in one go"])
        assert "not measured on a CPU" in told
        assert "check passed" in told
        assert "accelerate() runs" in told
    assert shell.files() == []


def test_the_keys_and_sums_of_the_json(shell: Any) -> None:
    told = shell.json("layout", "-m", "tiny-z-image", "--batch", "2", *FAST)
    assert (told["model"], told["random_weights"], told["batch"]) == ("tiny-z-image", False, 2)
    assert (told["device"], told["dtype"], told["size"], told["passed"]) == ("cpu", "fp32", "32x16", True)
    assert told["environment"]["versions"]["torch"]
    assert [one["shape"] for one in told["passes"]] == [[2, 4, 2, 4], [2, 3, 16, 32]]
    for one in told["passes"]:
        stages = [part for part in one["parts"] if part["kind"] == "stage"]
        ends = [part for part in one["parts"] if part["kind"] == "conversion"]
        assert [part["name"] for part in stages] == STAGES[one["what"]]
        assert [part["name"] for part in ends] == ["input to NHWC", ENDS[one["what"]]]
        assert all(end["nchw"] is None and end["fastest"] is None for end in ends)
        for variant in VARIANTS:
            figures = [part[variant] for part in one["parts"] if part[variant] is not None]
            assert all(0 < figure["low_ms"] <= figure["ms"] <= figure["high_ms"] for figure in figures)
            assert one["sum_ms"][variant] == pytest.approx(sum(figure["ms"] for figure in figures))
            assert one["laps"][variant] >= 3
        for part in stages:
            assert part["fastest"] == min(VARIANTS, key=lambda variant: part[variant]["ms"])
        assert one["chosen"] == {"fastest": {p["name"]: p["fastest"] for p in stages}, "accelerate": "fused"}
        assert one["speedup"]["fused"] == pytest.approx(one["whole"]["nchw"]["ms"] / one["whole"]["fused"]["ms"])
        assert (one["conversions"], one["conversions_unmeasured"]) == (None, "not measured on a CPU")
        assert one["check"]["errors"]["nchw"] is None
        assert one["check"]["errors"]["fused"] < 1e-5
        assert one["check"]["errors"]["nhwc"] < 1e-5
        assert (one["check"]["limit"], one["check"]["passed"]) == (1e-4, True)
        assert set(one["layouts"]) == VARIANTS
        assert set(one["layouts"]["fused"]) == {"NHWC"}
        assert any("accelerate() runs" in sentence for sentence in one["sentences"])


def test_bf16_is_held_to_the_error_of_stock(shell: Any) -> None:
    """Which of them errs less on so few pixels depends on the CPU; the verdict must follow from the numbers."""
    result = shell("layout", "--dtype", "bf16", "--what", "decode", "--json", *FAST)
    (check,) = [one["check"] for one in json.loads(result.stdout)["passes"]]
    assert check["reference"] == "stock in NCHW and fp32"
    assert check["limit"] == pytest.approx(1.05 * check["errors"]["nchw"])
    assert 0 < check["errors"]["fused"] < 1.5 * check["errors"]["nchw"]
    assert check["passed"] == (check["errors"]["fused"] <= check["limit"])
    assert result.exit_code == (0 if check["passed"] else 1)


@pytest.mark.usefixtures("wrong_weights")
@pytest.mark.parametrize("what", ["decode", "encode"])
def test_a_red_check_exits_with_one_and_shows_no_speedup(shell: Any, what: str) -> None:
    told = shell.json("layout", "--what", what, *FAST, code=1)
    (one,) = told["passes"]
    assert told["passed"] is False
    assert one["check"]["passed"] is False
    assert one["check"]["errors"]["fused"] > 1e-4
    assert one["check"]["errors"]["nhwc"] < 1e-5
    assert (one["speedup"], one["chosen"]) == (None, None)
    assert all(part["fastest"] is None for part in one["parts"])
    result = shell("layout", "--what", what, *FAST)
    assert result.exit_code == 1
    assert "check FAILED" in result.stdout
    assert "no speeds are compared" in result.stdout
    assert not any(word in result.stdout for word in ("ratio", "as fast", "x the time", "accelerate()"))


def test_nan_is_red(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AutoencoderKL.last
    spoilt = lambda self, m, s: Sum(right(self, m, s).x * float("nan"))  # noqa: E731
    monkeypatch.setattr(AutoencoderKL, "last", spoilt)
    told = shell.json("layout", "--what", "decode", *FAST, code=1)
    assert told["passes"][0]["check"]["errors"]["fused"] == "nan"
    assert told["passes"][0]["speedup"] is None


def test_only_the_vae_is_needed(shell: Any, models: Any) -> None:
    shutil.copytree(models["tiny-flux"] / "vae", shell.folder / "mine" / "vae")
    shutil.copy(models["tiny-flux"] / "model_index.json", shell.folder / "mine")
    assert shell.json("layout", "-m", "mine", "--what", "encode", *FAST)["model"] == "mine"


def test_random_flux_says_that_its_weights_are_random(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit import vae_layout

    small = vae_layout.FLUX_1_DEV | {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4}
    monkeypatch.setattr(vae_layout, "FLUX_1_DEV", small)
    state = torch.get_rng_state()
    result = shell("layout", "-m", "random-flux", "--what", "decode", *FAST)
    assert result.exit_code == 0, result.output
    assert "FLUX.1-dev's AutoencoderKL with random weights" in " ".join(result.stdout.split())
    assert torch.equal(torch.get_rng_state(), state)
    assert shell.json("layout", "-m", "random-flux", "--what", "decode", *FAST)["random_weights"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "250x256"), ("240", "256", "width")),
        (("--size", "256"), ("WIDTHxHEIGHT",)),
        (("--size", "0x16"), ("0",)),
        (("--size", "100000x100000"), ("size 100000x100000 has a side of 100000", "at most 8192")),
        (("--size", "16x8208"), ("a side of 8208", "at most 8192")),
        (("--batch", "0"), ("batch is 0", "give 1 to 64")),
        (("--batch", "99999999999999999999"), ("batch is 99999999999999999999", "give 1 to 64")),
        (("--seconds", "0"), ("seconds is 0", "more than 0")),
        (("--seconds", "nan"), ("seconds is nan",)),
        (("--what", "train"), ("train", "decode, encode, both")),
        (("--dtype", "fp16"), ("bf16",)),
        (("--device", "tpu"), ("tpu",)),
        (("--model", "nope"), ("nope", "tiny-flux")),
        (("--model", "some/where"), ("some/where", "cache")),
        (("--model", "."), ("model_index.json",)),
        (("--model", "no-vae"), ("no-vae", "vae/config.json")),
        (("--model", "other"), ("AutoencoderKLQwenImage", "only AutoencoderKL")),
        (("--model", "broken"), ("the VAE of 'broken' cannot be loaded",)),
        (("--model", "unserved"), ("no fused decode", "AttnUpDecoderBlock2D")),
        (("--model", "nan"), ("vae.decoder.conv_in.weight", "NaN")),
    ],
    ids=lambda value: "-".join(value).strip("-")[:40],
)
def test_wrong_use(
    shell: Any, arguments: tuple[str, ...], words: tuple[str, ...], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment is read at its import
    _make(shell.folder, models["tiny-flux"])
    message = shell.refused("layout", *arguments)
    assert all(word in message for word in words), message


def _make(folder: Any, model: Any) -> None:
    """Directories that have a VAE which cannot be measured, or none."""
    from safetensors.torch import load_file, save_file
    from support.pipes import tiny_vae

    for name in ("no-vae", "other", "broken", "unserved", "nan"):
        (folder / name).mkdir()
        shutil.copy(model / "model_index.json", folder / name)
    for name in ("other", "broken", "nan"):
        shutil.copytree(model / "vae", folder / name / "vae")
    config = folder / "other" / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_class_name": "AutoencoderKLQwenImage"}))
    weights = folder / "broken" / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    kinds = ("AttnUpDecoderBlock2D", *("UpDecoderBlock2D",) * 3)
    tiny_vae(up_block_types=kinds).save_pretrained(folder / "unserved" / "vae")
    weights = folder / "nan" / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_in.weight"][0, 0, 0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})


def test_json_errors(shell: Any) -> None:
    told = shell.json("layout", "--batch", "-1", code=2)
    assert told == {"error": {"type": "ArgumentError", "message": "batch is -1; give 1 to 64"}}


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nsys.argv = ['fusedit', 'layout', '--help']\nfrom fusedit.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
