"""LoRAs that change more than the transformer's weights: text encoders, a control LoRA's embedder, norms, biases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import FluxControlPipeline
from support import whole_pipes
from support.loras import differing, linear_layers, pieces
from support.pipes import flux_inputs, flux_pipe, lora_state, relative
from support.runs import FLUX, cache_of

import fusedit
from fusedit.errors import LoraError
from fusedit.lora.adapters import tuner_layers

CLOSE = 2e-5


def text_state(pipe: Any, part: str, rank: int = 2, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """A LoRA for the attention of a text encoder, in diffusers' layout."""
    generator = torch.Generator().manual_seed(5)
    state = {}
    for path, layer in linear_layers(getattr(pipe, part)).items():
        if "attn" in path or "SelfAttention" in path:
            for m, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
                state[f"{part}.{path}.lora_{m}.weight"] = torch.randn(*shape, generator=generator) * scale
    return state


def draw(pipe: Any) -> torch.Tensor:
    images: torch.Tensor = pipe(
        "a red fox",
        width=48,
        height=32,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    return images


# -- Text encoders -------------------------------------------------------------------------------------------------


def test_text_encoder_parts_are_applied_noticed_by_the_prompt_cache_and_taken_back() -> None:
    """LF-05."""
    reference, pipe = whole_pipes.flux_pipe(), whole_pipes.flux_pipe()
    state = lora_state(pipe, names=("to_q",)) | text_state(pipe, "text_encoder")
    plain, before = draw(pipe), pieces(pipe)
    handle = fusedit.accelerate(pipe)
    reference.load_lora_weights(dict(state), adapter_name="a")
    assert relative(draw(pipe), plain) < CLOSE
    assert relative(draw(pipe), plain) < CLOSE
    assert cache_of(handle, "prompts").hits == 1
    report = fusedit.load_lora(pipe, state, "a")
    assert report.parts == {"transformer": 2, "text_encoder": 4}
    assert (report.matched, report.total) == (6, 6)
    assert pipe.get_list_adapters() == {"transformer": ["a"], "text_encoder": ["a"]}
    assert relative(draw(reference), plain) > 1e-3
    for scale in (1.0, 0.3):
        fusedit.set_loras(pipe, {"a": scale})
        reference.set_adapters(["a"], [scale])
        assert relative(draw(pipe), draw(reference)) < CLOSE
    fusedit.set_loras(pipe, {})
    assert relative(draw(pipe), plain) < CLOSE
    fusedit.set_loras(pipe, {"a": 1.0})
    draw(pipe)
    fusedit.unload_lora(pipe, "a")
    assert relative(draw(pipe), plain) < CLOSE
    handle.restore()
    assert differing(pieces(pipe), before) == []


def test_a_text_encoder_lora_alone_changes_the_picture() -> None:
    pipe = whole_pipes.flux_pipe()
    plain = draw(pipe)
    fusedit.accelerate(pipe)
    draw(pipe)
    report = fusedit.load_lora(pipe, text_state(pipe, "text_encoder"), "a")
    assert report.parts == {"transformer": 0, "text_encoder": 4}
    assert relative(draw(pipe), plain) > 1e-3
    fusedit.unload_lora(pipe, "a")
    assert relative(draw(pipe), plain) < CLOSE


def test_text_encoder_parts_without_an_encoder_are_refused_or_left_out() -> None:
    whole, pipe = whole_pipes.flux_pipe(), FLUX.pipe()
    state = lora_state(pipe, names=("proj_out",)) | text_state(whole, "text_encoder")
    before = pieces(pipe)
    with pytest.raises(LoraError, match=r"4 layers of text_encoder, which this pipeline has not; text_encoders=False"):
        fusedit.load_lora(pipe, state, "a")
    assert differing(pieces(pipe), before) == []
    report = fusedit.load_lora(pipe, state, "a", text_encoders=False)
    assert report.matched == report.total == len(tuner_layers(pipe.transformer))
    assert report.notes[-1] == "left out as asked: 4 layers of text_encoder"


def test_text_encoder_parts_that_do_not_fit_are_refused_whole() -> None:
    pipe = whole_pipes.flux_pipe()
    state = lora_state(pipe, names=("proj_out",)) | text_state(pipe, "text_encoder")
    wrong = next(key for key in state if key.startswith("text_encoder") and "lora_B" in key)
    state[wrong] = torch.ones(3, 2)
    before = pieces(pipe)
    with pytest.raises(LoraError, match=r"does not fit text_encoder: .*3 of 4 layers fit.*text_encoders=False"):
        fusedit.load_lora(pipe, state, "a")
    assert differing(pieces(pipe), before) == []


# -- Control LoRAs -------------------------------------------------------------------------------------------------


def control_pipe(seed: int = 0) -> Any:
    parts = dict(flux_pipe(seed, in_channels=16).components)
    parts = {name: part for name, part in parts.items() if name not in ("image_encoder", "feature_extractor")}
    pipe = FluxControlPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def control_call(pipe: Any) -> torch.Tensor:
    images: torch.Tensor = pipe(
        control_image=torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(2)),
        width=64,
        height=48,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **flux_inputs(pipe),
    ).images
    return images


