"""Whole diffusers pipelines with random weights, small enough to draw in a tenth of a second on a CPU."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

WORDS = ("red", "green", "blue", "apple", "fox", "snow", "cat", "a", "the", "in", ",", "3d", "style")
VOCABULARY = {word: index for index, word in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", *WORDS))}
SMALL = {"width": 48, "height": 32, "steps": 2}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %} the"


def _tokenizer(length: int) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=length,
        chat_template=CHAT,
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.36,
        shift_factor=0.11,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def flux_pipe(guidance_embeds: bool = True) -> FluxPipeline:
    """A FluxPipeline: 1 double and 1 single block, two heads of 16."""
    torch.manual_seed(0)
    common = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 2}
    clip = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=CLIPTextModel(CLIPTextConfig(bos_token_id=1, **clip, **common)).eval(),
        tokenizer=_tokenizer(77),
        text_encoder_2=T5EncoderModel(
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **common)
        ).eval(),
        tokenizer_2=_tokenizer(512),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 4, 8),
        ).eval(),
    )


def z_image_pipe() -> ZImagePipeline:
    """A ZImagePipeline: one layer and one refiner of each kind, two heads of 16."""
    torch.manual_seed(0)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=Qwen3Model(
            Qwen3Config(
                vocab_size=len(VOCABULARY),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
            )
        ).eval(),
        tokenizer=_tokenizer(512),
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 4, 8],
            axes_lens=[1024, 256, 256],
        ).eval(),
    )
