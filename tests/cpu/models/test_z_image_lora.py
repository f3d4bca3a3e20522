"""LoRA on an accelerated Z-Image pipeline: the effect must equal stock in every order and state."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.pipes import lora_state, relative, z_image_call, z_image_pipe

import fusedit

CLOSE = 2e-5


@pytest.mark.parametrize("first", ["lora", "accelerate"])
@pytest.mark.parametrize(
    "names",
    [(), ("layers.1.attention.to_q",), ("context_refiner", "cap_embedder"), ("adaLN", "embedder", "final_layer", "w1")],
    ids=str,
)
def test_lora_before_or_after_accelerate_equals_stock(first: str, names: tuple[str, ...]) -> None:
    reference = z_image_pipe()
    plain = z_image_call(reference)
    reference.load_lora_weights(lora_state(reference, names=names), adapter_name="a")
    stock = z_image_call(reference)
    assert relative(stock, plain) > 1e-3
    pipe = z_image_pipe()
    if first == "lora":
        pipe.load_lora_weights(lora_state(pipe, names=names), adapter_name="a")
    handle = fusedit.accelerate(pipe)
    if first == "accelerate":
        z_image_call(pipe)
        pipe.load_lora_weights(lora_state(pipe, names=names), adapter_name="a")
    assert relative(z_image_call(pipe), stock) < CLOSE
    assert any(site.fused > 0 for site in handle.report().rewritten)
    scaled = {"joint_attention_kwargs": {"scale": 0.3}}
    reference_scaled = z_image_call(reference, **scaled)
    assert relative(reference_scaled, stock) > 1e-4
    assert relative(z_image_call(pipe, **scaled), reference_scaled) < CLOSE
    assert relative(z_image_call(pipe), stock) < CLOSE  # the scale was taken back
    pipe.set_adapters(["a"], [0.0])
    assert relative(z_image_call(pipe), plain) < CLOSE
    pipe.unload_lora_weights()
    assert relative(z_image_call(pipe), plain) < CLOSE
    handle.restore()
    assert torch.equal(z_image_call(pipe), plain)


def test_add_adapter_on_the_transformer() -> None:
    from peft import LoraConfig

    pipe = z_image_pipe()
    handle = fusedit.accelerate(pipe)
    z_image_call(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "w2"], init_lora_weights=False), "a")
    fused = z_image_call(pipe)
    with handle.paused():
        assert relative(fused, z_image_call(pipe)) < CLOSE
    packed = next(site for site in handle.report().rewritten if site.site == "z_image.packed_qkv")
    assert packed.fused > 0
    assert packed.stock == 0, "the layers that LoRA wraps stay packed"
    pipe.transformer.disable_adapters()
    disabled = z_image_call(pipe)
    assert relative(disabled, fused) > 1e-3
    with handle.paused():
        assert relative(disabled, z_image_call(pipe)) < CLOSE


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_fused_lora_is_followed_and_two_adapters_add_up() -> None:
    reference, pipe = z_image_pipe(), z_image_pipe()
    handle = fusedit.accelerate(pipe)
    z_image_call(pipe)
    first, second = lora_state(pipe, rank=2), lora_state(pipe, rank=6, seed=1)
    for each in (reference, pipe):
        each.load_lora_weights(dict(first), adapter_name="a")
        each.load_lora_weights(dict(second), adapter_name="b")
        each.set_adapters(["a", "b"], [0.7, 0.4])
    assert relative(z_image_call(pipe), z_image_call(reference)) < CLOSE
    for step in ("fuse_lora", "unload_lora_weights"):
        for each in (reference, pipe):
            getattr(each, step)()
        assert relative(z_image_call(pipe), z_image_call(reference)) < CLOSE
    packed = next(site for site in handle.report().rewritten if site.site == "z_image.packed_ffn")
    assert packed.stock == 0, "the layers that LoRA wraps stay packed"


def test_lora_changed_within_a_run_takes_effect_at_once() -> None:
    reference, pipe = z_image_pipe(), z_image_pipe()
    fusedit.accelerate(pipe)

    def switch(each: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        each.set_adapters(["a"], [0.0 if i == 0 else 1.5])
        return kwargs

    results = []
    for each in (reference, pipe):
        each.load_lora_weights(lora_state(each), adapter_name="a")
        results.append(z_image_call(each, callback_on_step_end=switch, num_inference_steps=4))
    assert relative(results[1], results[0]) < CLOSE


def test_new_weights_by_assignment_are_followed() -> None:
    """LL-07: load_state_dict(assign=True) replaces the parameters themselves."""
    pipe, other = z_image_pipe(), z_image_pipe(seed=4)
    handle = fusedit.accelerate(pipe)
    z_image_call(pipe)
    state = {name: value.clone() for name, value in other.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(state, assign=True)
    assert relative(z_image_call(pipe), z_image_call(other)) < CLOSE
    assert any("packed" in note for note in handle.report().notes)


def test_loading_and_unloading_does_not_grow_memory() -> None:
    """LL-03: the number of live tensors is flat after the second cycle."""
    pipe = z_image_pipe()
    fusedit.accelerate(pipe)
    state = lora_state(pipe)
    counts = []
    for _ in range(5):
        pipe.load_lora_weights(dict(state), adapter_name="a")
        z_image_call(pipe, num_inference_steps=2)
        pipe.unload_lora_weights()
        z_image_call(pipe, num_inference_steps=2)
        gc.collect()
        counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[-1] == counts[1]
