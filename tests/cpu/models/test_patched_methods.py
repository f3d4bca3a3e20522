"""Methods that someone replaced, on a class or on one module: they run, and the report names them."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.normalization import AdaLayerNormZero, RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers import transformer_flux, transformer_z_image
from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from support.pipes import tiny_vae
from support.runs import FLUX, KINDS, Z_IMAGE, Kind, fused, reasons
from torch import nn
from torch.nn import functional

import fusedit
from fusedit.errors import UnsupportedPipelineError
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.runtime import form as forms
from fusedit.runtime.inspect_module import Difference, inner_reason
from fusedit.runtime.methods import methods_of, replaced_method

_flux: Any = transformer_flux
_z_image: Any = transformer_z_image
stock_attention = functional.scaled_dot_product_attention
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


class Patch(NamedTuple):
    """One method of a class that a call of the pipeline runs in stock."""

    kind: Kind
    owner: Any
    name: str


PATCHES = [
    Patch(FLUX, FluxTransformer2DModel, "forward"),
    Patch(FLUX, _flux.FluxTransformerBlock, "forward"),
    Patch(FLUX, _flux.FluxSingleTransformerBlock, "__call__"),
    Patch(FLUX, AdaLayerNormZero, "forward"),
    Patch(FLUX, _flux.FluxAttention, "forward"),
    Patch(FLUX, _flux.FluxAttnProcessor, "__call__"),
    Patch(FLUX, TimestepEmbedding, "forward"),
    Patch(FLUX, nn.Linear, "forward"),
    Patch(FLUX, nn.Module, "_call_impl"),
    Patch(FLUX, _flux.FluxTransformerBlock, "_call_impl"),
    Patch(Z_IMAGE, nn.Linear, "_call_impl"),
    Patch(Z_IMAGE, ZImageTransformer2DModel, "forward"),
    Patch(Z_IMAGE, ZImageTransformer2DModel, "patchify_and_embed"),
    Patch(Z_IMAGE, _z_image.ZImageTransformerBlock, "forward"),
    Patch(Z_IMAGE, _z_image.FeedForward, "_forward_silu_gating"),
    Patch(Z_IMAGE, _z_image.TimestepEmbedder, "timestep_embedding"),
    Patch(Z_IMAGE, _z_image.ZSingleStreamAttnProcessor, "__call__"),
    Patch(Z_IMAGE, RMSNorm, "forward"),
    Patch(Z_IMAGE, nn.Module, "__call__"),
]
each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner.__name__}.{patch.name}")


def counting(stock: Callable[..., Any], calls: list[None]) -> Any:
    """What does the same as a method, and counts its calls."""

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return stock(*args, **kwargs)

    return mine


def put(monkeypatch: pytest.MonkeyPatch, patch: Patch, wrapped: bool = False) -> list[None]:
    """Replace the method until the test ends; gives the list that grows with each of its calls."""
    calls: list[None] = []
    stock = getattr(patch.owner, patch.name)
    mine = counting(stock, calls)
    if wrapped:
        mine = functools.wraps(stock)(mine)
    static = isinstance(vars(patch.owner).get(patch.name), staticmethod)
    monkeypatch.setattr(patch.owner, patch.name, staticmethod(mine) if static else mine)
    return calls


def named(patch: Patch) -> str:
    return f"{patch.owner.__name__}.{patch.name} was replaced by a function of {__name__}"


@each_patch
def test_a_method_replaced_after_accelerate_runs_and_is_named(patch: Patch) -> None:
    pipe = patch.kind.pipe()
    handle = fusedit.accelerate(pipe)
    drawn = patch.kind.call(pipe)
    before = fused(handle)
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = put(monkeypatch, patch)
        other = patch.kind.call(pipe)
        counted = len(calls)
        with handle.paused():
            assert torch.equal(patch.kind.call(pipe), other)
        assert counted > 0
        assert len(calls) == 2 * counted
    assert fused(handle) == before
    assert reasons(handle) == {named(patch)}
    assert torch.equal(patch.kind.call(pipe), drawn)
    assert fused(handle) > before


@each_patch
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wraps"])
def test_a_method_replaced_before_is_refused_by_name(
    patch: Patch, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_MADE", {})  # as if nothing had been looked at yet
    pipe = patch.kind.pipe()
    with pytest.MonkeyPatch.context() as inner:
        calls = put(inner, patch, wrapped)
        with pytest.raises(UnsupportedPipelineError) as raised:
            fusedit.accelerate(pipe)
        assert named(patch) in str(raised.value)
        handle = fusedit.accelerate(pipe, strict=False)
        refused = {refusal.reason for refusal in handle.report().refused if refusal.site.startswith(patch.kind.name)}
        assert refused == {named(patch)}
        calls.clear()
        patch.kind.call(pipe)
        assert calls
        handle.restore()
    handle = fusedit.accelerate(pipe)
    patch.kind.call(pipe)
    assert fused(handle) > 0
    assert not reasons(handle)


def test_a_forward_with_other_arguments_is_not_taken_for_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    put(monkeypatch, Patch(FLUX, FluxTransformer2DModel, "forward"))
    with pytest.raises(UnsupportedPipelineError) as raised:
        fusedit.accelerate(pipe)
    assert "FluxTransformer2DModel.forward was replaced" in str(raised.value)
    assert "install diffusers" not in str(raised.value)


@pytest.mark.parametrize("path", ["layers.1.feed_forward._forward_silu_gating", "patchify_and_embed"])
def test_a_method_replaced_on_one_module_runs_and_is_named(path: str) -> None:
    pipe = Z_IMAGE.pipe()
    handle = fusedit.accelerate(pipe)
    drawn = Z_IMAGE.call(pipe)
    before, calls = fused(handle), []
    owner_path, _, name = path.rpartition(".")
    owner = pipe.transformer.get_submodule(owner_path)
    setattr(owner, name, counting(getattr(owner, name), calls))
    Z_IMAGE.call(pipe)
    assert calls
    assert fused(handle) == before
    assert len(reasons(handle)) == 1
    assert all(word in reasons(handle).pop() for word in (name, owner_path or "the module", __name__))
    delattr(owner, name)
    assert torch.equal(Z_IMAGE.call(pipe), drawn)
    assert fused(handle) > before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Decoder, "forward"),
        (UpDecoderBlock2D, "forward"),
        (ResnetBlock2D, "forward"),
        (Upsample2D, "forward"),
        (Attention, "forward"),
        (AttnProcessor2_0, "__call__"),
        (nn.Conv2d, "_conv_forward"),
        (nn.GroupNorm, "forward"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@torch.no_grad()
def test_what_is_replaced_in_the_decoder_runs_and_is_named(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Z_IMAGE.pipe()
    pipe.register_modules(vae=tiny_vae())
    z = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    patch = Patch(Z_IMAGE, owner, name)
    handle = fusedit.accelerate(pipe)
    drawn = pipe.vae.decode(z).sample
    with pytest.MonkeyPatch.context() as inner:
        calls = put(inner, patch)
        pipe.vae.decode(z)
        assert calls
    vae = [site for site in handle.report().rewritten if site.site.startswith("vae.")]
    assert {reason for site in vae for reason in site.reasons} >= {named(patch)}
    before = fused(handle)
    assert torch.equal(pipe.vae.decode(z).sample, drawn)
    assert fused(handle) > before
    handle.restore()
    monkeypatch.setattr(forms, "_MADE", {})
    put(monkeypatch, patch)
    refused = fusedit.accelerate(pipe, strict=False).report().refused
    assert {refusal.reason for refusal in refused if refusal.site.startswith("vae.")} == {named(patch)}


def test_a_replaced_method_changes_the_picture_as_it_does_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    other = copy.deepcopy(pipe)
    fusedit.accelerate(pipe)
    stock = _flux.FluxTransformerBlock.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        return tuple(part / 2 for part in stock(*args, **kwargs))

    monkeypatch.setattr(_flux.FluxTransformerBlock, "forward", halved)
    assert torch.equal(FLUX.call(pipe), FLUX.call(other))


def test_what_no_call_runs_may_be_replaced_or_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MADE", {})
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda _: None)
    monkeypatch.setattr(nn.Linear, "helper", lambda _: None, raising=False)
    monkeypatch.setattr(FluxTransformer2DModel, "teacache", True, raising=False)
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe)
    FLUX.call(pipe)
    assert fused(handle) > 0
    assert not reasons(handle)


class _Same:
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


_Same.__qualname__ = "FluxTransformerBlock"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (_flux.FluxSingleTransformerBlock.forward, "a function of diffusers.models.transformers.transformer_flux"),
        (torch.no_grad()(lambda *_: None), f"a function of {__name__}"),
        (vars(_Same)["forward"], f"a function of {__name__}"),
        (functools.wraps(_flux.FluxTransformerBlock.forward)(lambda *_: None), f"a function of {__name__}"),
        (torch.no_grad()(_flux.FluxTransformerBlock.forward), "a function of torch.utils._contextlib"),
        (types.MethodType(lambda *_: None, object()), f"a function of {__name__}"),
        (functools.partial(print), "a partial"),
        (MagicMock(), "a MagicMock"),
    ],
    ids=["another class", "no_grad", "same names", "wraps", "only decorated", "bound", "partial", "mock"],
)
def test_the_first_look_tells_what_the_class_was_not_written_with(
    value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replaced_method(_flux.FluxTransformerBlock) is None
    monkeypatch.setattr(_flux.FluxTransformerBlock, "forward", value)
    expected = f"FluxTransformerBlock.forward was replaced by {words}"
    assert replaced_method(_flux.FluxTransformerBlock) == expected
    monkeypatch.setattr(forms, "_MADE", {})
    with torch.device("meta"):
        module = Flux.tiny()
    reason = inner_reason(module, Flux.known, Flux.form_of(module))
    assert isinstance(reason, Difference)
    assert reason == expected


def test_a_method_that_was_taken_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ZImage.tiny()
    form = ZImage.form_of(module)
    assert inner_reason(module, ZImage.known, form) is None
    for owner, name in ((_z_image.FeedForward, "_forward_silu_gating"), (_z_image.FeedForward, "forward")):
        with monkeypatch.context() as inner:
            inner.delattr(owner, name)
            assert inner_reason(module, ZImage.known, form) == f"FeedForward.{name} was taken away"
    assert inner_reason(module, ZImage.known, form) is None


def test_methods_are_those_that_a_call_may_run() -> None:
    assert methods_of(nn.Linear) == ["__call__", "forward", "_call_impl"]
    assert methods_of(nn.Conv2d) == ["__call__", "forward", "_call_impl", "_conv_forward"]
    assert methods_of(nn.ModuleList) == ["__call__", "_call_impl"]
    assert methods_of(_flux.FluxAttnProcessor) == ["__call__"]
    assert set(methods_of(_z_image.FeedForward)) == {"__call__", "forward", "_call_impl", "_forward_silu_gating"}
    assert {"patchify_and_embed", "_patchify_image", "unpatchify"} < set(methods_of(ZImageTransformer2DModel))
    assert not {"__init__", "to", "dtype"} & set(methods_of(ZImageTransformer2DModel))


@each_kind
def test_another_attention_function_for_all_runs_and_is_named(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    drawn = kind.call(pipe)
    before, calls = fused(handle), []
    with monkeypatch.context() as inner:
        inner.setattr(functional, "scaled_dot_product_attention", counting(stock_attention, calls))
        kind.call(pipe)
    assert calls
    assert fused(handle) == before
    assert reasons(handle) == {f"scaled_dot_product_attention was replaced by a function of {__name__}"}
    assert torch.equal(kind.call(pipe), drawn)
    assert fused(handle) > before


def test_a_pipeline_that_shares_the_module_runs_the_class_s_forward_of_this_moment() -> None:
    pipe = FLUX.pipe()
    other = FLUX.pipe()
    other.register_modules(transformer=pipe.transformer)
    fusedit.accelerate(pipe)
    FLUX.call(other)
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = put(monkeypatch, Patch(FLUX, FluxTransformer2DModel, "forward"))
        FLUX.call(other)
        assert calls


def test_a_compiled_call_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe)
    FLUX.call(pipe)
    before, calls = fused(handle), []
    block = _flux.FluxTransformerBlock
    monkeypatch.setattr(block, "_compiled_call_impl", counting(nn.Module._call_impl, calls))
    FLUX.call(pipe)
    assert calls
    assert fused(handle) == before
    assert reasons(handle) == {f"FluxTransformerBlock._compiled_call_impl was replaced by a function of {__name__}"}


def test_a_patch_during_restore_does_not_stay_inside_a_hook() -> None:
    pipe = FLUX.pipe()
    add_hook_to_module(pipe.transformer, ModelHook())
    handle = fusedit.accelerate(pipe)
    drawn = FLUX.call(pipe)
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = put(monkeypatch, Patch(FLUX, FluxTransformer2DModel, "forward"))
        FLUX.call(pipe)  # as in stock, the hook has bound the one before
        handle.restore()
    assert calls == []
    FLUX.call(pipe)
    remove_hook_from_module(pipe.transformer)
    assert torch.allclose(FLUX.call(pipe), drawn, atol=1e-4)
    assert calls == []
