"""A float16 VAE that overflows: wherever an accelerated pipeline falls back to stock, stock runs in float32."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from support.pipes import relative, tiny_vae
from support.vae import pipe_with
from torch import nn

import fusedit
from fusedit.plan import Plan
from fusedit.report import Report
from fusedit.runtime.widened import LEFT, WIDENED

Z = 2 * torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(4)).half()
PICTURE = 2 * torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(5)).half()
HALVES = ("vae.decoder", "vae.encoder")


def overflowing(**changes: Any) -> Any:
    """GroupNorm takes it back, but not before float16 has overflowed."""
    torch.manual_seed(0)
    vae = tiny_vae(**changes).requires_grad_(False)
    for half in (vae.decoder, vae.encoder):
        half.conv_in.weight.mul_(3e5).clamp_(-6e4, 6e4)
    return vae.to(torch.float16)


def run(vae: Any, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    return vae.decode(Z.to(dtype)).sample, vae.encode(PICTURE.to(dtype)).latent_dist.mean


def notes(report: Report, what: str) -> list[str]:
    return [note.partition(":")[0] for note in report.notes if what in note]


def bits(vae: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (id(t), t.data_ptr(), t.stride(), t.dtype, t.is_inference(), t._version, t.clone())
        for name, t in (*vae.named_parameters(), *vae.named_buffers())
    }


def same_bits(a: dict[str, tuple[Any, ...]], b: dict[str, tuple[Any, ...]]) -> bool:
    return a.keys() == b.keys() and all(
        x[:-1] == y[:-1] and torch.equal(x[-1], y[-1]) for x, y in zip(a.values(), b.values(), strict=True)
    )


def _hook(vae: Any) -> None:
    for half in (vae.decoder, vae.encoder):
        half.mid_block.resnets[0].register_forward_hook(lambda *_: None)


def _processor(vae: Any) -> None:
    for half in (vae.decoder, vae.encoder):
        half.mid_block.attentions[0].set_processor(AttnProcessor())


def _lora(vae: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, target_modules=["conv_in", "conv1", "to_q"], init_lora_weights=False)
    inject_adapter_in_model(config, vae)
    vae.to(torch.float16)
    assert vae.decoder.conv_in.lora_A["default"].weight.dtype == torch.float16


def _setting(vae: Any) -> None:
    for half in (vae.decoder, vae.encoder):
        half.mid_block.attentions[0].rescale_output_factor = 2.0


def _buffer(vae: Any) -> None:
    _hook(vae)
    for half in (vae.decoder, vae.encoder):
        half.register_buffer("shift", torch.ones(1, dtype=torch.float16))
        half.conv_out.register_forward_pre_hook(lambda _, given, half=half: (given[0] * half.shift,))


@torch.no_grad()
@pytest.mark.parametrize("change", [_hook, _processor, _lora, _setting, _buffer])
def test_what_falls_back_to_stock_is_widened_and_gets_its_bits_back(change: Callable[[Any], None]) -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    change(pipe.vae)
    before = bits(pipe.vae)
    truths = run(copy.deepcopy(pipe.vae).float(), torch.float32)
    assert same_bits(bits(pipe.vae), before)
    results = run(pipe.vae)
    for made, truth in zip(results, truths, strict=True):
        assert made.dtype == torch.float16
        assert relative(made.float(), truth) < 2e-3
    assert same_bits(bits(pipe.vae), before)
    report = handle.report()
    assert notes(report, WIDENED) == list(HALVES)
    assert not notes(report, LEFT)
    assert all(not site.fused and site.stock for site in report.rewritten if site.site.startswith("vae"))
    with handle.paused():  # stock, by wish
        assert not any(made.isfinite().all() for made in run(pipe.vae))
    handle.restore()
    assert not any(made.isfinite().all() for made in run(pipe.vae))
    assert same_bits(bits(pipe.vae), before)


@torch.no_grad()
def test_a_vae_that_was_refused_is_widened_until_restore() -> None:
    pipe = pipe_with(overflowing())
    _setting(pipe.vae)
    handle = fusedit.accelerate(pipe)
    assert fusedit.accelerate(pipe) is handle
    truths = run(copy.deepcopy(pipe.vae).float(), torch.float32)
    for made, truth in zip(run(pipe.vae), truths, strict=True):
        assert relative(made.float(), truth) < 2e-3
    report = handle.report()
    assert notes(report, WIDENED) == list(HALVES)
    assert not [site for site in report.rewritten if site.site.startswith("vae")]
    assert all("rescale_output_factor" in r.reason for r in report.refused if r.site.startswith("vae"))
    handle.restore()
    assert "forward" not in vars(pipe.vae.decoder)
    assert not any(made.isfinite().all() for made in run(pipe.vae))


@torch.no_grad()
def test_other_dtypes_of_a_refused_vae_have_nothing_installed() -> None:
    pipe = pipe_with(overflowing().float())
    _setting(pipe.vae)
    fusedit.accelerate(pipe)
    assert "forward" not in vars(pipe.vae.decoder)


@torch.no_grad()
def test_a_vae_on_which_nothing_is_installed_is_in_the_notes() -> None:
    pipe = pipe_with(overflowing())
    every = [r.site for r in fusedit.accelerate(pipe).report().rewritten if r.site.startswith("vae")]
    handle = fusedit.accelerate(pipe, Plan().without(*every))
    told = [f"{half} runs in float16, as stock does, which may overflow to black pictures" for half in HALVES]
    assert [note for note in handle.report().notes if "float16" in note] == told
    assert not any(made.isfinite().all() for made in run(pipe.vae))
    pipe.vae.to(torch.bfloat16)
    assert not [note for note in fusedit.accelerate(pipe).report().notes if "float16" in note]


@torch.no_grad()
def test_the_bits_come_back_when_the_call_fails() -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)

    def fail(*_: Any) -> None:
        assert pipe.vae.decoder.conv_in.weight.dtype == torch.float32
        raise KeyError("a hook's own error")

    pipe.vae.decoder.mid_block.register_forward_hook(fail)
    before = bits(pipe.vae)
    with pytest.raises(KeyError, match="a hook's own error"):
        pipe.vae.decode(Z)
    assert same_bits(bits(pipe.vae), before)
    assert notes(handle.report(), WIDENED) == ["vae.decoder"]


@torch.no_grad()
def test_a_pipeline_that_is_not_accelerated_gets_stock() -> None:
    pipe, other = pipe_with(overflowing()), pipe_with(tiny_vae())
    other.register_modules(vae=pipe.vae)
    handle = fusedit.accelerate(pipe)
    seen = []
    pipe.vae.decoder.conv_in.register_forward_hook(lambda *_: seen.append(pipe.vae.decoder.conv_in.weight.dtype))
    assert pipe.vae.decode(Z).sample.isfinite().all()

    class Caller(type(other)):  # type: ignore[misc]
        def __call__(self) -> Any:
            return self.vae.decode(Z).sample

    assert not Caller(**other.components)().isfinite().all()
    assert seen == [torch.float32, torch.float16]
    assert notes(handle.report(), WIDENED) == ["vae.decoder"]


def test_loaded_and_run_under_inference_mode() -> None:
    with torch.inference_mode():
        pipe = pipe_with(overflowing())
        fusedit.accelerate(pipe)
        _hook(pipe.vae)
        before = bits_without_version(pipe.vae)
        assert all(made.isfinite().all() for made in run(pipe.vae))
        assert bits_without_version(pipe.vae) == before
    kept = pipe_with(overflowing())
    fusedit.accelerate(kept)
    _hook(kept.vae)
    with torch.inference_mode():
        assert all(made.isfinite().all() for made in run(kept.vae))
    assert not any(t.is_inference() for t in kept.vae.parameters())


def bits_without_version(vae: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (t.data_ptr(), t.dtype, t.is_inference()) for name, t in vae.named_parameters()}


def test_where_gradients_are_needed_stock_stays_as_it_is_and_the_report_says_so() -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    pipe.vae.decoder.requires_grad_(True)
    assert not pipe.vae.decode(Z).sample.isfinite().all()
    assert f"vae.decoder: {LEFT}: gradients are needed: 1" in handle.report().notes
    with torch.no_grad():
        assert pipe.vae.decode(Z).sample.isfinite().all()


@torch.no_grad()
def test_autocast() -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    with torch.autocast("cpu", torch.float16):
        made = pipe.vae.decode(Z).sample
    assert made.dtype == torch.float16
    assert made.isfinite().all()
    assert notes(handle.report(), WIDENED) == ["vae.decoder"]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="mixed dtype"):  # stock's own error
        pipe.vae.decode(Z)
    assert notes(handle.report(), f"{WIDENED}: 1") == ["vae.decoder"]


@torch.no_grad()
def test_weights_that_come_layer_by_layer_are_left_and_noted() -> None:
    from accelerate import cpu_offload

    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    cpu_offload(pipe.vae.decoder, execution_device=torch.device("cpu"))
    assert next(pipe.vae.decoder.parameters()).is_meta
    pipe.vae.decode(Z)
    assert f"vae.decoder: {LEFT}: weights are moved layer by layer (offload): 1" in handle.report().notes


@torch.no_grad()
def test_weights_that_come_group_by_group_are_left_and_noted() -> None:
    from diffusers.hooks import apply_group_offloading

    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    cpu = torch.device("cpu")
    apply_group_offloading(pipe.vae, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    pipe.vae.decode(Z)
    assert f"vae.decoder: {LEFT}: weights are moved layer by layer (offload): 1" in handle.report().notes


@torch.no_grad()
def test_model_offload_is_widened() -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    _hook(pipe.vae)
    pipe.enable_model_cpu_offload(device="cpu")
    assert all(made.isfinite().all() for made in run(pipe.vae))
    assert notes(handle.report(), WIDENED) == list(HALVES)


@torch.no_grad()
def test_two_threads_take_turns() -> None:
    pipe = pipe_with(overflowing())
    handle = fusedit.accelerate(pipe)
    _hook(pipe.vae)
    made: list[torch.Tensor] = []
    inside = threading.Barrier(2, timeout=0.2)

    def wait(*_: Any) -> None:
        try:
            inside.wait()
        except threading.BrokenBarrierError:
            inside.reset()

    pipe.vae.decoder.mid_block.register_forward_hook(wait)

    def decode() -> None:
        with torch.no_grad():
            made.append(pipe.vae.decode(Z).sample)

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert torch.equal(*made)
    assert made[0].isfinite().all()
    assert notes(handle.report(), f"{WIDENED}: 2") == ["vae.decoder"]


# A sample in another dtype than the weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("sample", "weights"),
    [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_a_sample_in_another_dtype_raises_what_stock_raises(sample: torch.dtype, weights: torch.dtype) -> None:
    pipe = pipe_with(tiny_vae().to(weights))
    with pytest.raises(RuntimeError) as stock:
        pipe.vae.decoder(Z.to(sample))
    handle = fusedit.accelerate(pipe)
    with pytest.raises(RuntimeError) as ours:
        pipe.vae.decoder(Z.to(sample))
    assert str(ours.value) == str(stock.value)
    reason = "the input is {}, the weights are {}".format(*(str(d).removeprefix("torch.") for d in (sample, weights)))
    sites = [site for site in handle.report().rewritten if site.site.startswith("vae.")]
    assert all(dict(site.reasons) == {reason: 1} and not site.fused for site in sites)


@torch.no_grad()
def test_a_vae_that_is_cast_as_a_whole_and_a_wrapped_first_layer_stay_fused() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    pipe = pipe_with(overflowing(force_upcast=True))
    handle = fusedit.accelerate(pipe)
    pipe.vae.to(torch.float32)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv_in"], init_lora_weights=False), pipe.vae)
    assert isinstance(pipe.vae.decoder.conv_in, nn.Module)
    run(pipe.vae, torch.float32)
    counts = {site.site: site.fused for site in handle.report().rewritten}
    assert counts["vae.channels_last"] == counts["vae_encoder.channels_last"] == 1
