"""The fused FLUX forward against stock on tiny configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.pipes import flux_call, flux_guidance, flux_inputs, flux_pipe, lora_state, relative

import fusedit
from fusedit.models._model import NO_RUN
from fusedit.models.flux import Flux
from fusedit.plan import Plan

CLOSE = 5e-6


def inputs(
    config: Any, batch: int = 1, text: int = 7, grid: tuple[int, int] = (3, 4), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    tokens = grid[0] * grid[1]
    ids = torch.zeros(tokens, 3)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // grid[1], torch.arange(tokens) % grid[1]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden_states": random(batch, tokens, config.in_channels),
        "encoder_hidden_states": random(batch, text, config.joint_attention_dim),
        "pooled_projections": random(batch, config.pooled_projection_dim),
        "timestep": torch.linspace(0.3, 0.7, batch).to(dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.linspace(1.0, 3.5, batch) if config.guidance_embeds else None,
    }


@torch.no_grad()
def both(pipe: Any, plan: Plan | str = "exact", **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused and stock output of the transformer for the same arguments; checks that neither changed its inputs."""
    kept = copy.deepcopy(arguments)
    stock = pipe.transformer(**arguments)[0]
    handle = fusedit.accelerate(pipe, plan)
    fused = pipe.transformer(**arguments)[0]
    report = handle.report()
    handle.restore()
    assert all(site.stock == 0 or set(site.reasons) == {NO_RUN} for site in report.rewritten), report
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, arguments[name]), f"{name} was changed"
    return fused, stock


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("guidance", [True, False])
def test_matches_stock_in_fp32(batch: int, guidance: bool) -> None:
    pipe = flux_pipe(guidance_embeds=guidance)
    fused, stock = both(pipe, **inputs(pipe.transformer.config, batch))
    assert relative(fused, stock) < CLOSE


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0},
        {"num_single_layers": 0},
        {"out_channels": 4},
        {"in_channels": 20, "out_channels": 8},
        {"attention_head_dim": 24, "axes_dims_rope": (4, 8, 12), "num_attention_heads": 3},
    ],
)
def test_other_configs_match_stock(changes: dict[str, Any]) -> None:
    pipe = flux_pipe(**changes)
    fused, stock = both(pipe, **inputs(pipe.transformer.config, 2, grid=(5, 3)))
    assert relative(fused, stock) < CLOSE


@pytest.mark.parametrize("batch", [1, 2])
def test_bf16_error_is_not_above_stock(batch: int) -> None:
    """Error against stock in fp32 on the same weights, over several seeds: ours within 5 % of stock's own."""
    ours, stocks = 0.0, 0.0
    for seed in range(4):
        pipe = flux_pipe(seed=seed).to(torch.bfloat16)
        arguments = inputs(pipe.transformer.config, batch, dtype=torch.bfloat16)
        fused, stock = both(pipe, **arguments)
        exact = pipe.to(torch.float32).transformer(
            **{k: v.float() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        )[0]
        assert fused.dtype == torch.bfloat16
        ours += relative(fused, exact)
        stocks += relative(stock, exact)
    assert ours <= 1.05 * stocks


def test_batch_item_equals_its_solo_run() -> None:
    pipe = flux_pipe()
    arguments = inputs(pipe.transformer.config, 3)
    fusedit.accelerate(pipe)
    with torch.no_grad():
        whole = pipe.transformer(**arguments)[0]
        for i in range(3):
            solo = pipe.transformer(
                **{k: v[i : i + 1] if k not in ("img_ids", "txt_ids") else v for k, v in arguments.items()}
            )[0]
            assert relative(whole[i : i + 1], solo) < CLOSE


@pytest.mark.parametrize("rewrite", [rewrite.name for rewrite in Flux.rewrites if rewrite.tier == "exact"])
def test_each_rewrite_can_be_switched_off(rewrite: str) -> None:
    pipe = flux_pipe()
    stock = flux_call(pipe)
    handle = fusedit.accelerate(pipe, Plan(rewrites={rewrite: False}))
    assert relative(flux_call(pipe), stock) < 2e-5
    report = handle.report()
    assert rewrite not in [site.site for site in report.rewritten]
    assert (rewrite, "switched off by the plan") in [(r.site, r.reason) for r in report.refused]
    assert all(site.fused > 0 for site in report.rewritten if site.site.startswith("flux."))


def test_all_rewrites_off_leaves_the_forward_alone() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe, Plan().without(*[rewrite.name for rewrite in Flux.rewrites]))
    assert "forward" not in pipe.transformer.__dict__
    handle.restore()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("repeat", [False, True])
def test_controlnet_residuals_follow_stocks_interval_rule(count: int, repeat: bool) -> None:
    """PIP-01: lists of one, of as many as blocks, and of numbers that do not divide."""
    pipe = flux_pipe(num_layers=4, num_single_layers=4)
    arguments = inputs(pipe.transformer.config, 2)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(2, 12, 32, generator=generator) for _ in range(count)]
    for extra in (
        {"controlnet_block_samples": samples, "controlnet_blocks_repeat": repeat},
        {"controlnet_single_block_samples": samples},
        {"controlnet_block_samples": samples, "controlnet_single_block_samples": samples[::-1]},
    ):
        fused, stock = both(pipe, **arguments, **extra)
        assert relative(fused, stock) < CLOSE


