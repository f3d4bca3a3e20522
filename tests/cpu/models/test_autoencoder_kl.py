"""The fused decoder against stock: alone, inside AutoencoderKL, and in a pipeline."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from support import vae as vae_support
from support.pipes import relative, tiny_vae, z_image_call, z_image_pipe
from support.vae import pipe_with
from torch import nn

import fusedit
from fusedit.models import autoencoder_kl
from fusedit.models.autoencoder_kl import AutoencoderKL, repeated
from fusedit.plan import Plan

CLOSE = 1e-5
NAMES = [rewrite.name for rewrite in AutoencoderKL.rewrites]


def latents(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).to(dtype)


def both(pipe: Any, z: torch.Tensor, plan: Plan | str = "exact") -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of the same latents, fused and stock."""
    return vae_support.both(pipe, z, "vae.", lambda vae, x: vae.decode(x, return_dict=False)[0], plan)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 4, 5, 7), (3, 4, 4, 6), (2, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("quant", [True, False])
def test_decode_matches_stock_in_fp32(shape: tuple[int, ...], attention: bool, quant: bool) -> None:
    torch.manual_seed(0)
    vae = tiny_vae(mid_block_add_attention=attention, use_post_quant_conv=quant)
    fused, stock = both(pipe_with(vae), latents(*shape))
    assert relative(fused, stock) < CLOSE


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_per_block": 2},
        {"block_out_channels": (8, 12, 16, 24), "norm_num_groups": 2},
        {"out_channels": 5},
        {"latent_channels": 7},
    ],
    ids=str,
)
def test_other_configs_match_stock(changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    vae = tiny_vae(**changes)
    fused, stock = both(pipe_with(vae), latents(1, changes.get("latent_channels", 4), 6, 4))
    assert relative(fused, stock) < CLOSE


def test_bf16_error_is_not_above_stock() -> None:
    """Against stock in fp32 on the same weights, over several seeds: ours within 5 % of stock's own error."""
    ours, stocks = 0.0, 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        vae = tiny_vae().to(torch.bfloat16)
        z = latents(1, 4, 6, 8, dtype=torch.bfloat16)
        with torch.no_grad():
            exact = copy.deepcopy(vae).float().decode(z.float()).sample
        fused, stock = both(pipe_with(vae), z)
        ours += relative(fused, exact)
        stocks += relative(stock, exact)
    assert ours <= 1.05 * stocks


@pytest.mark.parametrize("name", NAMES)
def test_each_rewrite_can_be_switched_off(name: str) -> None:
    torch.manual_seed(0)
    pipe, z = pipe_with(tiny_vae()), latents(1, 4, 6, 8)
    fused, stock = both(pipe, z, Plan(rewrites={name: False}))
    assert relative(fused, stock) < CLOSE
    fused, stock = both(pipe, z, Plan().without(*(other for other in NAMES if other != name)))
    assert relative(fused, stock) < CLOSE


def test_report_counts_each_site() -> None:
    pipe = pipe_with(tiny_vae())
    handle = fusedit.accelerate(pipe)
    with torch.no_grad():
        pipe.vae.decode(latents(1, 4, 4, 4))
    counts = {site.site: (site.fused, site.stock) for site in handle.report().rewritten}
    # Two norms in each of 2 + 4 x 2 residual blocks, one before attention, one at the end. Those behind a block that no
    # doubling follows (2 of 2, 1 of 2 in three, 1 of 2 in the last), and behind attention, take its residual along.
    assert counts["vae.group_norm_silu"] == (14, 0)
    assert counts["vae.residual_norm"] == (7, 0)
    assert counts["vae.conv2d"] == (22, 0)
    assert counts["vae.conv_out"] == (1, 0)
    assert counts["vae.upsample_conv"] == (3, 0)
    assert counts["vae.attention"] == counts["vae.channels_last"] == (1, 0)
    assert "vae.decoder: conversions between NCHW and channels_last: 2" in handle.report().notes


def test_bf16_keeps_stocks_convolution_and_says_so() -> None:
    pipe = pipe_with(tiny_vae().to(torch.bfloat16))
    handle = fusedit.accelerate(pipe)
    with torch.no_grad():
        pipe.vae.decode(latents(1, 4, 4, 4, dtype=torch.bfloat16))
    site = next(site for site in handle.report().rewritten if site.site == "vae.upsample_conv")
    assert (site.fused, site.stock) == (0, 3)
    assert all("bfloat16" in reason for reason in site.reasons)


@pytest.mark.parametrize("mode", ["tiling", "slicing"])
def test_tiled_and_sliced_decode_are_accelerated_and_stay_what_they_were(mode: str) -> None:
    """OFF-04: a requested mode is really used."""
    torch.manual_seed(0)
    pipe = pipe_with(tiny_vae(sample_size=32))
    z = latents(2, 4, 10, 7)
    calls = []
    with torch.no_grad():
        plain = pipe.vae.decode(z).sample
        getattr(pipe.vae, f"enable_{mode}")()
        stock = pipe.vae.decode(z).sample
        handle = fusedit.accelerate(pipe)
        fused = pipe.vae.decode(z).sample
        calls += [site.fused for site in handle.report().rewritten if site.site == "vae.channels_last"]
    assert relative(fused, stock) < CLOSE
    assert calls == [{"tiling": 4 * 3, "slicing": 2}[mode]]
    assert (relative(stock, plain) > 1e-3) == (mode == "tiling")


@pytest.mark.parametrize("output", ["pt", "latent"])
def test_pipeline_pictures_match_and_pause_and_restore_are_stock(output: str) -> None:
    pipe = z_image_pipe()
    before = {name: (p.detach().clone(), p.stride(), p.data_ptr()) for name, p in pipe.vae.named_parameters()}
    stock = z_image_call(pipe, output_type=output)
    handle = fusedit.accelerate(pipe)
    assert relative(z_image_call(pipe, output_type=output), stock) < 2e-5
    with handle.paused():
        assert torch.equal(z_image_call(pipe, output_type=output), stock)
    handle.restore()
    assert torch.equal(z_image_call(pipe, output_type=output), stock)
    for name, p in pipe.vae.named_parameters():  # memory format included
        assert (p.stride(), p.data_ptr()) == before[name][1:]
        assert torch.equal(p, before[name][0])


def test_nothing_global_changes() -> None:
    """NAN-05: attention elsewhere, and the library's own function, stay what they were."""
    pipe = pipe_with(tiny_vae())
    attention, picture = torch.nn.functional.scaled_dot_product_attention, torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        fusedit.accelerate(pipe)
        pipe.vae.decode(latents(1, 4, 4, 4))
        pipe.vae.encode(picture)
    assert torch.nn.functional.scaled_dot_product_attention is attention


@torch.no_grad()
def test_new_weights_take_effect_at_once() -> None:
    pipe = pipe_with(tiny_vae())
    fusedit.accelerate(pipe)
    z = latents(1, 4, 4, 4)
    first = pipe.vae.decode(z).sample
    conv = pipe.vae.decoder.up_blocks[0].upsamplers[0].conv
    conv.weight.data.mul_(-1.5)  # no version counter sees this
    second = pipe.vae.decode(z).sample
    conv.weight = nn.Parameter(conv.weight * 0.5)
    third = pipe.vae.decode(z).sample
    for changed, before in ((second, first), (third, second)):
        assert relative(changed, before) > 1e-3
    assert relative(third, pipe.vae.decoder.__class__.forward(pipe.vae.decoder, z)) < CLOSE


# What is left to stock


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"norm_type": "spatial", "block_out_channels": (32, 32, 32), "norm_num_groups": 32}, "SpatialNorm"),
        ({"act_fn": "gelu"}, "GELU"),
        ({"up_block_types": ("AttnUpDecoderBlock2D",) * 3}, "AttnUpDecoderBlock2D"),
    ],
)
def test_decoders_that_are_refused(change: dict[str, Any], word: str) -> None:
    assert word in (AutoencoderKL.refuse(AutoencoderKL.tiny(**change)) or "")
    assert AutoencoderKL.refuse(AutoencoderKL.tiny()) is None


