from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support.whole_pipes import SMALL

from fusedit import timing
from fusedit.defaults import request_for
from fusedit.drawing import draw, initial_noise, out_of_memory_as_error
from fusedit.errors import ArgumentError, DeviceMemoryError, NonFiniteError, UnsupportedPipelineError
from fusedit.finite import bad_weight
from fusedit.request import Request


@pytest.fixture(params=["flux", "z_image"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def own_call(pipe: Any, request: Request, **more: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="np",
        **more,
    ).images[0]


@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_it_draws_what_a_users_own_call_draws(pipe: Any, guidance: float) -> None:
    request = request_for(pipe, "a red fox", 7, guidance=guidance, **SMALL)
    drawing = draw(pipe, request)
    assert drawing.pixels.shape == (32, 48, 3)
    assert np.array_equal(drawing.pixels, own_call(pipe, request))
    assert drawing.size == request.size


def test_guidance_zero_is_not_the_default(z_image: Any) -> None:
    # CFG-01: 0, 0.5 and the default are three different pictures.
    drawn = [draw(z_image, request_for(z_image, "fox", 1, guidance=g, **SMALL)).pixels for g in (0.0, 0.5, 5.0)]
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_the_given_noise_is_the_noise_of_the_seed(pipe: Any) -> None:
    request = request_for(pipe, "fox", 3, **SMALL)
    assert np.array_equal(draw(pipe, request, noise=initial_noise(pipe, request)).pixels, draw(pipe, request).pixels)


def test_the_empty_prompt_draws(pipe: Any) -> None:
    # SRV-08
    assert np.isfinite(draw(pipe, request_for(pipe, "", 0, **SMALL)).pixels).all()


def test_steps_are_reported_and_timed(pipe: Any) -> None:
    seen: list[tuple[int, int]] = []
    drawing = draw(pipe, request_for(pipe, "fox", 0, width=32, height=32, steps=3), on_step=lambda *s: seen.append(s))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert len(drawing.lap.step_ms) == 3
    assert drawing.lap.total_s * 1e3 > sum(drawing.lap.step_ms)
    assert drawing.lap.peak_bytes is None


def test_the_pipeline_object_is_as_before(pipe: Any) -> None:
    before = {name: id(value) for name, value in vars(pipe).items()}
    processor = dict(vars(pipe.image_processor))
    draw(pipe, request_for(pipe, "fox", 0, **SMALL))
    after = {name: id(value) for name, value in vars(pipe).items()}
    assert {name: after[name] for name in before if not name.startswith("_")} == {
        name: value for name, value in before.items() if not name.startswith("_")
    }
    assert "progress_bar" not in vars(pipe)
    assert vars(pipe.image_processor) == processor


def test_no_bar_of_diffusers_shows_and_it_comes_back(flux: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = copy.copy(flux)
    pipe.set_progress_bar_config()
    request = request_for(pipe, "fox", 0, **SMALL)
    draw(pipe, request)
    assert capfd.readouterr().err == ""
    pipe(prompt="fox", width=32, height=32, num_inference_steps=1, output_type="latent")
    assert "1/1" in capfd.readouterr().err


def poisoned(pipe: Any, module: str, step: int, value: float = float("nan")) -> Any:
    """A copy whose transformer (from a step on) or decoder gives NaN."""
    pipe = copy.deepcopy(pipe)
    calls = []

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        calls.append(1)
        if len(calls) <= step:
            return output
        if module == "vae":
            return output * value
        first = output[0]
        return ([item * value for item in first] if isinstance(first, list) else first * value, *output[1:])

    target = pipe.vae.decoder if module == "vae" else pipe.transformer
    target.register_forward_hook(hook)
    return pipe


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_latents_name_the_step_and_stop_there(pipe: Any, value: float) -> None:
    # NAN-01: found before decoding, with the step, instead of a black picture.
    bad = poisoned(pipe, "transformer", 1, value)
    decoded: list[int] = []
    bad.vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
    with pytest.raises(NonFiniteError, match="after step 2 of 4") as error:
        draw(bad, request_for(bad, "fox", 0, width=32, height=32, steps=4, guidance=0.0))
    assert (error.value.stage, error.value.step, error.value.rewrite) == ("latents", 1, None)
    assert decoded == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_pixels_are_seen_before_they_are_clamped(pipe: Any, value: float) -> None:
    # NAN-02: clamping to [0, 1] turns infinity into white; what counts is what the VAE gave.
    bad = poisoned(pipe, "vae", 0, value)
    with pytest.raises(NonFiniteError, match="decoded pixels") as error:
        draw(bad, request_for(bad, "fox", 0, **SMALL))
    assert error.value.stage == "pixels"
    assert "postprocess" not in vars(bad.image_processor)


def test_an_fp16_vae_that_overflows_gets_the_remedy(flux: Any) -> None:
    bad = poisoned(flux, "vae", 0)
    bad.vae.to(torch.float16)
    bad.vae.decoder.register_forward_pre_hook(lambda module, args: (module.float(), (args[0].float(),))[1])
    bad.vae.register_parameter("in_half", torch.nn.Parameter(torch.zeros(1, dtype=torch.float16)))
    with pytest.raises(NonFiniteError, match=r"vae overflows in float16.*bfloat16"):
        draw(bad, request_for(bad, "fox", 0, **SMALL))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_weight_is_named(pipe: Any, value: float) -> None:
    bad = copy.deepcopy(pipe)
    weight = dict(bad.transformer.named_parameters())
    name = next(name for name in weight if name.endswith("to_q.weight"))
    weight[name].data.view(-1)[5] = value
    assert bad_weight(pipe) is None
    assert bad_weight(bad) == f"transformer.{name}"
    with pytest.raises(NonFiniteError, match=f"weight transformer.{name}") as error:
        draw(bad, request_for(bad, "fox", 0, **SMALL))
    assert error.value.stage == "weights"


def test_large_weights_whose_sum_overflows_are_not_bad(flux: Any) -> None:
    large = copy.deepcopy(flux)
    next(large.transformer.parameters()).data.fill_(3e38)
    assert bad_weight(large) is None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError()]
)
def test_out_of_memory_leaves_a_usable_pipeline_and_no_tensor(flux: Any, error: Exception) -> None:
    # SRV-06
    pipe = copy.deepcopy(flux)
    held: list[weakref.ref[Any]] = []

    def explode(*_: Any) -> None:
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        raise error.with_traceback(None)

    hook = pipe.transformer.register_forward_hook(explode)
    request = request_for(pipe, "fox", 0, **SMALL)
    with pytest.raises(DeviceMemoryError, match=r"drawing 48x32.*smaller size") as caught:
        draw(pipe, request)
    error.__traceback__ = None
    assert caught.value.__context__ is None
    assert held[0]() is None
    hook.remove()
    assert np.array_equal(draw(pipe, request).pixels, draw(flux, request).pixels)
    assert "progress_bar" not in vars(pipe)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Unable to allocate 745. GiB for an array with shape (100000000000,) and data type float64", "745. GiB"),
        (
            "[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes. Error code 12",
            "640 bytes",
        ),
    ],
)
def test_running_out_of_memory_says_how_much_was_asked_for(flux: Any, text: str, told: str) -> None:
    def call() -> None:
        raise RuntimeError(text) if "CPU" in text else MemoryError(text)

    with pytest.raises(DeviceMemoryError) as caught:
        out_of_memory_as_error(call, "drawing", flux)
    assert str(caught.value) == f"out of memory drawing ({told} asked for at once); a smaller size would help"


