"""Convolutions' weights of a fused VAE lie channels_last, as on a GPU, and as stock has them wherever stock runs."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from support.pipes import flux_call, flux_pipe, parameters_of, relative, tiny_vae, z_image_call, z_image_pipe
from support.recorded import record_graphs
from support.vae import pipe_with
from torch import nn

import fusedit
from fusedit import vae_stages
from fusedit.plan import Plan
from fusedit.runtime import relaid
from fusedit.runtime.homes import lies_channels_last
from fusedit.runtime.install import FusedForward

CLOSE = 1e-5
PARTS = ("decoder", "encoder")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaid, "on_gpu", lambda _x: True)
    torch.manual_seed(0)


@pytest.fixture
def pipe() -> Any:
    return pipe_with(tiny_vae())


@torch.no_grad()
def run(pipe: Any, part: str = "decoder") -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    dtype, vae = pipe.vae.dtype, pipe.vae
    if part == "decoder":
        y: torch.Tensor = vae.decode(torch.randn(1, 4, 5, 6, generator=generator).to(dtype)).sample
    else:
        y = vae.encode(torch.rand(1, 3, 40, 48, generator=generator).to(dtype)).latent_dist.parameters
    return y


def weights(module: Any) -> dict[str, nn.Parameter]:
    """Of convolutions that do not lie either way."""
    found = ((name, child.weight) for name, child in module.named_modules() if type(child) is nn.Conv2d)
    return {name: weight for name, weight in found if weight.shape[2:] != (1, 1)}


def laid(module: Any) -> bool:
    """Whether all weights lie channels_last; asserts that otherwise none does."""
    found = {lies_channels_last(weight) for weight in weights(module).values()}
    assert len(found) == 1
    assert found == {True} or all(weight.is_contiguous() for weight in weights(module).values())
    return found == {True}


def same(pipe: Any, before: dict[str, Any]) -> bool:
    return all(torch.equal(a[0], before[name][0]) and a[1:] == before[name][1:] for name, a in state(pipe).items())


def state(pipe: Any) -> dict[str, Any]:
    return parameters_of(pipe)


def notes(handle: fusedit.Handle, word: str) -> list[str]:
    return [note for note in handle.report().notes if word in note]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_call_lays_and_restore_puts_back(pipe: Any, part: str, dtype: torch.dtype) -> None:
    pipe.vae.to(dtype)
    before, module, parameters = state(pipe), getattr(pipe.vae, part), list(pipe.vae.parameters())
    stock = run(pipe, part)
    handle = fusedit.accelerate(pipe)
    assert not laid(module)
    fused = run(pipe, part)
    assert laid(module)
    assert not any(laid(getattr(pipe.vae, other)) for other in PARTS if other != part)
    assert relative(fused.float(), stock.float()) < (CLOSE if dtype == torch.float32 else 0.05)
    assert all(torch.equal(a[0], before[name][0]) for name, a in state(pipe).items())
    assert torch.equal(run(pipe, part), fused)
    assert notes(handle, relaid.LAID) == [f"vae.{part}: {relaid.LAID}: {len(weights(module))}"]
    handle.restore()
    assert same(pipe, before)
    assert all(a is b for a, b in zip(parameters, pipe.vae.parameters(), strict=True))
    assert torch.equal(run(pipe, part), stock)


def test_on_a_cpu_nothing_is_laid_and_what_was_goes_back(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(pipe)
    fusedit.accelerate(pipe)
    run(pipe)
    assert laid(pipe.vae.decoder)
    monkeypatch.undo()  # as after `.to("cpu")`
    run(pipe)
    assert same(pipe, before)


@pytest.mark.parametrize("part", PARTS)
def test_without_the_rewrite_nothing_is_laid(pipe: Any, part: str) -> None:
    name = {"decoder": "vae", "encoder": "vae_encoder"}[part]
    plan = Plan(rewrites={f"{name}.channels_last": False})
    other = type(pipe).from_pipe(pipe)
    fusedit.accelerate(pipe)
    fusedit.accelerate(other, plan)
    run(other, part)  # a direct call: of the pipeline accelerated last
    assert not laid(getattr(pipe.vae, part))


def test_float16_is_converted_in_each_call_and_stays(pipe: Any) -> None:
    pipe.vae.to(torch.float16)
    before = state(pipe)
    handle = fusedit.accelerate(pipe)
    run(pipe)
    run(pipe, "encoder")
    assert same(pipe, before)
    assert not notes(handle, "convolution weights")


def test_channels_last_of_the_user_stays(pipe: Any) -> None:
    pipe.vae.to(memory_format=torch.channels_last)
    before = state(pipe)
    places = [p.data_ptr() for p in pipe.vae.parameters()]
    handle = fusedit.accelerate(pipe)
    run(pipe)
    with handle.paused():
        run(pipe)
    copied = copy.deepcopy(pipe.vae)
    handle.restore()
    assert same(pipe, before)
    assert [p.data_ptr() for p in pipe.vae.parameters()] == places
    assert laid(copied.decoder)


# Whenever stock runs


class _Caller(DiffusionPipeline):
    """A pipeline whose call calls a function."""

    def __call__(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        return call()


def paused(pipe: Any, handle: fusedit.Handle) -> torch.Tensor:
    with handle.paused():
        return run(pipe)


def refused(pipe: Any, _handle: fusedit.Handle) -> torch.Tensor:
    hook = pipe.vae.decoder.mid_block.register_forward_hook(lambda *_: None)
    y = run(pipe)
    hook.remove()
    return y


def by_another_pipeline(pipe: Any, _handle: fusedit.Handle) -> torch.Tensor:
    return _Caller()(lambda: run(pipe))


def with_gradients(pipe: Any, _handle: fusedit.Handle) -> torch.Tensor:
    with torch.enable_grad():
        y = pipe.vae.decoder(torch.randn(1, 4, 5, 6, generator=torch.Generator().manual_seed(4)))
        y.sum().backward()
    assert pipe.vae.decoder.conv_in.weight.grad is not None
    return y.detach()


@pytest.mark.parametrize("call", [paused, refused, by_another_pipeline, with_gradients])
def test_stock_runs_on_weights_that_lie_as_stock_has_them(
    pipe: Any, call: Callable[[Any, fusedit.Handle], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stock = state(pipe), run(pipe)
    handle = fusedit.accelerate(pipe)
    fused = run(pipe)
    seen: list[bool] = []
    forward: Any = FusedForward.stock

    def watched(self: FusedForward) -> Any:
        seen.append(laid(self.module))
        return forward.fget(self)

    with monkeypatch.context() as patch:
        patch.setattr(FusedForward, "stock", property(watched))
        assert torch.equal(call(pipe, handle), stock)
    assert seen == [False]
    assert same(pipe, before)
    assert torch.equal(run(pipe), fused)
    assert laid(pipe.vae.decoder)
    handle.restore()
    assert same(pipe, before)


def test_a_pipeline_that_is_gone_leaves_nothing_behind() -> None:
    first = pipe_with(tiny_vae())
    vae = first.vae
    before, stock = state(first), run(first)
    fusedit.accelerate(first)
    run(first)
    assert laid(vae.decoder)
    del first
    gc.collect()
    assert not laid(copy.deepcopy(vae).decoder)
    second = pipe_with(vae)
    assert torch.equal(run(second), stock)
    assert same(second, {name: value for name, value in before.items() if name.startswith("vae.")} | state(second))
    assert not laid(vae.decoder)


def test_packed_products_stay_packed_when_stock_runs() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe, output_type="pt")
    places = [p.data_ptr() for p in pipe.transformer.parameters()]
    with handle.paused():
        flux_call(pipe, output_type="pt")
    assert [p.data_ptr() for p in pipe.transformer.parameters()] == places
    assert not laid(pipe.vae.decoder)


# Life cycle


def test_two_pipelines_share_a_vae_until_the_last_restores() -> None:
    pipe = z_image_pipe()
    before, stock = state(pipe), z_image_call(pipe, output_type="pt")
    other = z_image_pipe()
    other.register_modules(vae=pipe.vae)
    a, b = fusedit.accelerate(pipe), fusedit.accelerate(other)
    fused = z_image_call(pipe, output_type="pt")
    assert torch.equal(z_image_call(other, output_type="pt"), fused)
    a.restore()
    assert laid(pipe.vae.decoder)
    assert torch.equal(z_image_call(pipe, output_type="pt"), stock)
    assert not laid(pipe.vae.decoder)
    assert torch.equal(z_image_call(other, output_type="pt"), fused)
    assert laid(pipe.vae.decoder)
    b.restore()
    assert same(pipe, before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["copy", "pickle"])
def test_copies_are_stock(pipe: Any, how: Callable[[Any], Any]) -> None:
    stock = run(pipe)
    handle = fusedit.accelerate(pipe)
    fused = run(pipe)
    copied = how(pipe.vae)
    assert not laid(copied.decoder)
    assert torch.equal(run(pipe_with(copied)), stock)
    assert torch.equal(run(pipe), fused)
    assert laid(pipe.vae.decoder)
    handle.restore()


@torch.no_grad()
def test_edits_take_effect_at_once(pipe: Any) -> None:
    handle = fusedit.accelerate(pipe)
    found = run(pipe)
    for name in ("up_blocks.0.upsamplers.0.conv", "conv_in", "conv_out", "mid_block.resnets.0.conv1"):
        pipe.vae.decoder.get_submodule(name).weight.data.mul_(-1.5)  # no version counter sees this
        before, found = found, run(pipe)
        assert relative(found, before) > 1e-3
    assert laid(pipe.vae.decoder)
    handle.restore()
    assert relative(found, run(pipe)) < CLOSE


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_followed(pipe: Any, assign: bool) -> None:
    torch.manual_seed(9)
    other = pipe_with(tiny_vae())
    handle = fusedit.accelerate(pipe)
    run(pipe)
    pipe.vae.load_state_dict(copy.deepcopy(other.vae.state_dict()), assign=assign)
    fused = run(pipe)
    assert laid(pipe.vae.decoder)
    handle.restore()
    assert not laid(pipe.vae.decoder)
    assert torch.equal(run(pipe), run(other))
    assert relative(fused, run(other)) < CLOSE


def test_another_dtype_and_back(pipe: Any) -> None:
    before = state(pipe)
    handle = fusedit.accelerate(pipe)
    fused = run(pipe)
    pipe.vae.to(torch.float64)
    run(pipe)  # which is stock's
    assert not laid(pipe.vae.decoder)
    pipe.vae.to(torch.float32)
    assert torch.equal(run(pipe), fused)
    handle.restore()
    assert same(pipe, before)


@pytest.mark.parametrize("inference", [False, True])
def test_weights_held_elsewhere_stay_where_they_are_and_edits_take_effect(pipe: Any, inference: bool) -> None:
    held = pipe.vae.state_dict()
    mode: AbstractContextManager[Any] = torch.inference_mode() if inference else nullcontext()
    handle = fusedit.accelerate(pipe)
    with mode:
        before = run(pipe)
        assert not laid(pipe.vae.decoder)
        assert any("shares its storage with another tensor" in note for note in handle.report().notes)
    held["decoder.conv_in.weight"].mul_(3)
    fused = run(pipe)
    handle.restore()
    assert relative(fused, before) > 1e-3
    assert relative(fused, run(pipe)) < CLOSE
    assert all(p.data_ptr() == held[name].data_ptr() for name, p in pipe.vae.named_parameters())
    assert not any(p.is_inference() for p in pipe.vae.parameters())


def test_under_offload_nothing_is_laid_and_the_report_says_so(pipe: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    before = state(pipe)
    add_hook_to_module(pipe.vae.decoder, ModelHook())
    handle = fusedit.accelerate(pipe)
    run(pipe)
    run(pipe)
    assert same(pipe, before)
    assert notes(handle, "convolution weights") == [
        f"vae.decoder: {relaid.LEFT}: weights move between calls (offload): 2"
    ]
    handle.restore()


@torch.no_grad()
def test_layers_in_a_lora_layer_stay_as_they_lie(pipe: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False), pipe.vae)
    stock = run(pipe)
    handle = fusedit.accelerate(pipe)
    assert relative(run(pipe), stock) < CLOSE
    block = pipe.vae.decoder.mid_block.resnets[0]
    assert block.conv1.base_layer.weight.is_contiguous()
    assert block.conv1.lora_A["default"].weight.is_contiguous()
    assert lies_channels_last(block.conv2.weight)
    handle.restore()
    assert torch.equal(run(pipe), stock)


@torch.no_grad()
def test_a_lora_fused_into_weights_that_lie_otherwise(pipe: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    handle = fusedit.accelerate(pipe)
    plain = run(pipe)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False), pipe.vae)
    with_lora = run(pipe)
    for module in pipe.vae.modules():
        if hasattr(module, "merge"):
            module.merge()
    merged = run(pipe)
    assert relative(with_lora, plain) > 1e-3
    assert relative(merged, with_lora) < CLOSE
    handle.restore()
    assert relative(run(pipe), merged) < CLOSE
    layers = [module.base_layer for module in pipe.vae.modules() if hasattr(module, "base_layer")]
    assert all(layer.weight.is_contiguous() for layer in layers)


def test_saving(pipe: Any, tmp_path: Any) -> None:
    """diffusers makes tensors contiguous; safetensors by itself takes no others."""
    handle = fusedit.accelerate(pipe)
    run(pipe)
    pipe.vae.save_pretrained(tmp_path)
    read = type(pipe.vae).from_pretrained(tmp_path)
    assert all(torch.equal(p, read.get_parameter(name)) for name, p in pipe.vae.named_parameters())
    with pytest.raises(ValueError, match="contiguous"):
        save_file(pipe.vae.state_dict(), tmp_path / "raw.safetensors")
    handle.restore()
    save_file(pipe.vae.state_dict(), tmp_path / "raw.safetensors")


@pytest.mark.parametrize(("what", "part"), [("decode", "decoder"), ("encode", "encoder")])
@torch.no_grad()
def test_measuring_layouts_leaves_the_model_as_it_lies(pipe: Any, what: str, part: str) -> None:
    before = state(pipe)
    x = torch.randn(1, *((4, 4, 4) if what == "decode" else (3, 32, 32)))
    for variant in vae_stages.variants(getattr(pipe.vae, part), what, x):
        variant.whole(x)
    assert same(pipe, before)


# Graphs


def test_weights_are_laid_before_a_graph_takes_them_for_granted(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)
    handle = fusedit.accelerate(pipe)
    made = [run(pipe) for _ in range(4)]
    (graphs,) = (cache for cache in handle.report().caches if cache.name == "vae.decoder graphs")
    assert graphs.hits == 2
    assert all(torch.equal(one, made[0]) for one in made)
    with handle.paused():
        run(pipe)
    assert torch.equal(run(pipe), made[0])
    handle.restore()
