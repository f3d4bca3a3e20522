"""Faults that users met elsewhere, tried on the whole FLUX pipeline; the names are those of the case list."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline
from support.pipes import flux_call, flux_guidance, flux_inputs, flux_pipe, relative

import fusedit

CLOSE = 2e-5


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def test_bat_05_pooled_vectors_stay_with_their_embeddings() -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    given = flux_inputs(pipe, batch=2)
    given["pooled_prompt_embeds"][0], given["pooled_prompt_embeds"][1] = 1.0, 2.0
    rows = [0, 0, 1, 1]  # prompt-major, as the pipeline repeats them for two images a prompt
    images = flux_call(pipe, **{name: value[rows] for name, value in given.items()}, generator=generators(4))
    for i, row in enumerate(rows):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        assert relative(images[i : i + 1], flux_call(pipe, **alone, generator=generators(4)[i])) < CLOSE


def test_bat_07_batch_one_two_three_and_one_again() -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    given = flux_inputs(pipe, batch=3)
    alone = [
        flux_call(pipe, **{k: v[i : i + 1] for k, v in given.items()}, generator=generators(3)[i]) for i in range(3)
    ]
    for count in (1, 2, 3, 1):
        batch = flux_call(pipe, **{k: v[:count] for k, v in given.items()}, generator=generators(count))
        for i in range(count):
            assert relative(batch[i : i + 1], alone[i]) < CLOSE


def test_bat_08_embeddings_with_several_images_give_that_many_distinct_ones() -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    images = flux_call(pipe, num_images_per_prompt=3, generator=generators(3))
    assert images.shape[0] == 3
    assert all(relative(images[i], images[j]) > 1e-2 for i in range(3) for j in range(i))


def test_cfg_04_negative_embeddings_alone_switch_guidance_on() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    arguments = flux_guidance(pipe)
    guided = flux_call(pipe, **arguments)
    assert relative(guided, flux_call(pipe)) > 1e-2
    with handle.paused():
        assert relative(guided, flux_call(pipe, **arguments)) < CLOSE


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
def test_pip_01_controlnet_pipeline() -> None:
    pipe = flux_pipe()
    config = pipe.transformer.config
    torch.manual_seed(3)
    controlnet = FluxControlNetModel(
        in_channels=config.in_channels,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        joint_attention_dim=config.joint_attention_dim,
        pooled_projection_dim=config.pooled_projection_dim,
        guidance_embeds=True,
        axes_dims_rope=config.axes_dims_rope,
    ).eval()
    for parameter in controlnet.parameters():  # its outputs start at zero, which would test nothing
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    control = FluxControlNetPipeline(**pipe.components, controlnet=controlnet)
    control.set_progress_bar_config(disable=True)
    handle = fusedit.accelerate(control)
    image = torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    arguments = {"control_image": image, "controlnet_conditioning_scale": 0.7}
    fused = flux_call(control, **arguments)
    assert next(site for site in handle.report().rewritten if site.site == "flux.attention").fused > 0
    with handle.paused():
        assert relative(fused, flux_call(control, **arguments)) < CLOSE
        off = flux_call(control, control_image=image, controlnet_conditioning_scale=0.0)
    assert relative(fused, off) > 1e-3


def peft_config(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=3, lora_alpha=6, init_lora_weights=False, target_modules=["to_q", "to_v", "proj_mlp"], **changes
    )


@pytest.mark.parametrize("use_dora", [False, True])
def test_lf_09_dora_is_right_too(use_dora: bool) -> None:
    pipe = flux_pipe()
    plain = flux_call(pipe)
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    torch.manual_seed(2)
    pipe.transformer.add_adapter(peft_config(use_dora=use_dora), "a")
    fused = flux_call(pipe)
    with handle.paused():
        stock = flux_call(pipe)
    assert relative(fused, stock) < CLOSE
    assert relative(fused, plain) > 1e-3


def test_ll_03_load_and_unload_cycles_leave_nothing() -> None:
    pipe = flux_pipe()
    plain = flux_call(pipe)
    fusedit.accelerate(pipe)

    def cycle() -> int:
        torch.manual_seed(2)
        pipe.transformer.add_adapter(peft_config(), "a")
        flux_call(pipe)
        pipe.transformer.delete_adapters("a")
        pipe.unload_lora_weights()
        assert relative(flux_call(pipe), plain) < CLOSE
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    cycle()
    second = cycle()
    assert [cycle() for _ in range(3)] == [second] * 3


def test_ll_06_deleting_an_adapter_under_leaf_offload() -> None:
    pipe = flux_pipe()
    plain = flux_call(pipe)
    fusedit.accelerate(pipe)
    torch.manual_seed(2)
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    pipe.transformer.add_adapter(peft_config(), "a")
    flux_call(pipe)
    pipe.transformer.delete_adapters("a")
    assert relative(flux_call(pipe), plain) < CLOSE


def test_cmp_07_adapters_can_be_managed_on_an_accelerated_pipeline() -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    before = list(pipe.transformer.state_dict())
    torch.manual_seed(2)
    pipe.transformer.add_adapter(peft_config(), "a")
    assert pipe.get_list_adapters() == {"transformer": ["a"]}
    pipe.set_adapters(["a"], [0.5])
    assert pipe.get_active_adapters() == ["a"]
    pipe.unload_lora_weights()
    assert list(pipe.transformer.state_dict()) == before


def test_lq_08_hooks_are_the_same_before_and_after_loading_an_adapter() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    hook = ModelHook()
    add_hook_to_module(pipe.transformer, hook)
    torch.manual_seed(2)
    pipe.transformer.add_adapter(peft_config(), "a")
    assert pipe.transformer._hf_hook is hook
    pipe.unload_lora_weights()
    assert pipe.transformer._hf_hook is hook


def test_an_exception_in_a_callback_leaves_the_next_run_bit_identical() -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    first = flux_call(pipe)

    def fail(_pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i == 1:
            raise RuntimeError("interrupted")
        return kwargs

    with pytest.raises(RuntimeError, match="interrupted"):
        flux_call(pipe, callback_on_step_end=fail)
    assert torch.equal(flux_call(pipe), first)
