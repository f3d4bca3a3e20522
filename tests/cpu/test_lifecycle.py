"""accelerate, paused, restore, and everything else that touches a pipeline in between, in every order."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline
from support.pipes import flux_call, flux_inputs, flux_pipe, parameters_of, relative, tiny_vae
from support.runs import FLUX, Z_IMAGE, reasons
from torch import nn

import fusedit
from fusedit.errors import PlanError, UnsupportedPipelineError
from fusedit.plan import Plan

CLOSE = 2e-5  # fp32, three steps: stock and fused differ in rounding order only


def fused_calls(handle: fusedit.Handle) -> int:
    return sum(site.fused for site in handle.report().rewritten if site.site.startswith("flux."))


def same_parameters(pipe: Any, before: dict[str, Any]) -> bool:
    after = parameters_of(pipe)
    return after.keys() == before.keys() and all(
        torch.equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(after.values(), before.values(), strict=True)
    )


def test_accelerated_pipeline_draws_what_stock_draws_and_says_so() -> None:
    pipe = flux_pipe()
    stock = flux_call(pipe)
    handle = fusedit.accelerate(pipe)
    fused = flux_call(pipe)
    assert relative(fused, stock) < CLOSE
    report = handle.report()
    assert all(site.fused > 0 and site.stock == 0 for site in report.rewritten if site.site.startswith("flux."))
    assert "flux.qk_norm_rope" in str(report)


def test_restore_gives_back_every_bit_and_every_storage() -> None:
    pipe = flux_pipe()
    before, stock = parameters_of(pipe), flux_call(pipe)
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    assert not same_parameters(pipe, before), "weights were never packed, so the test shows nothing"
    handle.restore()
    handle.restore()
    assert same_parameters(pipe, before)
    assert torch.equal(flux_call(pipe), stock)
    assert "forward" not in pipe.transformer.__dict__
    assert "forward" not in pipe.vae.decoder.__dict__
    assert not handle.report().active


def test_accelerating_twice_is_harmless_and_another_plan_replaces_the_first() -> None:
    pipe = flux_pipe()
    first = fusedit.accelerate(pipe)
    assert fusedit.accelerate(pipe) is first
    second = fusedit.accelerate(pipe, Plan(rewrites={"flux.gelu": False}))
    assert second is not first
    flux_call(pipe)
    assert fused_calls(first) == 0
    assert fused_calls(second) > 0
    first.restore()
    flux_call(pipe)
    assert pipe.transformer.__dict__["forward"] is not None, "restoring a replaced handle must not undo the new one"
    second.restore()
    assert "forward" not in pipe.transformer.__dict__


def test_paused_runs_stock_bit_for_bit_and_nests() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    count = fused_calls(handle)
    with handle.paused(), handle.paused():
        paused = flux_call(pipe)
    assert fused_calls(handle) == count
    flux_call(pipe)
    assert fused_calls(handle) > count
    handle.restore()
    assert torch.equal(paused, flux_call(pipe))


def test_a_pipeline_that_shares_the_transformer_stays_stock() -> None:
    pipe = flux_pipe()
    other = FluxPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    stock = flux_call(other)
    handle = fusedit.accelerate(pipe)
    count = fused_calls(handle)
    assert torch.equal(flux_call(other), stock)
    assert fused_calls(handle) == count
    assert any("shares this module" in reason for reason in reasons(handle))


def test_two_accelerated_pipelines_share_one_transformer_until_the_last_restores() -> None:
    pipe = flux_pipe()
    before, stock = parameters_of(pipe), flux_call(pipe)
    other = FluxImg2ImgPipeline.from_pipe(pipe)
    a, b = fusedit.accelerate(pipe), fusedit.accelerate(other)
    flux_call(pipe)
    a.restore()
    assert torch.equal(flux_call(pipe), stock)
    arguments = {
        **flux_inputs(other),
        "image": torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(0)),
        "strength": 0.7,
        "num_inference_steps": 4,
        "width": 64,
        "height": 48,
        "output_type": "latent",
    }
    other.set_progress_bar_config(disable=True)
    fused = other(**arguments, generator=torch.Generator().manual_seed(0)).images
    assert fused_calls(b) > 0
    with b.paused():
        assert relative(fused, other(**arguments, generator=torch.Generator().manual_seed(0)).images) < CLOSE
    b.restore()
    assert same_parameters(pipe, before)


@pytest.mark.parametrize("order", ["one", "first", "last"])
def test_weights_shared_by_storage_with_another_pipeline_are_shared_again_after_restore(order: str) -> None:
    pipe, other = flux_pipe(), flux_pipe()
    other.transformer.load_state_dict(pipe.transformer.state_dict(), assign=True)
    stock = flux_call(other)
    handles = [fusedit.accelerate(p) for p in ([pipe] if order == "one" else [pipe, other])]
    for p in (pipe, other):
        assert relative(flux_call(p), stock) < CLOSE
    assert all(fused_calls(handle) for handle in handles)
    for handle in handles if order != "last" else handles[::-1]:
        handle.restore()
    places = [[t.data_ptr() for t in p.transformer.parameters()] for p in (pipe, other)]
    assert places[0] == places[1]
    assert torch.equal(flux_call(pipe), stock)


def test_weights_changed_while_packed_are_not_lost_to_the_storage_they_came_from() -> None:
    pipe = flux_pipe()
    held = pipe.transformer.state_dict()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    weight = pipe.transformer.single_transformer_blocks[0].attn.to_q.weight
    with torch.no_grad():
        weight.mul_(2)
    changed = weight.detach().clone()
    handle.restore()
    assert torch.equal(weight, changed)
    assert weight.data_ptr() != held["single_transformer_blocks.0.attn.to_q.weight"].data_ptr()
    other = pipe.transformer.single_transformer_blocks[0].attn.to_k.weight
    assert other.data_ptr() == held["single_transformer_blocks.0.attn.to_k.weight"].data_ptr()


def test_deepcopy_and_pickle_give_stock_pipelines() -> None:
    pipe = flux_pipe()
    stock = flux_call(pipe)
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        count = fused_calls(handle)
        assert torch.equal(flux_call(copied), stock)
        assert fused_calls(handle) == count
        assert relative(flux_call(copied), flux_call(pipe)) < CLOSE
        again = fusedit.accelerate(copied)
        flux_call(copied)
        assert fused_calls(again) > 0
        again.restore()
        assert torch.equal(flux_call(copied), stock)


def test_to_dtype_and_back_repacks_and_stays_right() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    pipe.to(torch.bfloat16)
    low = flux_call(pipe)
    with handle.paused():
        assert relative(low.float(), flux_call(pipe).float()) < 0.05
    pipe.to(torch.float32)
    again = flux_call(pipe)
    with handle.paused():
        assert relative(again, flux_call(pipe)) < CLOSE
    assert any("packed" in note for note in handle.report().notes)


def test_load_state_dict_with_assign_is_followed() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    other = flux_pipe(seed=9)
    pipe.transformer.load_state_dict(copy.deepcopy(other.transformer.state_dict()), assign=True)
    fused = flux_call(pipe)
    handle.restore()
    assert relative(fused, flux_call(pipe)) < CLOSE
    assert relative(fused, flux_call(other)) < CLOSE


def test_weights_edited_in_place_are_followed() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    before = flux_call(pipe)
    for name in (
        "transformer_blocks.0.attn.to_k.weight",
        "single_transformer_blocks.1.proj_mlp.bias",
        "context_embedder.weight",
    ):
        pipe.transformer.get_parameter(name).data.mul_(1.5)
    fused = flux_call(pipe)
    assert relative(fused, before) > 1e-4
    handle.restore()
    assert relative(fused, flux_call(pipe)) < CLOSE


def test_save_pretrained_of_an_accelerated_pipeline(tmp_path: Any) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    pipe.transformer.save_pretrained(tmp_path)
    handle.restore()
    loaded = type(pipe.transformer).from_pretrained(tmp_path)
    for name, parameter in pipe.transformer.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def _model_offload(pipe: Any, on: bool) -> None:
    if on:
        pipe.enable_model_cpu_offload(device="cpu")
    else:
        pipe.remove_all_hooks()


def _accelerate_hook(pipe: Any, on: bool) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    if on:
        add_hook_to_module(pipe.transformer, ModelHook())
    else:
        remove_hook_from_module(pipe.transformer)


class _Seen:
    """Counts the calls that pass through a diffusers hook, so that a lost hook is noticed."""

    def __init__(self) -> None:
        self.calls = 0


def _diffusers_hook(pipe: Any, on: bool, seen: _Seen) -> None:
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    class Count(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            seen.calls += 1
            return args, kwargs

    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    if on:
        registry.register_hook(Count(), "count")
    else:
        registry.remove_hook("count", recurse=False)


ORDERS = [
    order
    for order in itertools.permutations(("accelerate", "on", "off", "restore"))
    if order.index("accelerate") < order.index("restore") and order.index("on") < order.index("off")
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", ["model_cpu_offload", "accelerate_hook", "diffusers_hook"])
def test_offload_and_accelerate_in_every_order(kind: str, order: tuple[str, ...]) -> None:
    pipe, seen = flux_pipe(), _Seen()
    stock = flux_call(pipe)
    switch: Any = {"model_cpu_offload": _model_offload, "accelerate_hook": _accelerate_hook}.get(kind)
    handle, hooked = None, False
    for action in order:
        if action == "accelerate":
            handle = fusedit.accelerate(pipe)
        elif action == "restore":
            assert handle is not None
            handle.restore()
        else:
            hooked = action == "on"
            if switch is None:
                _diffusers_hook(pipe, hooked, seen)
            else:
                switch(pipe, hooked)
        active = handle is not None and action != "restore" and handle.report().active
        count, calls = 0 if handle is None else fused_calls(handle), seen.calls
        result = flux_call(pipe)
        if active:
            assert handle is not None
            assert fused_calls(handle) > count, f"after {action}: stock ran: {reasons(handle)}"
            assert relative(result, stock) < CLOSE
        else:
            assert handle is None or fused_calls(handle) == count, f"after {action}: the fused forward came back"
            assert torch.equal(result, stock)
        if kind == "diffusers_hook":
            assert (seen.calls > calls) == hooked, f"after {action}: the hook was lost or brought back"
        elif kind == "accelerate_hook":
            assert hasattr(pipe.transformer, "_hf_hook") == hooked
    assert "_old_forward" not in pipe.transformer.__dict__


@pytest.mark.parametrize("accelerate_first", [True, False])
def test_group_offload_runs_stock_and_counts_it(accelerate_first: bool) -> None:
    pipe = flux_pipe()
    stock = flux_call(pipe)
    handle = fusedit.accelerate(pipe) if accelerate_first else None
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    handle = handle or fusedit.accelerate(pipe)
    assert torch.equal(flux_call(pipe), stock)
    assert any("hook" in reason or "wrapped" in reason for reason in reasons(handle))
    handle.restore()
    assert torch.equal(flux_call(pipe), stock)


@torch.no_grad()
def test_sequential_offload_runs_stock_and_counts_it() -> None:
    """The weights are on the meta device when the forward is called."""
    from accelerate import cpu_offload

    pipe = flux_pipe()
    pipe.transformer.requires_grad_(False)
    arguments = direct_arguments(pipe)
    stock = pipe.transformer(**arguments)[0]
    handle = fusedit.accelerate(pipe)
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
    assert next(pipe.transformer.parameters()).is_meta
    assert torch.equal(pipe.transformer(**arguments)[0], stock)
    assert fused_calls(handle) == 0
    reasons = {reason for site in handle.report().rewritten for reason in site.reasons}
    assert reasons == {"weights are moved layer by layer (offload)"}


def test_offloaded_weights_are_not_packed() -> None:
    pipe = flux_pipe()
    before = parameters_of(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    assert same_parameters(pipe, before)
    assert any("offload" in reason for reason in reasons(handle))


def _reasons_for_packing(pipe: Any) -> set[str]:
    handle = fusedit.accelerate(pipe)
    with torch.no_grad():
        fused = flux_call(pipe)
        with handle.paused():
            assert relative(fused, flux_call(pipe)) < CLOSE
    site = next(site for site in handle.report().rewritten if site.site == "flux.packed_qkv")
    handle.restore()
    return set(site.reasons)


def test_pipelines_loaded_or_run_under_inference_mode_keep_working() -> None:
    with torch.inference_mode():
        pipe = flux_pipe()
        stock = flux_call(pipe)
    assert any("inference_mode" in reason for reason in _reasons_for_packing(pipe))
    assert torch.equal(flux_call(pipe), stock)
    pipe = flux_pipe()
    before = parameters_of(pipe)
    handle = fusedit.accelerate(pipe)
    with torch.inference_mode():
        flux_call(pipe)
        handle.restore()
    assert same_parameters(pipe, before)
    assert not any(parameter.is_inference() for parameter in pipe.transformer.parameters())


def test_tied_and_shared_weights_stay_tied_and_shared() -> None:
    pipe = flux_pipe()
    attn = pipe.transformer.transformer_blocks[0].attn
    attn.to_v.weight = attn.to_k.weight
    assert any("share a weight" in reason for reason in _reasons_for_packing(pipe))
    assert attn.to_v.weight is attn.to_k.weight
    pipe = flux_pipe()
    pipe.transformer.share_memory()
    assert any("between processes" in reason for reason in _reasons_for_packing(pipe))
    assert all(parameter.is_shared() for parameter in pipe.transformer.parameters())


def test_weights_that_are_slices_of_one_buffer_stay_that() -> None:
    pipe = flux_pipe()
    layers = [pipe.transformer.transformer_blocks[0].attn.to_q, pipe.transformer.transformer_blocks[1].attn.to_k]
    buffer = torch.cat([layer.weight.detach().flatten() for layer in layers])
    for layer, part in zip(layers, torch.split(buffer, [layer.weight.numel() for layer in layers]), strict=True):
        layer.weight.data = part.view_as(layer.weight)
    before = parameters_of(pipe)
    assert any("shares its storage" in reason for reason in _reasons_for_packing(pipe))
    assert same_parameters(pipe, before)
    assert all(layer.weight.untyped_storage().data_ptr() == buffer.data_ptr() for layer in layers)


def test_a_pickle_needs_no_fusedit_and_is_no_larger_than_stock() -> None:
    pipe = flux_pipe()
    size = len(pickle.dumps(pipe))
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    pickled = pickle.dumps(pipe)
    assert b"fusedit" not in pickled
    assert len(pickled) < 1.02 * size
    copied = pickle.loads(pickled)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in copied.transformer.parameters())
    assert len(pickle.dumps(copied)) < 1.02 * size
    before = fused_calls(handle)
    flux_call(pipe)
    assert fused_calls(handle) > before
    handle.restore()
    assert "__reduce_ex__" not in pipe.transformer.__dict__


def test_a_pickle_is_no_larger_when_the_accelerated_pipeline_is_gone() -> None:
    pipe = flux_pipe()
    transformer = pipe.transformer
    size = len(pickle.dumps(transformer))
    fusedit.accelerate(pipe)
    flux_call(pipe)
    del pipe
    gc.collect()
    assert not all(p.untyped_storage().nbytes() == p.nbytes for p in transformer.parameters())
    assert len(pickle.dumps(transformer)) < 1.02 * size
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in transformer.parameters())


def test_a_pipeline_without_denoiser_is_refused() -> None:
    pipe = flux_pipe()
    pipe.transformer = None
    with pytest.raises(UnsupportedPipelineError, match="no transformer"):
        fusedit.accelerate(pipe)


def test_gradients_go_through_stock_and_say_so() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    arguments = direct_arguments(pipe)
    y = pipe.transformer(**arguments)[0]
    y.sum().backward()
    assert pipe.transformer.x_embedder.weight.grad is not None
    assert fused_calls(handle) == 0
    assert any("gradients" in reason for reason in reasons(handle))
    with torch.no_grad():
        fused = pipe.transformer(**arguments)[0]
    assert fused_calls(handle) > 0
    assert relative(fused, y.detach()) < CLOSE


def direct_arguments(pipe: Any, batch: int = 1, text: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    config = pipe.transformer.config
    inputs = flux_inputs(pipe, batch, text)
    ids = torch.zeros(12, 3)
    ids[:, 1], ids[:, 2] = torch.arange(12) // 4, torch.arange(12) % 4
    return {
        "hidden_states": torch.randn(batch, 12, config.in_channels, generator=generator),
        "encoder_hidden_states": inputs["prompt_embeds"],
        "pooled_projections": inputs["pooled_prompt_embeds"],
        "timestep": torch.linspace(0.3, 0.7, batch),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.full((batch,), 3.5) if config.guidance_embeds else None,
        "return_dict": False,
    }


def test_inner_hooks_training_and_autocast_go_through_stock() -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    seen = []
    hook = pipe.transformer.transformer_blocks[1].ff.register_forward_hook(lambda *_: seen.append(1))
    flux_call(pipe)
    assert seen
    assert any("forward hook" in reason for reason in reasons(handle))
    assert fused_calls(handle) == 0
    hook.remove()
    flux_call(pipe)
    assert fused_calls(handle) > 0


def test_already_compiled_and_quantised_transformers_are_refused_by_name() -> None:
    pipe = flux_pipe()
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedPipelineError, match="compiled"):
        fusedit.accelerate(pipe)
    handle = fusedit.accelerate(pipe, strict=False)
    assert any("compiled" in refusal.reason for refusal in handle.report().refused)
    assert any(site.site.startswith("vae.") for site in handle.report().rewritten)

    class GGUFParameter(torch.nn.Parameter):
        pass

    pipe = flux_pipe()
    layer = pipe.transformer.x_embedder
    layer.weight = GGUFParameter(layer.weight.data, requires_grad=False)
    with pytest.raises(UnsupportedPipelineError, match="gguf"):
        fusedit.accelerate(pipe)
    for method in ("bitsandbytes", "torchao"):
        pipe = flux_pipe()
        pipe.transformer.register_to_config(quantization_config={"quant_method": method})
        with pytest.raises(UnsupportedPipelineError, match=method):
            fusedit.accelerate(pipe)


def test_whole_module_compile_wrapper_is_refused_by_name() -> None:
    pipe = flux_pipe()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(UnsupportedPipelineError, match="compiled"):
        fusedit.accelerate(pipe)


def test_compiling_after_accelerate_runs_stock_and_is_counted() -> None:
    pipe = flux_pipe()
    stock = flux_call(pipe)
    handle = fusedit.accelerate(pipe)
    pipe.transformer.compile(backend="eager")
    assert relative(flux_call(pipe), stock) < CLOSE
    assert fused_calls(handle) == 0
    assert any("was compiled after accelerate()" in note for note in handle.report().notes)
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("how", ["compiled", "exported", "exported strictly"])
def test_a_graph_of_an_accelerated_module_is_one_of_stock(how: str) -> None:
    """Without a graph break, so that nothing of the fused forward is compiled piece by piece."""
    pipe, x = flux_pipe(), torch.randn(1, 4, 5, 7)
    decoder = pipe.vae.decoder
    stock = decoder(x)
    fusedit.accelerate(pipe)
    if how == "compiled":
        made = torch.compile(decoder, backend="eager", fullgraph=True)(x)
    else:
        made = torch.export.export(decoder, (x,), strict=how.endswith("strictly")).module()(x)
    assert torch.equal(made, stock)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in jvp
@torch.no_grad()
def test_function_transforms_run_stock_and_say_why() -> None:
    pipe, x = flux_pipe(), torch.randn(2, 4, 5, 7)
    pipe.vae = tiny_vae(mid_block_add_attention=False)  # torch has neither for attention on a CPU
    decoder = pipe.vae.decoder.requires_grad_(False)
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.vmap(lambda one: decoder(one[None])[0])(x),
        lambda: torch.func.jvp(decoder, (x,), (torch.ones_like(x),)),
    ]
    stock = [call() for call in calls]
    handle = fusedit.accelerate(pipe)
    torch.testing.assert_close([call() for call in calls], stock, rtol=1e-4, atol=1e-4)
    assert reasons(handle) == {"inside a function transform (vmap, jvp)"}


def test_what_is_no_supported_pipeline_gets_one_sentence() -> None:
    with pytest.raises(UnsupportedPipelineError, match=r"takes a diffusers pipeline, not a builtins\.dict"):
        fusedit.accelerate({})  # type: ignore[arg-type]
    pipe = flux_pipe()
    with pytest.raises(PlanError, match="unknown plan 'fastest'"):
        fusedit.accelerate(pipe, "fastest")
    with pytest.raises(PlanError, match=r"unknown rewrite 'flux\.nonsense'"):
        fusedit.accelerate(pipe, Plan(rewrites={"flux.nonsense": False}))
    assert "forward" not in pipe.transformer.__dict__


def test_other_pipeline_class_names_the_supported_ones() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipe = DDPMPipeline(unet, DDPMScheduler())
    with pytest.raises(UnsupportedPipelineError, match=r"UNet2DModel.*FluxPipeline"):
        fusedit.accelerate(pipe)
    handle = fusedit.accelerate(pipe, strict=False)
    assert any("UNet2DModel" in refusal.reason for refusal in handle.report().refused)


def test_changed_forward_signature_is_refused_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.models.flux import Flux

    monkeypatch.setattr(Flux, "signature", (*Flux.signature, "gone"))
    with pytest.raises(UnsupportedPipelineError, match=r"diffusers \d"):
        fusedit.accelerate(flux_pipe())


def test_the_report_says_when_ops_run_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = fusedit.accelerate(flux_pipe())
    assert any("plain torch (no kernels for device type cpu)" in note for note in handle.report().notes)
    monkeypatch.setattr("fusedit.ops._triton._reason", "triton is not installed (gone)")
    assert any("plain torch (triton is not installed (gone))" in note for note in handle.report().notes)


def test_a_dropped_pipeline_is_collected() -> None:
    import gc
    import weakref

    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    flux_call(pipe)
    alive = weakref.ref(pipe.transformer)
    del pipe, handle
    gc.collect()
    assert alive() is None


def test_nothing_global_is_patched() -> None:
    import torch.nn.functional as F

    sdpa, forward = F.scaled_dot_product_attention, type(flux_pipe().transformer).forward
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    flux_call(pipe)
    assert F.scaled_dot_product_attention is sdpa
    assert type(pipe.transformer).forward is forward


def test_restored_first_or_last_the_weights_are_unpacked_and_nothing_holds_them() -> None:
    pipe, other = flux_pipe(), flux_pipe()
    other.register_modules(transformer=pipe.transformer)
    before = parameters_of(pipe)
    a, b = fusedit.accelerate(pipe), fusedit.accelerate(other)
    flux_call(pipe)
    a.restore()
    b.restore()  # which never drew
    assert same_parameters(pipe, before)
    del a, b
    gc.collect()
    torch.__future__.set_swap_module_params_on_conversion(True)  # refuses tensors that are held weakly
    try:
        pipe.transformer.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("kind", [FLUX, Z_IMAGE], ids=repr)
def test_narrowed_layers_whose_sizes_are_only_those_of_their_weights(kind: Any) -> None:
    pipe = kind.pipe()
    for block in (*getattr(pipe.transformer, "layers", ()), *getattr(pipe.transformer, "transformer_blocks", ())):
        ff = getattr(block, "feed_forward", None)
        first, last = ((ff.w1, ff.w3), ff.w2) if ff is not None else ((block.ff.net[0].proj,), block.ff.net[2])
        half = len(first[0].weight) // 2
        for layer in first:
            layer.weight = nn.Parameter(layer.weight[:half].clone())
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias[:half].clone())
        last.weight = nn.Parameter(last.weight[:, :half].clone())
    stock = kind.call(pipe)
    handle = fusedit.accelerate(pipe)
    assert relative(kind.call(pipe), stock) < CLOSE
    assert any(site.fused for site in handle.report().rewritten if site.site.startswith(kind.name))