def test_return_dict_and_positional_arguments() -> None:
    pipe = flux_pipe()
    arguments = inputs(pipe.transformer.config)
    with torch.no_grad():
        stock = pipe.transformer(*arguments.values())
        fusedit.accelerate(pipe)
        fused = pipe.transformer(*arguments.values())
        as_tuple = pipe.transformer(**arguments, return_dict=False)
    assert type(fused) is type(stock)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == 1
    assert torch.equal(as_tuple[0], fused.sample)


def test_kontext_style_tokens_and_three_dimensional_ids() -> None:
    """PIP-02: twice the image tokens, the second half with another first id; the deprecated 3-d ids."""
    pipe = flux_pipe(in_channels=16, out_channels=8)
    arguments = inputs(pipe.transformer.config, 1, grid=(4, 4))
    arguments["img_ids"][8:, 0] = 1
    fused, stock = both(pipe, **arguments)
    assert relative(fused, stock) < CLOSE
    arguments["img_ids"], arguments["txt_ids"] = arguments["img_ids"][None], arguments["txt_ids"][None]
    fused, stock = both(pipe, **arguments)
    assert relative(fused, stock) < CLOSE


def test_text_padding_is_attended_as_in_stock() -> None:
    """BAT-06: pad rows are part of the result; they are neither trimmed nor masked."""
    pipe = flux_pipe()
    arguments = inputs(pipe.transformer.config, 1, text=32)
    arguments["encoder_hidden_states"][:, 8:] = 0.1
    padded, stock = both(pipe, **arguments)
    assert relative(padded, stock) < CLOSE
    short = {
        **arguments,
        "encoder_hidden_states": arguments["encoder_hidden_states"][:, :8],
        "txt_ids": torch.zeros(8, 3),
    }
    trimmed, _ = both(pipe, **short)
    assert relative(trimmed, padded) > 1e-3


def test_every_argument_that_matters_to_stock_matters_to_us() -> None:
    """PIP-04: changing an argument changes the output exactly when it does in stock."""
    pipe = flux_pipe()
    base = inputs(pipe.transformer.config)
    _, stock = both(pipe, **base)
    for name in ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "guidance"):
        changed_fused, changed_stock = both(pipe, **{**base, name: base[name] * 0.5 + 0.25})
        assert relative(changed_stock, stock) > 1e-6, name
        assert relative(changed_fused, changed_stock) < CLOSE, name


@pytest.mark.parametrize("extra", [{"ip_hidden_states": []}, {"something": 1}])
def test_other_joint_attention_kwargs_go_through_stock(extra: dict[str, Any]) -> None:
    pipe = flux_pipe()
    arguments = {**inputs(pipe.transformer.config), "joint_attention_kwargs": extra}
    with torch.no_grad():
        stock = pipe.transformer(**arguments)[0]
        handle = fusedit.accelerate(pipe)
        assert torch.equal(pipe.transformer(**arguments)[0], stock)
    assert all(site.fused == 0 for site in handle.report().rewritten)
    assert all(next(iter(extra)) in reason for site in handle.report().rewritten for reason in site.reasons)


def test_attention_backends_and_stock_fused_projections_go_through_stock() -> None:
    """ATT-02: what was asked for explicitly is not silently replaced."""
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    with attention_backend("_native_math"):
        flux_call(pipe)
    processor = pipe.transformer.transformer_blocks[1].attn.processor
    processor._attention_backend = AttentionBackendName._NATIVE_MATH
    flux_call(pipe)
    processor._attention_backend = None
    pipe.transformer.fuse_qkv_projections()
    flux_call(pipe)
    reasons = {reason for site in handle.report().rewritten for reason in site.reasons}
    assert any("_native_math was asked for" in reason for reason in reasons)
    assert any("_native_math is active" in reason for reason in reasons)
    assert any("fuse_qkv_projections" in reason for reason in reasons)
    assert all(site.fused == 0 for site in handle.report().rewritten)


def test_float16_goes_through_stock_which_clips() -> None:
    pipe = flux_pipe()
    pipe.transformer.to(torch.float16)
    arguments = inputs(pipe.transformer.config, dtype=torch.float16)
    with torch.no_grad():
        stock = pipe.transformer(**arguments)[0]
        handle = fusedit.accelerate(pipe)
        assert torch.equal(pipe.transformer(**arguments)[0], stock)
    assert any("float16" in reason for site in handle.report().rewritten for reason in site.reasons)


# Hoisting: what is computed once a run must never be stale.


def test_hoisted_values_are_computed_once_a_run() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    calls: list[int] = []
    pipe.transformer.context_embedder.register_forward_pre_hook(lambda *_: calls.append(1))
    flux_call(pipe)  # the hook sends it through stock, so count the other way: by the site's counter
    assert len(calls) == 3
    pipe.transformer.context_embedder._forward_pre_hooks.clear()
    flux_call(pipe, num_inference_steps=5)
    hoist = next(site for site in handle.report().rewritten if site.site == "flux.hoist")
    assert hoist.fused == 2 * 4  # rotary tables and text projection, in the four steps after the first


