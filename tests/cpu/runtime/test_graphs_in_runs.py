"""Whole runs, every step captured by recordings in place of CUDA graphs: the bits of runs without, no stale one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pipes import lora_state, relative
from support.recorded import Recordings
from support.runs import FLUX, Kind, at_step, cache_of, each_kind, framed, picture, rows, with_control, with_image

import fusedit
from fusedit.models import _modulation as modulation
from fusedit.plan import Plan
from fusedit.report import CacheReport
from fusedit.runtime.graphs import CAPACITY

OFF = Plan(cache={"graphs": False})


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulation tables for tiny models too, as in real runs."""
    monkeypatch.setattr(modulation, "TOKENS_PER_ROW", 1)


def graphs_of(handle: fusedit.Handle) -> CacheReport:
    return cache_of(handle, "graphs")


class Twins:
    """Two equal pipelines: one replays its steps, one runs them eagerly."""

    def __init__(self, kind: Kind, make: Callable[[Any], Any] = lambda pipe: pipe) -> None:
        self.kind = kind
        self.pipe, self.eager = make(kind.pipe()), make(kind.pipe())
        self.handle, self.without = fusedit.accelerate(self.pipe), fusedit.accelerate(self.eager, OFF)

    def both(self, act: Callable[[Any], Any]) -> None:
        act(self.pipe)
        act(self.eager)

    def call(self, **changes: Any) -> torch.Tensor:
        """What both draw, bit for bit, with as many steps counted."""
        drawn = self.kind.call(self.pipe, **changes)
        assert torch.equal(drawn, self.kind.call(self.eager, **changes))
        ours, theirs = (handle.report().rewritten for handle in (self.handle, self.without))
        assert [(s.site, s.fused, s.reasons) for s in ours] == [(s.site, s.fused, s.reasons) for s in theirs]
        return drawn

    def replays(self) -> int:
        return graphs_of(self.handle).hits


def test_the_plan_switches_graphs_off(recordings: Recordings) -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, OFF)
    FLUX.call(pipe, num_inference_steps=5)
    assert recordings.log == []
    assert graphs_of(handle) == CacheReport("graphs", 0, 0, 0, 0, 0)