def test_other_errors_pass_through_unchanged(flux: Any) -> None:
    pipe = copy.deepcopy(flux)
    pipe.transformer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        draw(pipe, request_for(pipe, "fox", 0, **SMALL))
    assert "progress_bar" not in vars(pipe)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"seed": -1},
        {"width": 40},
        {"height": 0},
        {"guidance": -1.0},
        {"guidance": float("nan")},
        {"prompt": None},
    ],
)
def test_bad_requests(bad: dict[str, Any]) -> None:
    good = {"prompt": "a", "seed": 0, "width": 32, "height": 32, "steps": 1, "guidance": 0.0}
    with pytest.raises(ArgumentError):
        Request(**(good | bad))


def test_a_size_beyond_the_position_tables_is_refused_before_drawing(z_image: Any) -> None:
    most = 16 * z_image.transformer.config.axes_lens[1]
    for side in ({"width": most + 16}, {"height": most + 16}):
        with pytest.raises(ArgumentError, match=f"{most} is its most"):
            draw(z_image, request_for(z_image, "fox", 0, **{"width": 64, "height": 64, "steps": 1, **side}))


def test_settings_without_effect_are_refused(flux: Any, z_image: Any) -> None:
    with pytest.raises(ArgumentError, match="true CFG"):
        draw(flux, request_for(flux, "a", 0, negative="b", **SMALL))
    for scale in (0.0, 0.5, 3.0):
        with pytest.raises(ArgumentError, match=rf"ignores the true CFG scale {scale:g} without a negative prompt"):
            draw(flux, request_for(flux, "a", 0, true_cfg=scale, **SMALL))
    with pytest.raises(ArgumentError, match="guidance 0"):
        draw(z_image, request_for(z_image, "a", 0, negative="b", guidance=0.0, **SMALL))
    with pytest.raises(ArgumentError, match="takes no true CFG"):
        draw(z_image, request_for(z_image, "a", 0, true_cfg=2.0, **SMALL))


