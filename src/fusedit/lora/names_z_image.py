"""Z-Image: the names of its authors (and of ComfyUI and kohya after them) and of diffusers."""

from __future__ import annotations

from typing import Final

from fusedit.lora.names import Names, table

_QKV: Final = ("attention.to_q", "attention.to_k", "attention.to_v")
_BLOCK: Final = table(
    (
        *_QKV,
        "attention.to_out.0",
        "attention.norm_q",
        "attention.norm_k",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
        "attention_norm1",
        "attention_norm2",
        "ffn_norm1",
        "ffn_norm2",
        "adaLN_modulation.0",
    ),
    attention_qkv=_QKV,
    attention_out="attention.to_out.0",
    attention_to_out="attention.to_out.0",
    attention_q_norm="attention.norm_q",
    attention_k_norm="attention.norm_k",
)
_PATCH: Final = "2-1"
"""The one patch size there is: 2 pixels of the latent a side, 1 frame."""

Z_IMAGE: Final = Names(
    blocks={name: (name, _BLOCK) for name in ("layers", "noise_refiner", "context_refiner", "siglip_refiner")},
    single=table(
        (
            "t_embedder.mlp.0",
            "t_embedder.mlp.2",
            "cap_embedder.0",
            "cap_embedder.1",
            "siglip_embedder.0",
            "siglip_embedder.1",
            f"all_x_embedder.{_PATCH}",
            f"all_final_layer.{_PATCH}.linear",
            f"all_final_layer.{_PATCH}.adaLN_modulation.1",
        ),
        x_embedder=f"all_x_embedder.{_PATCH}",
        final_layer_linear=f"all_final_layer.{_PATCH}.linear",
        final_layer_adaLN_modulation_1=f"all_final_layer.{_PATCH}.adaLN_modulation.1",
    ),
)