@each_kind
def test_replays_give_the_bits_and_the_counts_of_eager_steps(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    stock = kind.call(kind.pipe(), num_inference_steps=10)
    first = twins.call(num_inference_steps=10)
    assert relative(first, stock) < 2e-5
    assert recordings.log.count("captured") == 1
    assert twins.replays() >= 6
    before = twins.replays()
    assert torch.equal(twins.call(num_inference_steps=10), first)
    assert twins.replays() == before + 10
    report = rows(twins.handle)
    assert (report.hits, report.misses) == (18, 2), "the first step of each run makes its table"


@each_kind
def test_another_prompt_guidance_or_size_and_back(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    prompt = kind.prompt(twins.pipe)
    first = twins.call(**prompt, num_inference_steps=5)
    variants: list[dict[str, Any]] = [
        kind.prompt(twins.pipe, seed=5),
        kind.prompt(twins.pipe, (40,)),
        kind.prompt(twins.pipe, (7, 40)),
        {**prompt, **kind.negative(twins.pipe)},
        {
            **prompt,
            "guidance_scale": 0.0 if kind is FLUX else 0.5,
            **({} if kind is FLUX else kind.negative(twins.pipe)),
        },
        {**prompt, "width": 48, "height": 64},
        {**prompt, "width": 32, "height": 32},
    ]
    for variant in variants:
        twins.call(**variant, num_inference_steps=5)
        assert torch.equal(twins.call(**prompt, num_inference_steps=5), first)
    assert recordings.log.count("captured") >= 4
    assert graphs_of(twins.handle).entries <= CAPACITY


@each_kind
def test_both_conditionings_of_true_guidance_are_replayed(kind: Kind, recordings: Recordings) -> None:
    """FLUX's have one shape, so one graph serves both; text, pooled vectors and rotary tables are its inputs."""
    twins = Twins(kind)
    arguments = kind.negative(twins.pipe)
    twins.call(**arguments, num_inference_steps=6)
    before = twins.replays()
    twins.call(**arguments, num_inference_steps=6)
    assert twins.replays() == before + (12 if kind is FLUX else 6)
    assert recordings.log.count("captured") == 1


@each_kind
def test_latents_that_a_callback_keeps_never_change(kind: Kind, recordings: Recordings) -> None:
    """CG-01."""
    twins = Twins(kind)
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        kept.extend(output[0])
        copies.extend(item.clone() for item in output[0])

    twins.pipe.transformer.register_forward_hook(keep)
    for seed in range(3):
        twins.call(seed=seed, num_inference_steps=5)
    assert recordings.log.count("captured") == 1
    assert len(kept) == 15
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


LORA = ("to_q", "to_out", "x_embedder", "proj_mlp", "w2", "net.2", "all_x_embedder")


@each_kind
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_that_comes_and_goes_is_followed(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    a, b = (lora_state(twins.pipe, rank=rank, seed=rank, names=LORA) for rank in (4, 2))
    plain = twins.call(num_inference_steps=5)
    actions: list[tuple[bool, Callable[[Any], Any]]] = [
        (True, lambda pipe: pipe.load_lora_weights(dict(a), adapter_name="a")),
        (True, lambda pipe: pipe.set_adapters(["a"], [0.4])),
        (True, lambda pipe: pipe.load_lora_weights(dict(b), adapter_name="b")),
        (True, lambda pipe: pipe.set_adapters(["a", "b"], [0.4, 0.2])),
        (True, lambda pipe: pipe.set_adapters(["b"], [0.2])),
        (False, lambda pipe: pipe.transformer.disable_adapters()),
        (True, lambda pipe: pipe.transformer.enable_adapters()),
        (True, lambda pipe: pipe.fuse_lora()),
        (True, lambda pipe: pipe.unfuse_lora()),
        (True, lambda pipe: pipe.delete_adapters("a")),
        (False, lambda pipe: pipe.unload_lora_weights()),
    ]
    for differs, act in actions:
        twins.both(act)
        before = recordings.log.count("captured")
        for _ in range(2):
            drawn = twins.call(num_inference_steps=5)
            assert (relative(drawn, plain) > 1e-3) == differs
        assert recordings.log.count("captured") > before
    assert twins.replays() > 6 * len(actions)


@each_kind
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_changed_within_a_run_is_followed(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    state = lora_state(twins.pipe, names=LORA)
    actions: dict[int, Callable[[Any], Any]] = {
        4: lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="a"),
        9: lambda pipe: pipe.set_adapters(["a"], [0.4]),
        14: lambda pipe: pipe.set_adapters(["a"], [1.4]),
        19: lambda pipe: pipe.unload_lora_weights(),
    }

    def act(pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i in actions:
            actions[i](pipe)
        return kwargs

    twins.call(num_inference_steps=25, callback_on_step_end=act)
    assert recordings.log.count("captured") == 5


@each_kind
def test_a_lora_scale_of_one_call_is_followed(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    twins.both(lambda pipe: pipe.load_lora_weights(lora_state(pipe, names=LORA), adapter_name="a"))
    full = twins.call(num_inference_steps=5)
    for scale in (0.3, 0.6):
        half = twins.call(num_inference_steps=5, joint_attention_kwargs={"scale": scale})
        assert relative(half, full) > 1e-3
        assert torch.equal(twins.call(num_inference_steps=5), full)
    assert recordings.log.count("captured") == 5


def edited(pipe: Any) -> None:
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.mul_(0.9)


def loaded(pipe: Any) -> None:
    pipe.transformer.load_state_dict({k: v * 0.9 for k, v in pipe.transformer.state_dict().items()})


def assigned(pipe: Any) -> None:
    pipe.transformer.load_state_dict({k: v * 0.9 for k, v in pipe.transformer.state_dict().items()}, assign=True)


def through_bfloat16(pipe: Any) -> None:
    pipe.to(torch.bfloat16).to(torch.float32)


def one_layer_replaced(pipe: Any) -> None:
    blocks = pipe.transformer.transformer_blocks if hasattr(pipe.transformer, "transformer_blocks") else None
    owner = pipe.transformer.layers[1].attention if blocks is None else blocks[1].attn
    owner.to_k = torch.nn.Linear(owner.to_k.in_features, owner.to_k.out_features, owner.to_k.bias is not None)
    with torch.no_grad():
        owner.to_k.weight.fill_(0.01)
        if owner.to_k.bias is not None:
            owner.to_k.bias.zero_()


@each_kind
@pytest.mark.parametrize("change", [edited, loaded, assigned, through_bfloat16, one_layer_replaced])
@pytest.mark.parametrize("within", [False, True], ids=["between runs", "within a run"])
def test_other_weights_are_followed(
    kind: Kind, change: Callable[[Any], None], within: bool, recordings: Recordings
) -> None:
    twins = Twins(kind)
    steps = 10 if within else 5  # a graph comes with the fourth step of the same weights
    first = twins.call(num_inference_steps=steps)
    assert twins.replays() > 0
    if within:
        drawn = twins.call(num_inference_steps=steps, **at_step(4, lambda pipe, _: change(pipe)))
        after = twins.call(num_inference_steps=steps)
        assert relative(drawn, after) > 1e-5
    else:
        twins.both(change)
        drawn = twins.call(num_inference_steps=steps)
    assert relative(drawn, first) > 1e-5
    fresh = kind.pipe()
    change(fresh)
    assert relative(twins.call(num_inference_steps=5), kind.call(fresh, num_inference_steps=5)) < 2e-5
    assert recordings.log.count("captured") == (1 if change in (edited, loaded) else 2)


@each_kind
def test_a_prompt_edited_within_a_run_is_followed(kind: Kind, recordings: Recordings) -> None:
    def edit(_pipe: Any, kwargs: dict[str, Any]) -> None:
        for embeds in kwargs["prompt_embeds"]:
            embeds.mul_(torch.linspace(-1, 1, embeds.shape[-1]))

    def arguments(pipe: Any) -> dict[str, Any]:
        watched = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
        return {**kind.prompt(pipe), **at_step(5, edit), **watched, "num_inference_steps": 10}

    twins = Twins(kind)
    plain = twins.call(num_inference_steps=10)
    drawn, eager = (kind.call(pipe, **arguments(pipe)) for pipe in (twins.pipe, twins.eager))
    assert torch.equal(drawn, eager)
    assert relative(drawn, plain) > 1e-4
    assert recordings.log.count("captured") == 1


@each_kind
def test_many_sizes_keep_few_graphs(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    sizes = [(32, 32), (48, 32), (64, 32), (80, 32), (96, 32), (48, 48)]
    first = [twins.call(width=w, height=h, num_inference_steps=5) for w, h in sizes]
    assert graphs_of(twins.handle).entries == CAPACITY
    again = [twins.call(width=w, height=h, num_inference_steps=5) for w, h in sizes]
    assert graphs_of(twins.handle).entries == CAPACITY
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert recordings.log.count("captured") > len(sizes)


@each_kind
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no\nmore"), torch.OutOfMemoryError("CUDA out of memory")], ids=str)
def test_a_capture_that_fails_leaves_the_picture_alone(
    kind: Kind, error: Exception, broken: bool, recordings: Recordings
) -> None:
    recordings.failures, recordings.broken = [error], broken
    twins = Twins(kind)
    twins.call(num_inference_steps=6)
    twins.call(num_inference_steps=6)
    assert recordings.log.count("captured") == 1
    word = (
        "out of memory while capturing" if isinstance(error, torch.OutOfMemoryError) else "could not be captured (no)"
    )
    assert any(word in reason for reason in graphs_of(twins.handle).reasons)
    assert graphs_of(twins.handle).entries == 0


@each_kind
def test_an_exception_in_a_callback_leaves_the_next_run_right(kind: Kind, recordings: Recordings) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    twins = Twins(kind)
    first = twins.call(num_inference_steps=5)
    for step in range(4):
        for pipe in (twins.pipe, twins.eager):
            with pytest.raises(RuntimeError, match="interrupted"):
                kind.call(pipe, num_inference_steps=5, **at_step(step, fail))
        assert torch.equal(twins.call(num_inference_steps=5), first)
    assert recordings.log.count("captured") == 1


@each_kind
def test_pictures_in_inference_mode_and_outside_by_turns(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind)
    with torch.inference_mode():
        first = twins.call(num_inference_steps=5)
    assert relative(twins.call(num_inference_steps=5), first) < 2e-5  # what is kept for a run is computed otherwise
    with torch.inference_mode():
        assert torch.equal(twins.call(num_inference_steps=5), first)
    assert recordings.log.count("captured") >= 1


@each_kind
def test_offload_refuses_graphs_with_its_reason(kind: Kind, recordings: Recordings) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    twins = Twins(kind)
    twins.call(num_inference_steps=5)
    before = len(recordings.log)
    twins.both(lambda pipe: add_hook_to_module(pipe.transformer, ModelHook()))
    twins.call(num_inference_steps=5)
    assert recordings.log[before:] == ["eager"] * 5
    assert graphs_of(twins.handle).reasons["weights move between calls (offload)"] == 5
    twins.both(lambda pipe: remove_hook_from_module(pipe.transformer))
    replays = twins.replays()
    twins.call(num_inference_steps=5)
    assert twins.replays() > replays


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
@each_kind
def test_controlnet_residuals_are_inputs_of_the_graph(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind, with_control)
    drawn = [
        twins.call(control_image=image, controlnet_conditioning_scale=scale, num_inference_steps=5)
        for image, scale in ((picture(), 0.7), (1 - picture(), 0.7), (picture(), 0.2), (picture(), 0.7))
    ]
    assert recordings.log.count("captured") == 1
    assert torch.equal(drawn[3], drawn[0])
    assert all(relative(drawn[i], drawn[0]) > 1e-4 for i in (1, 2))


@each_kind
def test_img2img_with_graphs(kind: Kind, recordings: Recordings) -> None:
    twins = Twins(kind, with_image)
    drawn = [
        twins.call(image=image, strength=0.5, num_inference_steps=12) for image in (picture(), 1 - picture(), picture())
    ]
    assert recordings.log.count("captured") == 1
    assert torch.equal(drawn[2], drawn[0])
    assert relative(drawn[1], drawn[0]) > 1e-4


@each_kind
def test_direct_calls_in_a_callers_loop_are_replayed(kind: Kind, recordings: Recordings) -> None:
    """Inputs of other strides and dtypes, results as tuple or object, and back."""
    twins = Twins(kind, framed)
    config = twins.pipe.transformer.config
    generator = torch.Generator().manual_seed(4)
    if kind is FLUX:
        prompt = kind.prompt(twins.pipe)
        arguments: dict[str, Any] = {
            "hidden_states": torch.randn(1, 12, config.in_channels, generator=generator),
            "encoder_hidden_states": prompt["prompt_embeds"],
            "pooled_projections": prompt["pooled_prompt_embeds"],
            "timestep": torch.tensor([0.4]),
            "img_ids": torch.zeros(12, 3),
            "txt_ids": torch.zeros(7, 3),
            "guidance": torch.tensor([3.5]),
        }
    else:
        image = torch.randn(4, 1, 8, 8, generator=generator)
        arguments = {"x": [image], "t": torch.tensor([0.4]), **{"cap_feats": kind.prompt(twins.pipe)["prompt_embeds"]}}
    first = "hidden_states" if kind is FLUX else "x"
    original = arguments[first]
    strided = torch.stack([original[0].mT.contiguous().mT])
    outs = []
    for value in (original, strided if kind is FLUX else [strided[0]], original):
        for _ in range(4):
            made = [
                pipe(lambda pipe=pipe, value=value: pipe.transformer(**{**arguments, first: value}).sample[0])
                for pipe in (twins.pipe, twins.eager)
            ]
            assert torch.equal(*made)
            outs.append(made[0])
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert twins.replays() >= 6
    assert recordings.log.count("captured") >= 1