def test_a_prompt_with_half_a_surrogate_pair_is_refused(flux: Any) -> None:
    for texts in ({"prompt": "\udcff"}, {"prompt": "a", "negative": "\udcff", "true_cfg": 2.0}):
        with pytest.raises(ArgumentError, match="valid Unicode text; its character 1 is"):
            request_for(flux, seed=0, **texts, **SMALL)


def test_a_negative_prompt_reaches_both_models(flux: Any, z_image: Any) -> None:
    for pipe, settings in ((flux, {"true_cfg": 3.0}), (z_image, {"guidance": 3.0})):
        plain = draw(
            pipe, request_for(pipe, "red fox", 0, **SMALL, **{k: v for k, v in settings.items() if k == "guidance"})
        )
        against = draw(pipe, request_for(pipe, "red fox", 0, negative="blue snow", **SMALL, **settings))
        assert not np.array_equal(plain.pixels, against.pixels)


def test_a_pipeline_that_wants_a_picture_is_refused() -> None:
    import diffusers

    for name in ("FluxImg2ImgPipeline", "FluxKontextPipeline", "FluxControlPipeline"):
        pipe = object.__new__(getattr(diffusers, name))
        with pytest.raises(UnsupportedPipelineError, match=f"{name} wants an? .*image; use a text-to-image pipeline"):
            draw(pipe, Request("a", 0, 32, 32, 1))


def test_no_text_to_image_pipeline() -> None:
    class Other:
        def __call__(self, image: Any) -> None: ...

    with pytest.raises(UnsupportedPipelineError, match="Other takes no 'prompt'"):
        draw(Other(), Request("a", 0, 32, 32, 1))


class FakeClock:
    """Time passes only when something runs: the first call takes 9 s, every later one 1 s, a step a tenth of it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.synchronised = 0

    def now(self) -> float:
        return self.time

    def synchronise(self, _device: Any) -> None:
        self.synchronised += 1


@pytest.mark.usefixtures("broken")
def test_times_are_synchronised_and_warm_up_is_kept_apart(monkeypatch: pytest.MonkeyPatch, flux: Any) -> None:
    # PRF-02
    from fusedit.quality import compare

    clock = FakeClock()
    monkeypatch.setattr(timing, "now", clock.now)
    monkeypatch.setattr(timing, "synchronise", clock.synchronise)
    pipe = copy.deepcopy(flux)
    calls = []

    def takes_time(*_: Any) -> None:
        calls.append(1)
        clock.time += 9.0 if len(calls) <= 2 else 1.0  # two steps make the first picture

    pipe.transformer.register_forward_pre_hook(takes_time)
    result = compare(pipe, "fox", seeds=[0, 1, 2], **SMALL)
    assert result.stock.step_ms == result.fused.step_ms == pytest.approx(1000.0)
    assert result.stock.total_s == result.fused.total_s == pytest.approx(2.0)
    assert result.stock.warmup_s[0] == pytest.approx(18.0)
    assert len(result.stock.warmup_s) == 3
    assert result.stock.calls == result.fused.calls == 3
    drawings = 3 + 1 + 6
    assert clock.synchronised == 2 * drawings
    assert result.speedup == pytest.approx(1.0)