def test_edited_decoders_are_refused() -> None:
    """Parts that the config does not show."""
    for edit, word in (
        (lambda m: setattr(m.up_blocks[0].upsamplers[0], "interpolate", False), "upsampler"),
        (lambda m: setattr(m.up_blocks[0].upsamplers[0].conv, "padding", (0, 0)), "upsampler"),
        (lambda m: setattr(m.up_blocks[1].resnets[0], "output_scale_factor", 2.0), "output_scale_factor"),
        (lambda m: setattr(m.mid_block.resnets[0], "time_emb_proj", nn.Linear(2, 2)), "time embedding"),
        (lambda m: setattr(m, "mid_block", nn.Identity()), "Identity"),
    ):
        decoder = AutoencoderKL.tiny()
        edit(decoder)
        assert word in (AutoencoderKL.refuse(decoder) or "")


@torch.no_grad()
def test_float16_is_widened_and_its_bits_come_back() -> None:
    """NAN-02: a float16 VAE whose activations overflow draws what float32 draws, and stays float16."""
    torch.manual_seed(0)
    vae = tiny_vae()
    vae.decoder.conv_in.weight.mul_(3e5)  # GroupNorm takes it back, but not before float16 has overflowed
    vae.encoder.conv_in.weight.mul_(3e5)
    vae.to(torch.float16)
    vae.decoder.conv_in.weight.clamp_(-6e4, 6e4)
    vae.encoder.conv_in.weight.clamp_(-6e4, 6e4)
    pipe, z, picture = pipe_with(vae), 2 * latents(2, 4, 5, 7).half(), 2 * torch.rand(1, 3, 24, 20).half()
    before = {name: p.clone() for name, p in vae.state_dict().items()}
    truth = copy.deepcopy(vae).float()
    assert not vae.decode(z).sample.isfinite().all()
    handle = fusedit.accelerate(pipe)
    decoded, encoded = pipe.vae.decode(z).sample, pipe.vae.encode(picture).latent_dist.mean
    assert decoded.dtype == encoded.dtype == torch.float16
    assert relative(decoded.float(), truth.decode(z.float()).sample) < 2e-3
    assert relative(encoded.float(), truth.encode(picture.float()).latent_dist.mean) < 2e-3
    notes = [note for note in handle.report().notes if "float16 weights computed in float32" in note]
    assert [note.partition(":")[0] for note in notes] == ["vae.decoder", "vae.encoder"]
    handle.restore()
    for name, p in vae.state_dict().items():
        assert p.dtype == torch.float16
        assert torch.equal(p, before[name])


