"""Calls of every kind in fp8: stock's forward where ours does not serve, batches, ControlNets, guidance, odd values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fp8 import converted
from support.pipes import flux_inputs, relative
from support.runs import FLUX, Kind, each_kind, fused, picture, reasons, with_control

import fusedit
from fusedit import ops
from fusedit.drawing import draw
from fusedit.errors import NonFiniteError
from fusedit.models import registry
from fusedit.plan import Plan


def near(a: torch.Tensor, b: torch.Tensor, limit: float = 0.05) -> bool:
    return bool(torch.isfinite(a).all()) and relative(a, b) < limit


LIMITS = {"flux": 0.01, "z_image": 0.06}
"""Relative L2 of three steps against stock: 0.0034 and 0.033 measured."""


@each_kind
def test_error_against_stock(kind: Kind) -> None:
    pipe = kind.pipe()
    stock = kind.call(pipe)
    fusedit.accelerate(pipe, "fp8")
    assert 0 < relative(kind.call(pipe), stock) < LIMITS[kind.name]


def hooked(pipe: Any) -> None:
    next(iter(converted(pipe).values())).register_forward_hook(lambda *_: None)


def other_processor(pipe: Any) -> None:
    block = getattr(pipe.transformer, "transformer_blocks", None) or pipe.transformer.layers
    attn = getattr(block[0], "attn", None) or block[0].attention
    attn.set_processor(type("Mine", (type(attn.processor),), {})())


@each_kind
@pytest.mark.parametrize("why", [hooked, other_processor])
def test_stock_runs_through_the_layers_and_is_counted(kind: Kind, why: Any) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    drawn = kind.call(pipe)
    why(pipe)
    count = fused(handle)
    assert near(kind.call(pipe), drawn)
    assert fused(handle) == count
    assert any("hook" in reason or "processor" in reason for reason in reasons(handle))


def test_gradients_flow_to_the_input_through_stock() -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    module = pipe.transformer.requires_grad_(False)
    x = torch.randn(1, 12, module.config.in_channels, requires_grad=True)
    given = {
        **{"hidden_states": x, "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5])},
        **{"img_ids": torch.zeros(12, 3), "txt_ids": torch.zeros(7, 3)},
        "encoder_hidden_states": flux_inputs(pipe)["prompt_embeds"],
        "pooled_projections": flux_inputs(pipe)["pooled_prompt_embeds"],
    }
    made = module(**given).sample
    made.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad.any()
    assert any("gradients are needed" in reason for reason in reasons(handle))
    with torch.no_grad():
        assert near(module(**given).sample, made.detach())


def test_arguments_for_other_processors_go_through_stock() -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    drawn, count = FLUX.call(pipe), fused(handle)
    assert near(FLUX.call(pipe, joint_attention_kwargs={"ip_adapter_masks": torch.ones(1)}), drawn)
    assert fused(handle) == count
    assert reasons(handle) >= {"joint_attention_kwargs has 'ip_adapter_masks'"}


@each_kind
def test_an_item_of_a_batch_equals_its_run_alone(kind: Kind) -> None:
    """Its rows' scales must not depend on its neighbours, be they longer, or a thousand times larger."""
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    noise = [torch.randn(1, *kind.call(pipe).shape[1:], generator=torch.Generator().manual_seed(i)) for i in range(2)]
    lengths = (7, 7) if kind is FLUX else (7, 40)
    prompts = kind.prompt(pipe, lengths)
    both = kind.call(pipe, **prompts, latents=torch.cat([noise[0], 100 * noise[1]]))
    first = {name: value[:1] for name, value in prompts.items()}
    alone = kind.call(pipe, **first, latents=noise[0])
    other = kind.call(pipe, **prompts, latents=torch.cat([noise[0], noise[1]]))
    # The same numbers in another shape of product round otherwise, and a code at the middle of two may be the next.
    assert relative(both[:1], alone) < 0.01
    assert relative(both[:1], other[:1]) < 1e-4


