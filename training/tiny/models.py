"""The sizes of the embedded models: the real classes of diffusers and transformers, small configurations."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, ZImageTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel

from tiny import tokenizers

CLIP_DIM, T5_DIM, QWEN_DIM = 128, 192, 192


def make_vae() -> AutoencoderKL:
    """Return the f8, 16-channel autoencoder that both models hold a copy of."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(64, 64, 64, 96),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=256,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=True,
        force_upcast=False,
    )


def make_flux() -> FluxTransformer2DModel:
    """Return tiny-flux's transformer."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=10,
        attention_head_dim=64,
        num_attention_heads=3,
        joint_attention_dim=T5_DIM,
        pooled_projection_dim=CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )


def make_z_image() -> ZImageTransformer2DModel:
    """Return tiny-z-image's transformer."""
    return ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=192,
        n_layers=8,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=QWEN_DIM,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[16, 24, 24],
        axes_lens=[1024, 512, 512],
    )


def make_clip() -> CLIPTextModel:
    """Return the text encoder whose pooled output conditions tiny-flux's modulation."""
    vocab = tokenizers.CLIP_VOCAB
    config = CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=CLIP_DIM,
        intermediate_size=256,
        projection_dim=CLIP_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        pad_token_id=vocab - 1,
    )
    return CLIPTextModel(config)


def make_t5() -> T5EncoderModel:
    """Return the text encoder whose token states tiny-flux attends to."""
    config = T5Config(
        vocab_size=tokenizers.T5_VOCAB,
        d_model=T5_DIM,
        d_kv=64,
        d_ff=192,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config)


def make_qwen() -> Qwen3Model:
    """Return tiny-z-image's text encoder. The pipeline reads hidden_states[-2], so its last layer is never used."""
    vocab = tokenizers.QWEN_VOCAB
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=QWEN_DIM,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=vocab - 3,
        pad_token_id=vocab - 5,
    )
    return Qwen3Model(config)


def make_scheduler(name: str) -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler: a shift that grows with the picture for tiny-flux, a fixed one for tiny-z-image."""
    if name == "tiny-flux":
        return FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=1000,
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        )
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=False)


def make_modules(name: str) -> nn.ModuleDict:
    """Return what is trained together: the transformer and its text encoders, initialised for training."""
    torch.manual_seed(0)
    parts: dict[str, nn.Module]
    if name == "tiny-flux":
        parts = {"transformer": make_flux(), "text_encoder": make_clip(), "text_encoder_2": make_t5()}
    else:
        parts = {"transformer": make_z_image(), "text_encoder": make_qwen()}
    initialise(parts["transformer"])
    return nn.ModuleDict(parts)


def initialise(transformer: nn.Module) -> None:
    """Start every block as the identity: zero modulations and a zero last layer; the rest scaled by fan-in."""
    for name, module in transformer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        is_modulation = "adaLN_modulation" in name or (".norm" in f".{name}" and name.endswith("linear"))
        if is_modulation or name == "proj_out" or name.endswith("2-1.linear"):
            nn.init.zeros_(module.weight)