@torch.no_grad()
def test_float16_with_a_lora_runs_stock_and_says_why() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    pipe = pipe_with(tiny_vae().to(torch.float16))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv1"]), pipe.vae)
    handle = fusedit.accelerate(pipe)
    pipe.vae.decode(latents(1, 4, 4, 4).half())
    site = next(site for site in handle.report().rewritten if site.site == "vae.conv2d")
    assert (site.fused, dict(site.reasons)) == (
        0,
        {"float16 with a LoRA layer: only the whole of stock can be widened": 1},
    )


@torch.no_grad()
def test_other_processors_and_arguments_go_through_stock() -> None:
    pipe = pipe_with(tiny_vae())
    handle = fusedit.accelerate(pipe)
    z = latents(1, 4, 4, 4)
    attn = pipe.vae.decoder.mid_block.attentions[0]
    fused = pipe.vae.decode(z).sample
    ran = {site.site: site.fused for site in handle.report().rewritten}
    kept = attn.processor
    attn.set_processor(AttnProcessor())
    assert relative(pipe.vae.decode(z).sample, fused) < CLOSE
    attn.set_processor(kept)
    attn.rescale_output_factor = 2.0
    assert relative(pipe.vae.decode(z).sample, fused) > 1e-3
    attn.rescale_output_factor = 1.0
    norm, attn.group_norm = attn.group_norm, None
    pipe.vae.decode(z)
    attn.group_norm = norm
    with pytest.raises(RuntimeError):
        pipe.vae.decoder(z, latent_embeds=z)  # stock's own error
    with pytest.raises(RuntimeError):
        pipe.vae.decoder(z[0])  # stock's own error
    sites = [site for site in handle.report().rewritten if site.site.startswith("vae.")]
    assert all(site.fused == ran[site.site] for site in sites)
    reasons = {reason for site in sites for reason in site.reasons}
    for word in ("AttnProcessor", "rescale_output_factor", "group_norm", "latent_embeds", "3 dimensions"):
        assert any(word in reason for reason in reasons), (word, reasons)


