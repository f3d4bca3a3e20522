"""`fusedit quantize` and what is loaded from it: whole or not at all, the same pictures, never a full-size weight."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from support.fp8 import converted
from support.whole_pipes import SMALL

import fusedit
from fusedit.defaults import request_for
from fusedit.drawing import draw, initial_noise
from fusedit.errors import NonFiniteError, OutputError, PlanError, RestoreError, UnsupportedPipelineError
from fusedit.float8 import checkpoint, conversion
from fusedit.plan import Plan
from fusedit.quantize import quantize
from fusedit.request import Request

FILE = "diffusion_pytorch_model.safetensors"


def pixels(pipe: Any, noise: torch.Tensor | None = None) -> torch.Tensor:
    for p in pipe.transformer.parameters():  # a CPU's products round by how weights are aligned, and files align by 8
        if p.data_ptr() % 64:
            p.data = p.data.clone()
    return torch.from_numpy(draw(pipe, fox(pipe), noise=noise).pixels)


def fox(pipe: Any) -> Request:
    return request_for(pipe, "red fox", 3, **SMALL)


def copied(folders: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.quantised, tmp_path / "copy"))


def test_pictures_are_those_of_the_original_made_fp8(folders: Any) -> None:
    original, loaded = fusedit.load(folders.stock, dtype="fp32"), fusedit.load(folders.quantised, dtype="fp32")
    a, b = fusedit.accelerate(original, "fp8"), fusedit.accelerate(loaded, "fp8")
    assert converted(loaded).keys() == converted(original).keys()
    assert torch.equal(pixels(loaded), pixels(original))
    assert all(layer.original is None for layer in converted(loaded).values())
    assert any("restore() will raise: its weights were e4m3 when they were loaded" in n for n in b.report().notes)
    with pytest.raises(RestoreError, match="load the unquantised model for them"):
        b.restore()
    with pytest.raises(UnsupportedPipelineError, match="plan 'exact' wants the model's own; load the unquantised"):
        fusedit.accelerate(loaded, "exact")
    for plan in (
        Plan(base="fp8", precision={"sites": {"*": "model"}}),
        Plan(base="fp8", precision={"default": "model"}),
        Plan(base="fp8", rewrites={f"{'flux' if 'Flux' in type(loaded).__name__ else 'z_image'}.fp8": False}),
    ):
        with pytest.raises(UnsupportedPipelineError, match="the precision of transformer is that of its checkpoint"):
            fusedit.accelerate(loaded, plan)
    again = fusedit.accelerate(loaded, Plan(base="fp8", cache={"prompts": False}))
    assert again is not b
    assert torch.equal(pixels(loaded), pixels(original))
    a.restore()


def test_a_loaded_pipeline_draws_without_being_accelerated(folders: Any) -> None:
    """From given noise: on a CPU, torch 2.11 draws other numbers in bf16 than in fp32 of the same seed."""
    original, loaded = fusedit.load(folders.stock, dtype="fp32"), fusedit.load(folders.quantised, dtype="bf16")
    assert loaded.transformer.dtype is torch.bfloat16
    noise = initial_noise(original, fox(original))
    stock, drawn = pixels(original, noise), pixels(loaded, noise)
    assert torch.isfinite(drawn).all()
    assert (drawn - stock).abs().mean() < 0.05


def test_what_was_written(folders: Any) -> None:
    made = folders.made
    state = load_file(folders.quantised / "transformer" / FILE)
    stock = load_file(folders.stock / "transformer" / FILE)
    assert {key for key in state if not key.endswith("_scale")} == stock.keys()
    codes = [key for key, t in state.items() if t.dtype is torch.float8_e4m3fn]
    assert len(codes) == made.layers
    for key in codes:
        assert state[f"{key}_scale"].dtype is torch.float32
        values = state[key].float() * state[f"{key}_scale"][:, None]
        assert (values - stock[key]).norm() / stock[key].norm() < 0.05, key
    assert made.bytes_after < made.bytes_before
    config = json.loads((folders.quantised / "transformer" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fusedit"
    assert not list(folders.quantised.parent.glob(".*")), "something temporary was left"


def test_diffusers_alone_refuses_it_aloud(folders: Any) -> None:
    with pytest.raises(ValueError, match="Unknown quantization type, got fusedit"):
        DiffusionPipeline.from_pretrained(folders.quantised)


def test_no_full_size_weight_of_a_converted_layer_ever_exists(flux_folders: Any) -> None:
    """Every tensor that any torch function returns while loading is looked at."""
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = {tuple(layer.weight.shape) for layer in converted(fusedit.load(flux_folders.quantised)).values()}
    kept = {
        tuple(p.shape)
        for p in fusedit.load(flux_folders.quantised).transformer.parameters()
        if p.dtype is not torch.float8_e4m3fn
    }
    seen: list[tuple[Any, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not made.is_meta and made.itemsize > 1 and made.ndim == 2:
                seen.append(tuple(made.shape))
            return made

    precision = checkpoint.marked(flux_folders.quantised)
    assert precision is not None
    with Watch():
        module = checkpoint.load_transformer(flux_folders.quantised, precision, torch.bfloat16, torch.device("cpu"))
    assert seen, "nothing was watched"
    assert not (set(seen) & shapes) - kept
    assert not any(p.is_meta for p in module.parameters())


FAULTS: dict[str, tuple[Callable[[dict[str, Any], str], Any], str]] = {
    "missing": (lambda s, _: s.pop("proj_out.weight"), r"Missing key\(s\) in state_dict: .proj_out.weight."),
    "without scale": (lambda s, k: s.pop(f"{k}_scale"), "is e4m3 without .*_scale; its values are not known"),
    "extra": (lambda s, _: s.update(more=torch.ones(1)), r"Unexpected key\(s\) in state_dict: .more."),
    "shape": (lambda s, k: s.update({k: s[k][:-1].contiguous()}), "size mismatch|shape"),
    "values": (lambda s, k: s.update({k: s[k].float()}), "is torch.float32, not torch.float8_e4m3fn"),
    "bf16": (lambda s, k: s.update({k: s[k].bfloat16()}), "is torch.bfloat16, not torch.float8_e4m3fn"),
    "e5m2": (lambda s, k: s.update({k: s[k].to(torch.float8_e5m2)}), "is torch.float8_e5m2, not torch.float8_e4m3fn"),
    "half a scale": (
        lambda s, k: s.update({f"{k}_scale": s[f"{k}_scale"].half()}),
        "is torch.float16, not torch.float32",
    ),
    "codes": (
        lambda s, _: s.update({"proj_out.weight": s["proj_out.weight"].to(torch.float8_e4m3fn)}),
        "proj_out.weight is torch.float8_e4m3fn, which its config omits",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_what_the_config_says(fault: str, flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    state = load_file(folder / "transformer" / FILE)
    change, message = FAULTS[fault]
    change(state, next(key for key, t in state.items() if t.dtype is torch.float8_e4m3fn))
    (folder / "transformer" / FILE).unlink()
    save_file(state, folder / "transformer" / FILE)
    with pytest.raises(
        UnsupportedPipelineError, match=rf"(?s)cannot be loaded: .*({message}).*; quantise the model again$"
    ):
        fusedit.load(folder, dtype="fp32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_stand_for_nothing(value: float, flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    state = load_file(folder / "transformer" / FILE)
    key = next(key for key in state if key.endswith("weight_scale"))
    state[key] = state[key].clone().fill_(value)
    (folder / "transformer" / FILE).unlink()
    save_file(state, folder / "transformer" / FILE)
    kind: type[Exception] = UnsupportedPipelineError if abs(value) < 2 else NonFiniteError
    with pytest.raises(kind, match=f"{key} holds ({value:g}, where scales are positive|NaN or infinity)"):
        fusedit.load(folder, dtype="fp32")


@pytest.mark.parametrize("fault", ["gone", "truncated", "empty"])
def test_a_file_that_cannot_be_read(fault: str, flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    file = folder / "transformer" / FILE
    data = file.read_bytes()
    file.unlink()
    if fault != "gone":
        file.write_bytes(data[: len(data) // 2] if fault == "truncated" else b"")
    word = "is missing" if fault == "gone" else "is damaged"
    with pytest.raises(UnsupportedPipelineError, match=rf"transformer' cannot be loaded: {FILE} {word}.*again$"):
        fusedit.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": 2},
            r"written by another version of fusedit \(schema 2, this one reads 1\); upgrade it",
        ),
        ({"precision": None}, r"precision in its quantization_config is None, not an object of paths .* again$"),
        (
            {"precision": ["proj_out"]},
            r"config.json of '.*transformer' is damaged: precision .* is \['proj_out'\], not",
        ),
        ({"precision": {"no.such": "fp8"}}, "cannot be loaded: .*no.*attribute `?no.*quantise the model again"),
        ({"precision": {"proj_out": "fp4"}}, "its config says 'fp4' of proj_out"),
        ({"precision": {"pos_embed": "fp8"}}, "its config says 'fp8' of pos_embed, which is a FluxPosEmbed"),
    ],
)
def test_a_config_of_another_version(change: dict[str, Any], message: str, flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    place = folder / "transformer" / "config.json"
    config = json.loads(place.read_text())
    config["quantization_config"] |= change
    place.write_text(json.dumps(config))
    with pytest.raises(UnsupportedPipelineError, match=message):
        fusedit.load(folder)


@pytest.mark.parametrize("mark", ["gone", None, [], {}, "fusedit"])
@pytest.mark.parametrize("shards", [1, 2])
def test_codes_that_the_config_does_not_mention(shards: int, mark: Any, flux_folders: Any, tmp_path: Path) -> None:
    """Read as values they would draw noise."""
    folder = copied(flux_folders, tmp_path)
    if shards > 1:
        shard(folder / "transformer")
    place = folder / "transformer" / "config.json"
    config = json.loads(place.read_text())
    config["quantization_config"] = mark
    if mark == "gone":
        del config["quantization_config"]
    place.write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedPipelineError, match=r"holds float8 weights with a scale .*has no quantization_config.* again$"
    ):
        fusedit.load(folder)


def shard(place: Path) -> None:
    """Split the one file of a component into two."""
    state = load_file(place / FILE)
    (place / FILE).unlink()
    keys = sorted(state)
    halves = {"a-00001-of-00002.safetensors": keys[::2], "a-00002-of-00002.safetensors": keys[1::2]}
    for name, half in halves.items():
        save_file({key: state[key] for key in half}, place / name)
    index = {"metadata": {}, "weight_map": {key: name for name, half in halves.items() for key in half}}
    (place / f"{FILE}.index.json").write_text(json.dumps(index))


def test_a_mark_without_its_layers(flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    place = folder / "transformer" / "config.json"
    config = json.loads(place.read_text())
    del config["quantization_config"]["precision"]
    place.write_text(json.dumps(config))
    with pytest.raises(UnsupportedPipelineError, match=r"precision in its quantization_config is missing, which gives"):
        fusedit.load(folder)


def test_sharded_files(flux_folders: Any, tmp_path: Path) -> None:
    folder = copied(flux_folders, tmp_path)
    shard(folder / "transformer")
    save_file({"stray": torch.ones(1)}, folder / "transformer" / "other.safetensors")
    whole, sharded = fusedit.load(flux_folders.quantised, dtype="fp32"), fusedit.load(folder, dtype="fp32")
    for key, t in whole.transformer.state_dict().items():
        assert torch.equal(sharded.transformer.state_dict()[key].view(torch.uint8), t.view(torch.uint8)), key
    (folder / "transformer" / "a-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedPipelineError, match=r"a-00002-of-00002.safetensors is missing; quantise"):
        fusedit.load(folder)
    (folder / "transformer" / f"{FILE}.index.json").write_text("{}")
    with pytest.raises(UnsupportedPipelineError, match=rf"{FILE}.index.json is damaged; quantise"):
        fusedit.load(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("boom")])
@pytest.mark.parametrize("where", ["convert", "save"])
def test_a_run_that_dies_leaves_nothing(
    where: str, error: BaseException, flux_folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "q"

    def dying(*_: Any, **__: Any) -> None:
        raise error

    if where == "convert":
        monkeypatch.setattr(conversion.Float8Linear, "convert", staticmethod(dying))
    else:
        from diffusers import AutoencoderKL

        monkeypatch.setattr(AutoencoderKL, "save_pretrained", dying)
    with pytest.raises((OutputError, type(error))) as caught:
        quantize(str(flux_folders.stock), out, dtype="fp32")
    if where == "save" and isinstance(error, OSError):
        assert str(caught.value) == f"cannot write {str(out)!r}: No space left on device; choose another place"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_quantised(flux_folders: Any, tmp_path: Path) -> None:
    stock, out = str(flux_folders.stock), tmp_path / "q"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="is there already; name a new folder"):
        quantize(stock, tmp_path / "full")
    with pytest.raises(PlanError, match="plan 'exact' quantises nothing; give fp8"):
        quantize(stock, out, "exact")
    with pytest.raises(PlanError, match=r"nothing of .* \(all of its linear layers stay .*\); give fp8"):
        quantize(stock, out, Plan(base="fp8", precision={"default": "model"}))
    with pytest.raises(PlanError, match="matches no linear layer"):
        quantize(stock, out, Plan(base="fp8", precision={"sites": {"nothing": "fp8"}}))
    with pytest.raises(UnsupportedPipelineError, match="is quantised already; give the model that it was made of"):
        quantize(str(flux_folders.quantised), out)
    assert not out.exists()
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_an_empty_folder_may_be_there_and_a_plan_is_kept(flux_folders: Any, tmp_path: Path) -> None:
    plan = Plan(base="fp8", precision={"sites": {"transformer_blocks.*": "model", "*.proj_mlp": "weights"}})
    (tmp_path / "q").mkdir()
    quantize(str(flux_folders.stock), tmp_path / "q", plan, dtype="fp32")
    loaded, original = fusedit.load(tmp_path / "q", dtype="fp32"), fusedit.load(flux_folders.stock, dtype="fp32")
    fusedit.accelerate(loaded, "fp8")
    fusedit.accelerate(original, plan)
    chosen = [{path: layer.activations for path, layer in converted(pipe).items()} for pipe in (loaded, original)]
    assert chosen[0] == chosen[1]
    assert chosen[0]["single_transformer_blocks.0.proj_mlp"] is False
    assert torch.equal(pixels(loaded), pixels(original))


@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_save_pretrained_of_an_accelerated_pipeline(originals: str, flux_folders: Any, tmp_path: Path) -> None:
    pipe: Any = fusedit.load(flux_folders.stock, dtype="fp32")
    handle = fusedit.accelerate(pipe, "fp8", originals=originals)
    drawn = pixels(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="got fusedit"):
        DiffusionPipeline.from_pretrained(tmp_path / "saved")
    loaded = fusedit.load(tmp_path / "saved", dtype="fp32")
    fusedit.accelerate(loaded, "fp8")
    assert torch.equal(pixels(loaded), drawn)
    if originals == "cpu":
        handle.restore()
        pipe.save_pretrained(tmp_path / "again")
        stock = DiffusionPipeline.from_pretrained(tmp_path / "again")
        for name, p in stock.transformer.named_parameters():
            assert torch.equal(p, pipe.transformer.get_parameter(name))


def test_state_dicts_go_round_and_stock_does_not_take_them(flux_folders: Any) -> None:
    a, b = (fusedit.load(flux_folders.stock, dtype="fp32") for _ in range(2))
    fusedit.accelerate(a, "fp8")
    fusedit.accelerate(b, "fp8")
    drawn = pixels(a)
    state = {key: t.clone() for key, t in a.transformer.state_dict().items()}
    with torch.no_grad():
        for layer in converted(b).values():
            layer.weight_scale.mul_(3)
    assert not torch.equal(pixels(b), drawn)
    assert b.transformer.load_state_dict(state, strict=True).missing_keys == []
    assert torch.equal(pixels(b), drawn)
    with pytest.raises(
        RuntimeError, match=r"proj_out.weight is torch.float32 beside single_.*weight_scale, so its codes"
    ):
        b.transformer.load_state_dict({key: t.float() for key, t in state.items()})
    assert torch.equal(pixels(b), drawn)
    stock = fusedit.load(flux_folders.stock, dtype="fp32")
    with pytest.raises(RuntimeError, match="weight_scale"):
        stock.transformer.load_state_dict(state)
