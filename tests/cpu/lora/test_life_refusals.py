"""What load_lora, set_loras and unload_lora refuse, in one sentence, with the pipeline bit for bit what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from support.loras import differing, mixed_state, pieces
from support.pipes import lora_state
from support.runs import FLUX, Z_IMAGE, Kind, each_kind

import fusedit
from fusedit.errors import DeviceMemoryError, LoraError, UnsupportedPipelineError
from fusedit.lora import adapters, making
from fusedit.lora.adapters import tuner_layers


def other_shape(pipe: Any) -> dict[str, torch.Tensor]:
    return {key: value[..., :3] if "lora_A" in key else value for key, value in lora_state(pipe).items()}


def with_nan(pipe: Any) -> dict[str, torch.Tensor]:
    state = lora_state(pipe)
    next(iter(state.values()))[0, 0] = float("nan")
    return state


def for_z_image(_: Any) -> dict[str, torch.Tensor]:
    return lora_state(Z_IMAGE.pipe())


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "no file": (lambda _: "nowhere.safetensors", {}, "nowhere"),
    "other shapes": (other_shape, {}, "nothing of the LoRA fits FluxTransformer2DModel"),
    "nan": (with_nan, {}, "lora_A"),
    "other family": (for_z_image, {}, "z-image"),
    "name taken": (lora_state, {"name": "there"}, "LoRA name 'there' is taken"),
    "name with a dot": (lora_state, {"name": "a.b"}, "LoRA name 'a.b' is not allowed"),
    "name of a method": (lora_state, {"name": "keys"}, "LoRA name 'keys' is not allowed"),
    "empty name": (lora_state, {"name": ""}, "LoRA name '' is not allowed"),
    "no number": (lora_state, {"scale": "1"}, "LoRA scale '1' is no finite number"),
    "nan scale": (lora_state, {"scale": float("nan")}, "LoRA scale nan is no finite number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_load_that_is_refused_changes_nothing(case: str) -> None:
    make, arguments, words = REFUSED[case]
    pipe = FLUX.pipe()
    given = make(pipe)
    fusedit.accelerate(pipe)
    fusedit.load_lora(pipe, lora_state(pipe, names=("to_q", "proj_out")), "there", 0.5)
    FLUX.call(pipe)
    before = pieces(pipe)
    with pytest.raises(LoraError) as caught:
        fusedit.load_lora(pipe, given, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert differing(pieces(pipe), before) == []
    assert pipe.get_active_adapters() == ["there"]


@each_kind
@pytest.mark.parametrize("place", ["making", "joining", "replacing", "registering", "activating"])
def test_a_failure_halfway_leaves_everything_as_it_was(kind: Kind, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = kind.pipe()
    state = lora_state(pipe)
    fusedit.accelerate(pipe)
    fusedit.load_lora(pipe, lora_state(pipe, names=("to_q",), seed=3), "there", 0.5)
    drawn, before = kind.call(pipe), pieces(pipe)
    states = [(layer._active_adapter, dict(layer.scaling)) for _, layer in tuner_layers(pipe.transformer)]
    after = {"making": 5, "joining": 2, "replacing": 5, "registering": 1, "activating": 1}[place]
    owner: Any
    owner, name = {
        "making": (making.Maker, "layer"),
        "joining": (adapters.Injection, "_join"),
        "replacing": (adapters.Injection, "_replace"),
        "registering": (adapters.Injection, "_register"),
        "activating": (adapters.Injection, "_activate"),
    }[place]
    stock, calls = getattr(owner, name), []

    def failing(*args: Any) -> Any:
        calls.append(name)
        result = stock(*args)
        if len(calls) == after:
            raise torch.OutOfMemoryError("out of memory")
        return result

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(DeviceMemoryError, match="no room for LoRA 'new'"):
        fusedit.load_lora(pipe, state, "new")
    monkeypatch.undo()
    assert differing(pieces(pipe), before) == []
    assert [(layer._active_adapter, dict(layer.scaling)) for _, layer in tuner_layers(pipe.transformer)] == states
    assert torch.equal(kind.call(pipe), drawn)
    fusedit.load_lora(pipe, state, "new")
    assert pipe.get_active_adapters() == ["there", "new"]


def test_names_that_are_not_loaded() -> None:
    pipe = FLUX.pipe()
    with pytest.raises(LoraError, match="has no LoRA 'a'; it has none"):
        fusedit.unload_lora(pipe, "a")
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    before = pieces(pipe)
    with pytest.raises(LoraError, match="has no LoRA 'b'; it has 'a'"):
        fusedit.set_loras(pipe, {"a": 0.5, "b": 1.0})
    with pytest.raises(LoraError, match="has no LoRA 'b'; it has 'a'"):
        fusedit.unload_lora(pipe, "b")
    with pytest.raises(LoraError, match="scale inf is no finite number"):
        fusedit.set_loras(pipe, {"a": float("inf")})
    wrong: Any
    for wrong, words in (
        ({"a": 10**400}, "scale a int is no finite number"),
        (["a"], r"takes names with scales, such as \{'style': 0.8\}, not \['a'\]"),
        (None, "not None"),
    ):
        with pytest.raises(LoraError, match=words):
            fusedit.set_loras(pipe, wrong)
    for wrong in (None, 5):
        with pytest.raises(LoraError, match=f"^{wrong} is neither a path nor tensors by key"):
            fusedit.load_lora(pipe, wrong)
    assert differing(pieces(pipe), before) == []
    assert {layer.scaling["a"] for _, layer in tuner_layers(pipe.transformer)} == {1.0}


def test_more_inputs_are_a_control_lora_at_the_embedder_alone() -> None:
    pipe = FLUX.pipe()
    state = lora_state(pipe, names=("attn.to_k", "attn.to_v"))
    name = "transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight"
    state[name] = torch.cat([state[name], state[name]], dim=1)
    report = fusedit.load_lora(pipe, state, "a")
    assert [path for path, _ in report.missing] == ["single_transformer_blocks.0.attn.to_k"]


def test_pipelines_that_take_no_lora() -> None:
    unet = UNet2DModel(4, block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
                       norm_num_groups=4)  # fmt: skip
    pipe = DDPMPipeline(unet, DDPMScheduler())
    for call in (
        lambda: fusedit.load_lora(pipe, lora_state(FLUX.pipe())),
        lambda: fusedit.set_loras(pipe, {}),
        lambda: fusedit.unload_lora(pipe, "a"),
        lambda: fusedit.load_lora(FLUX.pipe().transformer, lora_state(FLUX.pipe())),
    ):
        with pytest.raises(UnsupportedPipelineError, match="takes no LoRA here"):
            call()


def test_a_layer_of_another_kind_is_refused() -> None:
    from peft import LoKrConfig, inject_adapter_in_model

    pipe = FLUX.pipe()
    inject_adapter_in_model(LoKrConfig(r=2, target_modules=["proj_out"]), pipe.transformer, "kron")
    before = pieces(pipe)
    with pytest.raises(LoraError, match=r"\.proj_out: it is a Linear of peft already"):
        fusedit.load_lora(pipe, mixed_state(pipe, names=("proj_out",)).tensors, "a")
    assert differing(pieces(pipe), before) == []


def test_layers_that_are_away_under_sequential_offload_are_refused() -> None:
    pipe = FLUX.pipe()
    state = lora_state(pipe)
    pipe.transformer.to("meta")
    with pytest.raises(LoraError, match="its weights are not there"):
        fusedit.load_lora(pipe, state, "a")
    assert tuner_layers(pipe.transformer) == []
