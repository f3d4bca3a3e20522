"""What layers read in small pictures: who is asked, that nothing else changes, and what it is good for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fp8 import converted
from support.pipes import relative
from torch import nn

import fusedit
from fusedit import calibration
from fusedit.calibration import calibrate
from fusedit.float8 import choice
from fusedit.float8.conversion import linear_layers
from fusedit.float8.linear import quantise_weight
from fusedit.models import registry
from fusedit.models._converted import precisions
from fusedit.plan import Plan
from fusedit.progress import Progress

CALL = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
NAMES = {"tiny-flux": "flux", "tiny-z-image": "z_image"}
NAN = "what they read in the pictures holds NaN or infinity"


@pytest.fixture(params=list(NAMES))
def pipe(request: pytest.FixtureRequest) -> Any:
    made: Any = fusedit.load(request.param, dtype="fp32", device="cpu")
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STEPS", 2)
    monkeypatch.setattr(calibration, "SIDE", 64)


def model_of(pipe: Any) -> Any:
    return registry()["flux" if "Flux" in type(pipe.transformer).__name__ else "z_image"]


def seen(pipe: Any, plan: Plan | None = None) -> calibration.Calibration:
    chosen = plan or Plan.of("fp8")
    wanted = precisions(pipe.transformer, model_of(pipe), chosen).wanted
    return calibrate(pipe, pipe.transformer, model_of(pipe), wanted, chosen)


def reasons(pipe: Any) -> list[str]:
    """Why layers get the nearest codes; no layer may be rounded for what it read."""
    choices = set(seen(pipe).choices.values())
    assert choice.READ not in choices
    return choice.why_nearest(choices)


def draw(pipe: Any, prompt: str = "a fox") -> torch.Tensor:
    made: torch.Tensor = pipe(prompt, generator=torch.Generator().manual_seed(5), **CALL).images
    return made


def codes_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {path: layer.weight.data.view(torch.uint8).clone() for path, layer in converted(pipe).items()}


def test_every_layer_is_looked_at_and_those_of_one_input_share_it(pipe: Any) -> None:
    found = seen(pipe)
    wanted = precisions(pipe.transformer, model_of(pipe), Plan.of("fp8")).wanted
    assert set(found.samples) == set(wanted)
    assert found.choices == dict.fromkeys(wanted, choice.READ)
    layers = dict(linear_layers(pipe.transformer))
    for path, rows in found.samples.items():
        assert rows.shape[1] == layers[path].in_features
        assert rows.device.type == "cpu"
        assert 0 < len(rows) <= len(calibration.PICTURES) * calibration.STEPS * calibration.ROWS
    for path in found.samples:
        if path.endswith("to_q"):
            assert found.samples[path] is found.samples[path.replace("to_q", "to_v")]


def test_rows_are_what_the_layer_reads() -> None:
    pipe: Any = fusedit.load("tiny-flux", dtype="fp32", device="cpu")
    read: list[torch.Tensor] = []
    layer = pipe.transformer.single_transformer_blocks[3].proj_out
    hook = layer.register_forward_pre_hook(lambda _, args: read.append(args[0].detach().clone()))
    rows = seen(pipe).samples["single_transformer_blocks.3.proj_out"]
    hook.remove()
    every = torch.cat([x.flatten(0, -2) for x in read])
    assert len(read) == len(calibration.PICTURES) * calibration.STEPS
    assert all(bool((every == row).all(1).any()) for row in rows[::37])


def test_nothing_else_changes(pipe: Any) -> None:
    before = draw(pipe)
    scheduler, own, state = dict(vars(pipe.scheduler)), dict(vars(pipe)), torch.get_rng_state()
    hooks = [dict(m._forward_pre_hooks) for m in pipe.transformer.modules()]
    weights = {name: p.clone() for name, p in pipe.transformer.named_parameters()}
    first, second = seen(pipe), seen(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    now = vars(pipe.scheduler)
    assert now.keys() == scheduler.keys()
    assert all(now[key] is value for key, value in scheduler.items())
    assert [dict(m._forward_pre_hooks) for m in pipe.transformer.modules()] == hooks
    assert all(torch.equal(p, weights[name]) for name, p in pipe.transformer.named_parameters())
    assert all(torch.equal(rows, second.samples[path]) for path, rows in first.samples.items())
    assert vars(pipe).keys() == own.keys()
    assert all(vars(pipe)[key] is value for key, value in own.items())
    assert "progress_bar" not in vars(pipe)
    assert torch.equal(draw(pipe), before)


def test_outputs_come_nearer_to_stock(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STEPS", 4)
    monkeypatch.setattr(calibration, "SIDE", 128)
    calls: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    size = {"width": 128, "height": 128, "num_inference_steps": 4, "output_type": "latent"}
    pipe("a guitar, flat style", generator=torch.Generator().manual_seed(5), **size)
    hook.remove()
    errors = []
    stock = outputs(pipe, calls)
    for on in (False, True):
        plan = Plan(base="fp8", rewrites={model_of(pipe).rounding: on})
        handle = fusedit.accelerate(pipe, plan)
        errors.append(relative(outputs(pipe, calls), stock))
        site = {s.site: s.fused for s in handle.report().rewritten}
        assert site.get(model_of(pipe).rounding, 0) == int(on)
        assert any("rounded for what they read" in note for note in handle.report().notes) == on
        handle.restore()
    assert errors[1] < 0.9 * errors[0], errors


def outputs(pipe: Any, calls: list[Any]) -> torch.Tensor:
    """The transformer's, of all these calls."""
    with torch.no_grad():
        made = [pipe.transformer(*args, **{**kwargs, "return_dict": False})[0] for args, kwargs in calls]
    return torch.cat([t.flatten() for one in made for t in (one if isinstance(one, list | tuple) else [one])])