@torch.no_grad()
def test_lora_on_the_decoder_takes_effect() -> None:
    """A LoRA layer in place of a convolution or a product is called as it is."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    pipe, z = pipe_with(tiny_vae()), latents(1, 4, 4, 4)
    handle = fusedit.accelerate(pipe)
    plain = pipe.vae.decode(z).sample
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["conv", "conv1", "to_q"], init_lora_weights=False), pipe.vae
    )
    fused = pipe.vae.decode(z).sample
    with handle.paused():
        assert relative(fused, pipe.vae.decode(z).sample) < CLOSE
    assert relative(fused, plain) > 1e-3
    reasons = {site.site: dict(site.reasons) for site in handle.report().rewritten if site.stock}
    said = "the convolution is a peft Conv2d layer"
    # conv1 of 2 + 4 x 2 residual blocks, and the three convolutions behind a doubling.
    assert reasons == {"vae.conv2d": {said: 10 + 3}, "vae.upsample_conv": {said: 3}}


@torch.no_grad()
def test_every_convolution_that_is_a_lora_layer_is_counted() -> None:
    """A decode has 6 + 16 + 1 convolutions besides those behind a doubling, and a switched-off rewrite counts none."""
    from peft import LoraConfig, inject_adapter_in_model

    pipe = pipe_with(tiny_vae())
    convolutions = ["conv1", "conv2", "conv_shortcut", "conv_in", "conv_out"]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=convolutions), pipe.vae)
    handle = fusedit.accelerate(pipe)
    pipe.vae.decode(latents(1, 4, 4, 4))
    site = next(site for site in handle.report().rewritten if site.site == "vae.conv2d")
    shortcuts = sum(name.endswith("conv_shortcut") for name, _ in pipe.vae.decoder.named_modules())
    assert (site.fused, site.stock) == (0, 2 * 10 + 2 + shortcuts)
    handle = fusedit.accelerate(pipe, Plan(rewrites={"vae.conv2d": False}))
    pipe.vae.decode(latents(1, 4, 4, 4))
    assert "vae.conv2d" not in {site.site for site in handle.report().rewritten}
    assert not next(s for s in handle._sessions if s.model.path == ("vae", "decoder")).counters.stock["vae.conv2d"]


# Doubling where it is not folded


@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize("last", [True, False])
def test_doubling_is_bitwise_for_few_and_many_pictures(count: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = latents(count, 2, 3, 4)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    stock = nn.functional.interpolate(x.contiguous(), scale_factor=2.0, mode="nearest")
    if count == 64:
        monkeypatch.setattr(autoencoder_kl.F, "interpolate", None)  # the library's kernel may not be used
    assert torch.equal(repeated(x), stock)
