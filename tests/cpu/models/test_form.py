"""Inner modules of known classes in another role or with other settings run stock; hooks for all modules too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.normalization import RMSNorm
from support.runs import FLUX, KINDS, Z_IMAGE, Kind, fused, reasons
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fusedit
from fusedit.errors import UnsupportedPipelineError
from fusedit.models.autoencoder_kl import AutoencoderKL
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.runtime.form import form_of
from fusedit.runtime.inspect_module import Difference, inner_reason

each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


def put(path: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    """Sets `path` of a model; make() gives the value."""
    owner, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), name, make())


def append(path: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(path).append(make())


def norm_of_everything() -> nn.Module:
    norm = nn.LayerNorm(32, eps=1e-6)
    nn.init.normal_(norm.weight)
    return norm


# what changes -> the change, then words of the reason
FLUX_CHANGES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "activation": (put("single_transformer_blocks.0.act_mlp", nn.SiLU), ("blocks.0.act_mlp'", "SiLU", "GELU")),
    "modulation": (put("transformer_blocks.0.norm1.silu", nn.GELU), ("blocks.0.norm1.silu'", "GELU", "SiLU")),
    "eps": (put("transformer_blocks.0.norm1.norm.eps", lambda: 1.0), ("eps of", "0.norm1.norm'", "1.0", "1e-06")),
    "eps-tensor": (put("transformer_blocks.0.norm1.norm.eps", lambda: torch.ones(2)), ("eps of", "Tensor", "1e-06")),
    "affine": (put("transformer_blocks.1.norm1.norm", norm_of_everything), ("1.norm1.norm'", "has a weight")),
    "kind": (
        put("transformer_blocks.0.attn.norm_q", lambda: nn.LayerNorm(16)),
        ("attn.norm_q'", "LayerNorm", "RMSNorm"),
    ),
    "longer": (append("transformer_blocks.0.ff.net", nn.SiLU), ("ff.net.3'", "SiLU", "has not")),
    "approximate": (
        put("transformer_blocks.0.ff.net.0.approximate", lambda: "none"),
        ("approximate of", "'none'", "'tanh'"),
    ),
    "final": (put("norm_out.norm.eps", lambda: 1.0), ("norm_out.norm'", "1.0")),
    "embedding": (put("time_text_embed.time_proj.downscale_freq_shift", lambda: 1), ("downscale_freq_shift", " 1, ")),
    "unbiased": (put("single_transformer_blocks.1.proj_out.bias", lambda: None), ("1.proj_out'", "no bias")),
    "no-block": (
        put("transformer_blocks.1", lambda: None),
        ("transformer_blocks.1' is missing", "FluxTransformerBlock"),
    ),
    "no-eps": (lambda model: delattr(model.transformer_blocks[0].norm1.norm, "eps"), ("0.norm1.norm' has no eps",)),
    "dropout": (put("transformer_blocks.0.ff.net.1", nn.SiLU), ("ff.net.1'", "SiLU", "Dropout")),
}
Z_IMAGE_CHANGES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "eps": (put("layers.0.attention_norm2.eps", lambda: 1.0), ("eps of", "layers.0.attention_norm2'", "1.0", "1e-05")),
    "ffn-eps": (put("layers.2.ffn_norm2.eps", lambda: 1.0), ("eps of", "layers.2.ffn_norm2'")),
    "k-eps": (put("noise_refiner.1.attention.norm_k.eps", lambda: 1.0), ("noise_refiner.1.attention.norm_k'",)),
    "k-bias": (
        put("layers.0.attention.norm_k.bias", lambda: nn.Parameter(torch.ones(16))),
        ("attention.norm_k'", "has a bias"),
    ),
    "longer": (append("layers.1.adaLN_modulation", nn.SiLU), ("layers.1.adaLN_modulation.1'", "SiLU", "has not")),
    "modulation": (put("layers.1.modulation", lambda: False), ("modulation of", "layers.1'", "False", "True")),
    "kind": (put("layers.0.attention_norm1", lambda: RMSNorm(48, 1e-5, bias=True)), ("attention_norm1'", "has a bias")),
    "shorter": (lambda model: model.all_final_layer["2-1"].adaLN_modulation.pop(1), ("1' is missing", "Linear")),
}
CHANGES = [
    pytest.param(kind, *change, id=f"{kind.name}-{name}")
    for kind, changes in ((FLUX, FLUX_CHANGES), (Z_IMAGE, Z_IMAGE_CHANGES))
    for name, change in changes.items()
]


def outcome(kind: Kind, pipe: Any) -> torch.Tensor | str:
    """What the pipeline draws, or the class of the error that the change causes in stock too."""
    try:
        return kind.call(pipe)
    except Exception as error:
        return type(error).__name__


def same(a: torch.Tensor | str, b: torch.Tensor | str) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize(("kind", "change", "words"), CHANGES)
def test_a_known_class_in_another_role_is_refused_and_followed(
    kind: Kind, change: Callable[[Any], None], words: tuple[str, ...]
) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    kind.call(pipe)
    before = fused(handle)
    other = copy.deepcopy(pipe)  # stock
    torch.manual_seed(0)
    change(pipe.transformer)
    torch.manual_seed(0)
    change(other.transformer)
    drawn = outcome(kind, other)
    assert same(outcome(kind, pipe), drawn)
    assert fused(handle) == before
    assert len(reasons(handle)) == 1
    reason = reasons(handle).pop()
    assert all(word in reason for word in words), reason
    handle.restore()
    with pytest.raises(UnsupportedPipelineError) as raised:
        fusedit.accelerate(pipe)
    assert reason in str(raised.value)
    refused = fusedit.accelerate(pipe, strict=False)
    assert {refusal.reason for refusal in refused.report().refused} == {reason}
    assert same(outcome(kind, pipe), drawn)


@each_kind
def test_a_setting_that_is_put_back_runs_fused_again(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    drawn = kind.call(pipe)
    name = "transformer_blocks.0.norm1.norm" if kind is FLUX else "layers.0.ffn_norm2"
    norm = pipe.transformer.get_submodule(name)
    norm.eps, eps = 1.0, norm.eps
    kind.call(pipe)
    stopped = fused(handle)
    norm.eps = eps
    assert torch.equal(kind.call(pipe), drawn)
    assert fused(handle) > stopped


@each_kind
def test_a_block_that_comes_later_is_looked_at(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    kind.call(pipe)
    blocks = pipe.transformer.transformer_blocks if kind is FLUX else pipe.transformer.layers
    block = copy.deepcopy(blocks[0])
    (block.norm1.norm if kind is FLUX else block.ffn_norm2).eps = 1.0
    blocks.insert(1, block)
    stock = copy.deepcopy(pipe)
    before = fused(handle)
    assert torch.equal(kind.call(pipe), kind.call(stock))
    assert fused(handle) == before
    assert any(".1." in reason and "eps" in reason for reason in reasons(handle))


def test_a_lora_layer_counts_as_what_it_wraps() -> None:
    from peft import LoraConfig

    pipe = FLUX.pipe()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))
    handle = fusedit.accelerate(pipe)
    FLUX.call(pipe)
    before = fused(handle)
    assert before > 0
    assert not reasons(handle) or all("peft" in reason or "LoRA" in reason for reason in reasons(handle))
    pipe.transformer.transformer_blocks[0].attn.to_q.base_layer = nn.Identity()
    stock = copy.deepcopy(pipe)
    assert same(outcome(FLUX, pipe), outcome(FLUX, stock))
    assert fused(handle) == before
    assert any("attn.to_q'" in reason and "Identity" in reason and "Linear" in reason for reason in reasons(handle))


def test_the_decoder_is_looked_at_too() -> None:
    decoder: Any = AutoencoderKL.tiny()
    form = AutoencoderKL.form_of(decoder)
    assert inner_reason(decoder, AutoencoderKL.known, form) is None
    decoder.up_blocks[1].resnets[0].nonlinearity = nn.GELU()
    reason = inner_reason(decoder, AutoencoderKL.known, form)
    assert isinstance(reason, Difference)
    assert "up_blocks.1.resnets.0.nonlinearity" in reason


@each_kind
@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_for_all_modules_go_through_stock(kind: Kind, register: Callable[..., Any]) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    kind.call(pipe)
    before, seen = fused(handle), set()
    handles = register(lambda module, *_: seen.add(type(module).__name__))
    try:
        drawn = kind.call(pipe)
    finally:
        handles.remove()
    assert {"Linear", "RMSNorm", "SiLU"} <= seen
    assert fused(handle) == before
    assert reasons(handle) == {"a forward hook for all modules is set"}
    with handle.paused():
        assert torch.equal(kind.call(pipe), drawn)
    kind.call(pipe)
    assert fused(handle) > before


@pytest.mark.parametrize(
    ("model", "make"),
    [
        (Flux, lambda: FluxTransformer2DModel(guidance_embeds=True)),
        (Flux, lambda: FluxTransformer2DModel(num_layers=0, num_single_layers=2)),
        (ZImage, lambda: ZImageTransformer2DModel()),
        (ZImage, lambda: ZImageTransformer2DModel(siglip_feat_dim=1152, n_refiner_layers=1)),
        (
            AutoencoderKL,
            lambda: Decoder(16, 3, ("UpDecoderBlock2D",) * 4, (128, 256, 512, 512), layers_per_block=2),
        ),
        (AutoencoderKL, lambda: Decoder(4, 3, ("UpDecoderBlock2D",) * 2, (64, 128), mid_block_add_attention=False)),
    ],
    ids=["flux-dev", "flux-single", "z-image", "z-image-omni", "vae", "vae-without-attention"],
)
def test_models_of_real_size_are_as_their_class_builds_them(model: Any, make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        module = make()
    state = torch.get_rng_state()
    form = model.form_of(module)
    assert inner_reason(module, model.known, form) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert form is model.form_of(module)


def test_a_form_keeps_no_module() -> None:
    form = form_of(nn.TransformerEncoderLayer, {"d_model": 8, "nhead": 2}, ())
    assert not any(isinstance(value, nn.Module) for value in form.children["linear1"].settings.values())
    assert form.settings == {}
    assert form.children["norm1"].settings == {"normalized_shape": (8,), "eps": 1e-05, "elementwise_affine": True}