def test_a_pause_keeps_the_codes_and_draws_nothing(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = fusedit.accelerate(pipe, "fp8")
    before, notes = codes_of(pipe), handle.report().notes
    monkeypatch.setattr(calibration, "_drawn", lambda *_: pytest.fail("it drew again"))
    with handle.paused():
        assert not converted(pipe)
    assert all(torch.equal(codes, before[path]) for path, codes in codes_of(pipe).items())
    assert handle.report().notes == notes


def test_weights_that_were_changed_in_a_pause_get_the_nearest_codes(pipe: Any) -> None:
    handle = fusedit.accelerate(pipe, "fp8")
    before = codes_of(pipe)
    path = next(path for path in before if path.endswith("to_q"))
    with handle.paused():
        weight = pipe.transformer.get_submodule(path).weight
        with torch.no_grad():
            weight.mul_(1.1)
        nearest = quantise_weight(weight.data)[0].view(torch.uint8)
    after = codes_of(pipe)
    assert torch.equal(after.pop(path), nearest)
    assert all(torch.equal(codes, before[other]) for other, codes in after.items())


def test_pipelines_that_cannot_draw_are_said_to_have_nearest_codes(pipe: Any) -> None:
    kept = pipe.tokenizer
    pipe.register_modules(tokenizer=None)
    handle = fusedit.accelerate(pipe, "fp8")
    pipe.register_modules(tokenizer=kept)
    reason = "without tokenizer the pipeline cannot draw from a prompt"
    (site,) = (s for s in handle.report().rewritten if s.site == model_of(pipe).rounding)
    assert (site.fused, site.reasons) == (0, {reason: 1})
    products = sum(layer.activations for layer in converted(pipe).values())
    assert f"transformer: the codes of {products} layers are the nearest ones: {reason}" in handle.report().notes
    for path, layer in converted(pipe).items():
        if layer.activations:
            original = layer.original
            assert original is not None
            assert torch.equal(layer.weight.data.view(torch.uint8), quantise_weight(original)[0].view(torch.uint8)), (
                path
            )


def test_a_pipeline_that_fails_says_why(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(type(pipe), "encode_prompt", fail)
    assert reasons(pipe) == ["drawing pictures for them failed (ValueError: no such thing)"]
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())


def test_an_exception_without_words(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(type(pipe), "encode_prompt", fail)
    assert reasons(pipe) == ["drawing pictures for them failed (AssertionError)"]


def test_pictures_of_nan_are_said(pipe: Any) -> None:
    for p in pipe.transformer.parameters():
        p.data.fill_(torch.nan)
    assert reasons(pipe) == [NAN]


def test_a_pause_in_inference_mode_leaves_ordinary_tensors(pipe: Any) -> None:
    handle = fusedit.accelerate(pipe, "fp8")
    with torch.inference_mode(), handle.paused():
        pass
    assert not any(t.is_inference() for t in (*pipe.transformer.parameters(), *pipe.transformer.buffers()))


def test_a_large_model_on_a_cpu_is_not_drawn_with(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LARGEST_ON_A_CPU", 1000)
    (reason,) = reasons(pipe)
    assert "weights on a CPU takes too long; move the pipeline to a GPU before that" in reason


def test_other_pipelines_are_named() -> None:
    from diffusers import FluxImg2ImgPipeline

    pipe: Any = fusedit.load("tiny-flux", dtype="fp32", device="cpu")
    other: Any = FluxImg2ImgPipeline(**pipe.components)
    assert reasons(other) == ["FluxImg2ImgPipeline needs more than a prompt to draw"]
    told = seen(other).samples
    assert told
    assert all("norm" in path for path in told), "what modulation reads is known without a picture"


def test_the_plan_may_switch_it_off(pipe: Any) -> None:
    found = seen(pipe, Plan(base="fp8", rewrites={model_of(pipe).rounding: False}))
    assert set(found.choices.values()) <= {choice.MADE_UP}
    assert set(found.choices) == set(found.samples)


def test_loras_are_left_out(pipe: Any) -> None:
    from peft import LoraConfig

    before = seen(pipe).samples
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    after = seen(pipe).samples
    assert after.keys() == before.keys()
    assert all(torch.equal(rows, before[path]) for path, rows in after.items())


def test_nan_weights_are_not_our_error(pipe: Any) -> None:
    layer = next(m for m in pipe.transformer.modules() if isinstance(m, nn.Linear))
    layer.weight.data[0] = torch.nan
    assert reasons(pipe) == [NAN]
    fusedit.accelerate(pipe, "fp8").restore()


def test_progress_is_told_of_all_that_takes_time(pipe: Any) -> None:
    class Told(Progress):
        def __init__(self) -> None:
            self.begun: list[tuple[str, int]] = []
            self.done = 0

        def begin(self, title: str, total: int) -> None:
            self.begun.append((title, total))

        def finish_picture(self) -> None:
            self.done += 1

    told = Told()
    fusedit.accelerate(pipe, "fp8", progress=told)
    layers = len(converted(pipe))
    assert told.begun == [("looking at what layers read", len(calibration.PICTURES)), ("quantising", layers)]
    assert told.done == len(calibration.PICTURES) + layers


def test_autocast_around_it_changes_nothing(pipe: Any) -> None:
    codes = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            handle = fusedit.accelerate(pipe, "fp8")
        codes.append(codes_of(pipe))
        handle.restore()
    assert all(torch.equal(made, codes[1][path]) for path, made in codes[0].items())


def test_an_interruption_leaves_the_pipeline_as_it_was(pipe: Any) -> None:
    calls = iter(range(100))

    def interrupt(*_: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    hook = pipe.transformer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fusedit.accelerate(pipe, "fp8")
    hook.remove()
    assert not converted(pipe)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.transformer.modules())
    fusedit.accelerate(pipe, "fp8").restore()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_offloaded_components_at_rest(
    pipe: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.enable_model_cpu_offload(device="cpu")
    drawn, rested = iter(range(100)), 0
    free = type(pipe).maybe_free_model_hooks

    def fail(*_: Any) -> None:
        if next(drawn) == 3:  # in the second picture
            raise error

    def counted(self: Any) -> None:
        nonlocal rested
        rested += 1
        free(self)

    monkeypatch.setattr(type(pipe), "maybe_free_model_hooks", counted)
    own, scheduler = set(vars(pipe)), dict(vars(pipe.scheduler))
    with monkeypatch.context() as patch:
        patch.setattr(type(pipe.scheduler), "step", wrapped(type(pipe.scheduler).step, fail))
        if error is RuntimeError:
            assert reasons(pipe) == ["drawing pictures for them failed (RuntimeError)"]
        else:
            with pytest.raises(KeyboardInterrupt):
                seen(pipe)
    assert rested == 2, "after the first picture stock does it, after the second nobody else would"
    assert set(vars(pipe)) == own
    now = vars(pipe.scheduler)
    assert now.keys() == scheduler.keys()
    assert all(now[key] is value for key, value in scheduler.items())
    draw(pipe)


def wrapped(function: Any, before: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return run
