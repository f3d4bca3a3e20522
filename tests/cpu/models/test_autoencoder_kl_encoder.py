"""The fused encoder against stock: alone, inside AutoencoderKL, tiled, sliced and with LoRA layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import vae as vae_support
from support.pipes import relative, tiny_vae
from support.vae import pipe_with
from torch import nn

import fusedit
from fusedit.models.autoencoder_kl_encoder import AutoencoderKLEncoder
from fusedit.plan import Plan

CLOSE = 1e-5
NAMES = [rewrite.name for rewrite in AutoencoderKLEncoder.rewrites]


def pictures(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.rand(*shape, generator=torch.Generator().manual_seed(4)) - 1).to(dtype)


def both(pipe: Any, x: torch.Tensor, plan: Plan | str = "exact") -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of the same pictures, fused and stock."""
    return vae_support.both(pipe, x, "vae_encoder.", lambda vae, x: vae.encode(x).latent_dist.parameters, plan)


@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (1, 3, 37, 51), (3, 3, 16, 24), (2, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("quant", [True, False])
def test_encode_matches_stock_in_fp32(shape: tuple[int, ...], attention: bool, quant: bool) -> None:
    torch.manual_seed(0)
    vae = tiny_vae(mid_block_add_attention=attention, use_quant_conv=quant)
    fused, stock = both(pipe_with(vae), pictures(*shape))
    assert relative(fused, stock) < CLOSE


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_per_block": 2},
        {"block_out_channels": (8, 12, 16, 24), "norm_num_groups": 2},
        {"in_channels": 5},
        {"latent_channels": 7},
    ],
    ids=str,
)
def test_other_configs_match_stock(changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    fused, stock = both(pipe_with(tiny_vae(**changes)), pictures(1, changes.get("in_channels", 3), 24, 40))
    assert relative(fused, stock) < CLOSE


def test_bf16_error_is_not_above_stock() -> None:
    ours, stocks = 0.0, 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        vae = tiny_vae().to(torch.bfloat16)
        x = pictures(1, 3, 48, 32, dtype=torch.bfloat16)
        with torch.no_grad():
            exact = copy.deepcopy(vae).float().encode(x.float()).latent_dist.parameters
        fused, stock = both(pipe_with(vae), x)
        ours += relative(fused, exact)
        stocks += relative(stock, exact)
    assert ours <= 1.05 * stocks


@pytest.mark.parametrize("name", NAMES)
def test_each_rewrite_can_be_switched_off(name: str) -> None:
    torch.manual_seed(0)
    pipe, x = pipe_with(tiny_vae()), pictures(1, 3, 24, 32)
    fused, stock = both(pipe, x, Plan(rewrites={name: False}))
    assert relative(fused, stock) < CLOSE
    fused, stock = both(pipe, x, Plan().without(*(other for other in NAMES if other != name)))
    assert relative(fused, stock) < CLOSE


@pytest.mark.parametrize("mode", ["tiling", "slicing"])
def test_tiled_and_sliced_encode_are_accelerated(mode: str) -> None:
    torch.manual_seed(0)
    vae = tiny_vae(sample_size=32)
    getattr(vae, f"enable_{mode}")()
    fused, stock = both(pipe_with(vae), pictures(2, 3, 80, 56))
    assert relative(fused, stock) < CLOSE


@torch.no_grad()
def test_lora_on_the_encoder_takes_effect() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    pipe, x = pipe_with(tiny_vae()), pictures(1, 3, 24, 24)
    handle = fusedit.accelerate(pipe)
    plain = pipe.vae.encode(x).latent_dist.mean
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["conv", "conv2", "conv_shortcut", "to_q"], init_lora_weights=False), pipe.vae
    )
    fused = pipe.vae.encode(x).latent_dist.mean
    site = next(site for site in handle.report().rewritten if site.site == "vae_encoder.conv2d")
    layers = [m for m in pipe.vae.encoder.modules() if type(m).__module__.startswith("peft.")]
    assert site.stock == sum(isinstance(layer.base_layer, nn.Conv2d) for layer in layers)  # each called once
    with handle.paused():
        assert relative(fused, pipe.vae.encode(x).latent_dist.mean) < CLOSE
    assert relative(fused, plain) > 1e-3


def test_encoders_that_are_refused() -> None:
    for edit, word in (
        (lambda m: setattr(m.down_blocks[0].downsamplers[0], "padding", 1), "downsampler"),
        (lambda m: setattr(m.down_blocks[0].downsamplers[0].conv, "stride", (1, 1)), "downsampler"),
        (lambda m: setattr(m, "conv_norm_out", nn.Identity()), "Identity"),
        (lambda m: setattr(m.down_blocks[1].resnets[0], "nonlinearity", nn.GELU()), "GELU"),
    ):
        encoder = AutoencoderKLEncoder.tiny()
        edit(encoder)
        assert word in (AutoencoderKLEncoder.refuse(encoder) or "")
    assert AutoencoderKLEncoder.refuse(AutoencoderKLEncoder.tiny()) is None


def test_blocks_without_a_layer_are_refused_by_name() -> None:
    pipe = pipe_with(tiny_vae(layers_per_block=0))
    handle = fusedit.accelerate(pipe)
    assert "a block without residual blocks" in str(handle.report())


@torch.no_grad()
def test_text_to_image_never_asks_for_the_encoder() -> None:
    pipe = pipe_with(tiny_vae())
    handle = fusedit.accelerate(pipe)
    pipe.vae.decode(torch.randn(1, 4, 4, 4))
    sites = {site.site: site for site in handle.report().rewritten}
    assert sites["vae.conv2d"].called
    assert not sites["vae_encoder.conv2d"].called
    assert not any(site.site.startswith("vae_encoder.") for site in handle.report().never_ran(8))