def test_stale_prompt_rope_or_weights_are_impossible() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    given = flux_inputs(pipe)

    def check(**changes: Any) -> torch.Tensor:
        fused = flux_call(pipe, **given, **changes)
        with handle.paused():
            assert relative(fused, flux_call(pipe, **given, **changes)) < 2e-5
        return fused

    first = check()
    given["prompt_embeds"].mul_(1.3)  # in place between runs
    assert relative(check(), first) > 1e-4
    check(width=48, height=64)  # same token count, other positions
    pipe.transformer.context_embedder.weight.data.mul_(1.2)  # no version counter sees this; a new run does
    assert relative(check(), first) > 1e-4

    def edit(_pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i == 0:
            kwargs["prompt_embeds"] = kwargs["prompt_embeds"].mul_(1.5)  # in place, within the run
        return kwargs

    arguments = {"callback_on_step_end": edit, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    given = flux_inputs(pipe, seed=8)
    fused = flux_call(pipe, **given, **arguments)
    given = flux_inputs(pipe, seed=8)
    with handle.paused():
        assert relative(fused, flux_call(pipe, **given, **arguments)) < 2e-5


def test_true_guidance_keeps_two_conditionings_hoisted() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    arguments = {**flux_guidance(pipe), "num_inference_steps": 4}
    fused = flux_call(pipe, **arguments)
    with handle.paused():
        assert relative(fused, flux_call(pipe, **arguments)) < 2e-5
    hoist = next(site for site in handle.report().rewritten if site.site == "flux.hoist")
    assert hoist.fused == 2 * 2 * 3


def test_inference_mode_tensors_are_not_cached() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    with torch.inference_mode():
        fused = flux_call(pipe)
    with handle.paused(), torch.inference_mode():
        assert relative(fused, flux_call(pipe)) < 2e-5
    hoist = next(site for site in handle.report().rewritten if site.site == "flux.hoist")
    assert hoist.stock > 0


# LoRA


@pytest.mark.parametrize("first", ["lora", "accelerate"])
@pytest.mark.parametrize("names", [(), ("attn.to_q",), ("proj_mlp", "x_embedder", "norm_out", "context_embedder")])
def test_lora_before_or_after_accelerate_equals_stock(first: str, names: tuple[str, ...]) -> None:
    reference = flux_pipe()
    plain = flux_call(reference)
    reference.load_lora_weights(lora_state(reference, names=names), adapter_name="a")
    stock = flux_call(reference)
    assert relative(stock, plain) > 1e-2
    pipe = flux_pipe()
    if first == "lora":
        pipe.load_lora_weights(lora_state(pipe, names=names), adapter_name="a")
    handle = fusedit.accelerate(pipe)
    if first == "accelerate":
        flux_call(pipe)
        pipe.load_lora_weights(lora_state(pipe, names=names), adapter_name="a")
    assert relative(flux_call(pipe), stock) < 2e-5
    assert any(site.fused > 0 for site in handle.report().rewritten)
    scaled = {"joint_attention_kwargs": {"scale": 0.3}}
    assert relative(flux_call(pipe, **scaled), flux_call(reference, **scaled)) < 2e-5
    pipe.set_adapters(["a"], [0.0])
    assert relative(flux_call(pipe), plain) < 2e-5
    pipe.unload_lora_weights()
    assert relative(flux_call(pipe), plain) < 2e-5
    handle.restore()
    assert torch.equal(flux_call(pipe), plain)


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_fused_lora_is_followed_and_two_adapters_add_up() -> None:
    reference, pipe = flux_pipe(), flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    first, second = lora_state(pipe, rank=2), lora_state(pipe, rank=6, seed=1)
    for each in (reference, pipe):
        each.load_lora_weights(dict(first), adapter_name="a")
        each.load_lora_weights(dict(second), adapter_name="b")
        each.set_adapters(["a", "b"], [0.7, 0.4])
    assert relative(flux_call(pipe), flux_call(reference)) < 2e-5
    for each in (reference, pipe):
        each.fuse_lora()
    assert relative(flux_call(pipe), flux_call(reference)) < 2e-5
    for each in (reference, pipe):
        each.unload_lora_weights()
    assert relative(flux_call(pipe), flux_call(reference)) < 2e-5
    packed = next(site for site in handle.report().rewritten if site.site == "flux.packed_qkv")
    assert packed.fused > 0
    assert packed.stock == 0, "layers under a LoRA stay packed"


def test_lora_changed_within_a_run_takes_effect_at_once() -> None:
    reference, pipe = flux_pipe(), flux_pipe()
    fusedit.accelerate(pipe)

    def switch(each: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        each.set_adapters(["a"], [0.0 if i == 0 else 1.5])
        return kwargs

    results = []
    for each in (reference, pipe):
        each.load_lora_weights(lora_state(each), adapter_name="a")
        results.append(flux_call(each, callback_on_step_end=switch, num_inference_steps=4))
    assert relative(results[1], results[0]) < 2e-5