@each_kind
def test_true_guidance(kind: Kind) -> None:
    pipe = kind.pipe()
    arguments = kind.negative(pipe)
    stock = kind.call(pipe, **arguments)
    handle = fusedit.accelerate(pipe, "fp8")
    assert near(kind.call(pipe, **arguments), stock, 0.25)  # guidance multiplies what two predictions differ by
    assert reasons(handle) == set() or all(
        "table" in reason or "no run" in reason or "cannot draw from a prompt" in reason for reason in reasons(handle)
    )


def test_a_model_without_guidance() -> None:
    pipe = FLUX.pipe(guidance_embeds=False)
    stock = FLUX.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    assert near(FLUX.call(pipe), stock)
    assert fused(handle) > 0


@each_kind
@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
def test_residuals_of_a_controlnet(kind: Kind) -> None:
    pipe = with_control(kind.pipe())
    arguments = {"control_image": picture()}
    stock = kind.call(pipe, **arguments)
    plain = kind.call(kind.pipe())
    handle = fusedit.accelerate(pipe, "fp8")
    made = kind.call(pipe, **arguments)
    assert near(made, stock, 0.08)
    assert relative(stock, plain) > 0.1, "the ControlNet changes nothing: the test shows nothing"
    assert fused(handle) > 0


@each_kind
def test_every_rewrite_can_be_switched_off(kind: Kind) -> None:
    pipe = kind.pipe()
    stock = kind.call(pipe)
    fusedit.accelerate(pipe, "fp8")
    drawn = kind.call(pipe)
    names = [rewrite.name for rewrite in registry()[kind.name].rewrites if rewrite.tier == "exact"]
    for name in names:
        handle = fusedit.accelerate(pipe, Plan(base="fp8", rewrites={name: False}))
        made = kind.call(pipe)
        assert near(made, stock, LIMITS[kind.name]), name
        assert near(made, drawn, LIMITS[kind.name]), name
        assert name in {r.site for r in handle.report().refused if r.reason == "switched off by the plan"}
        assert name not in {s.site for s in handle.report().rewritten}
    fusedit.accelerate(pipe, Plan(base="fp8", rewrites=dict.fromkeys(names, False)))
    assert near(kind.call(pipe), stock, LIMITS[kind.name])


@each_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(kind: Kind, bad: float) -> None:
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    latents = torch.randn(1, *kind.call(pipe).shape[1:])
    latents.view(-1)[5] = bad
    assert not torch.isfinite(kind.call(pipe, latents=latents)).all()


def test_drawing_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.defaults import request_for

    pipe: Any = fusedit.load("tiny-z-image")
    fusedit.accelerate(pipe, "fp8")
    right = ops.scaled_linear.unchecked

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = right(*args, **kwargs)
        made.view(-1)[0] = torch.nan
        return made

    monkeypatch.setattr(ops.scaled_linear, "unchecked", poisoned)
    request = request_for(pipe, "a fox", 0, width=96, height=96, steps=2)
    with pytest.raises(NonFiniteError, match="the latents hold NaN or infinity after step 1 of 2"):
        draw(pipe, request)


def test_activations_a_million_times_larger_do_not_overflow() -> None:
    """Scales that are known before the product have to bound it, whatever comes in."""
    pipe = FLUX.pipe()
    with torch.no_grad():
        for block in pipe.transformer.transformer_blocks:
            block.ff.net[0].proj.weight.mul_(1e3)
            block.ff.net[0].proj.bias.mul_(1e3)
        for block in pipe.transformer.single_transformer_blocks:
            block.proj_mlp.weight.mul_(1e3)
            block.attn.to_v.weight.mul_(1e3)
    stock = FLUX.call(pipe)
    fusedit.accelerate(pipe, "fp8")
    assert near(FLUX.call(pipe), stock, 0.1)


@each_kind
def test_in_fp64_stock_runs_on_the_values_of_the_codes(kind: Kind) -> None:
    pipe, stock = kind.pipe(), kind.pipe().to(torch.float64)
    handle = fusedit.accelerate(pipe, "fp8")
    pipe.to(torch.float64)
    assert near(kind.call(pipe), kind.call(stock), LIMITS[kind.name])
    assert fused(handle) == 0
    assert any("float64" in reason for reason in reasons(handle))