def control_state(pipe: Any) -> dict[str, torch.Tensor]:
    """In diffusers' layout, as its own loader takes it: a wide x_embedder, other layers, biases and norm scales."""
    state = lora_state(pipe, names=("x_embedder", "attn.to_q", "proj_out"))
    down = state["transformer.x_embedder.lora_A.weight"]
    state["transformer.x_embedder.lora_A.weight"] = torch.cat([down, down.flip(1)], 1)
    generator = torch.Generator().manual_seed(7)
    for key in [key for key in state if "lora_B" in key]:  # all of them, or stock leaves the others on meta
        state[key.replace("weight", "bias")] = torch.randn(len(state[key]), generator=generator)
    return state


def test_a_control_lora_widens_the_embedder_and_unloading_narrows_it_again() -> None:
    """LL-04."""
    reference, pipe = control_pipe(), control_pipe()
    before = pieces(pipe)
    state = control_state(pipe)
    inputs = pipe.transformer.x_embedder.in_features
    handle = fusedit.accelerate(pipe)
    reference.load_lora_weights(dict(state), adapter_name="c")
    report = fusedit.load_lora(pipe, state, "c")
    assert report.missing == ()
    assert pipe.transformer.config.in_channels == reference.transformer.config.in_channels == 2 * inputs
    assert relative(control_call(pipe), control_call(reference)) < CLOSE
    assert any(site.fused for site in handle.report().rewritten)
    fusedit.load_lora(pipe, state, "d")  # fits what is wide already
    with pytest.raises(LoraError, match="LoRA 'd' was made for the x_embedder that 'c' has widened"):
        fusedit.unload_lora(pipe, "c")
    fusedit.unload_lora(pipe, "d")
    assert relative(control_call(pipe), control_call(reference)) < CLOSE
    fusedit.unload_lora(pipe, "c")
    assert pipe.transformer.config.in_channels == inputs
    handle.restore()
    assert [key for key in differing(pieces(pipe), before) if "attributes" not in key] == []


@pytest.mark.parametrize("loader", ["ours", "diffusers"])
@pytest.mark.parametrize("first", ["lora", "fp8"])
def test_the_width_of_a_control_lora_stays_through_conversion_pause_and_restore(first: str, loader: str) -> None:
    """Pipelines read it from the config, where diffusers sets it as an attribute."""
    pipe = control_pipe()
    state, inputs = control_state(pipe), pipe.transformer.x_embedder.in_features

    def load() -> None:
        if loader == "ours":
            fusedit.load_lora(pipe, state, "c")
        else:
            pipe.load_lora_weights(dict(state), adapter_name="c")

    def width() -> int:
        control_call(pipe)
        return int(pipe.transformer.config.in_channels)

    if first == "lora":
        load()
    handle = fusedit.accelerate(pipe, "fp8")
    if first == "fp8":
        load()
    seen = [width()]
    with handle.paused():
        seen.append(width())
    seen.append(width())
    copied = copy.deepcopy(pipe.transformer)
    handle.restore()
    assert [*seen, width(), copied.config.in_channels] == [2 * inputs] * 5
    assert "quantization_config" not in vars(pipe.transformer.config)
    fusedit.unload_lora(pipe, "c")
    assert pipe.transformer.config.in_channels == inputs


def test_diffusers_control_lora_is_followed_and_unloaded_whole() -> None:
    pipe = control_pipe()
    values = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    fusedit.accelerate(pipe)
    reference = control_pipe()
    for each in (pipe, reference):
        each.load_lora_weights(control_state(each), adapter_name="c")
    assert relative(control_call(pipe), control_call(reference)) < CLOSE
    fusedit.unload_lora(pipe, "c")
    now = pipe.transformer.state_dict()
    assert now.keys() == values.keys()
    assert [name for name in now if not torch.equal(now[name], values[name])] == []
    assert type(pipe.transformer.x_embedder) is torch.nn.Linear


def test_a_control_lora_is_refused_where_no_control_image_is_taken() -> None:
    pipe = FLUX.pipe()
    before = pieces(pipe)
    with pytest.raises(LoraError, match=r"widens x_embedder from \d+ to \d+ inputs .* FluxControlPipeline"):
        fusedit.load_lora(pipe, control_state(pipe), "c")
    assert differing(pieces(pipe), before) == []


def test_a_failure_after_the_embedder_was_widened_narrows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.lora import adapters

    pipe = control_pipe()
    before = pieces(pipe)
    monkeypatch.setattr(adapters.Injection, "_register", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        fusedit.load_lora(pipe, control_state(pipe), "c")
    assert differing(pieces(pipe), before) == []
    assert pipe.transformer.config.in_channels == pipe.transformer.x_embedder.in_features


def test_norm_scales_are_replaced_and_come_back() -> None:
    reference, pipe = FLUX.pipe(), FLUX.pipe()
    path = "transformer_blocks.0.attn.norm_q.weight"
    scale = 1 + torch.rand(pipe.transformer.get_parameter(path).shape, generator=torch.Generator().manual_seed(1))
    state = lora_state(pipe, names=("proj_out",)) | {f"transformer.{path}": scale}
    before, plain = pieces(pipe), FLUX.call(pipe)
    fusedit.accelerate(pipe)
    reference.load_lora_weights(dict(state), adapter_name="a")
    report = fusedit.load_lora(pipe, state, "a")
    assert report.missing == ()
    assert torch.equal(pipe.transformer.get_parameter(path), scale)
    assert relative(FLUX.call(pipe), FLUX.call(reference)) < CLOSE
    fusedit.unload_lora(pipe, "a")
    assert relative(FLUX.call(pipe), plain) < CLOSE
    changed = [key for key in differing(pieces(pipe), before) if "attributes" not in key]
    assert changed == []
