"""FLUX.1: the names of Black Forest Labs (and of kohya and ai-toolkit after them), of XLabs, and of diffusers."""

from __future__ import annotations

from typing import Final

from fusedit.lora.names import Names, table

_QKV: Final = ("attn.to_q", "attn.to_k", "attn.to_v")
_TEXT_QKV: Final = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_NORMS: Final = ("attn.norm_q", "attn.norm_k")
_TEXT_NORMS: Final = ("attn.norm_added_q", "attn.norm_added_k")

_DOUBLE: Final = table(
    img_attn_qkv=_QKV,
    txt_attn_qkv=_TEXT_QKV,
    img_attn_proj="attn.to_out.0",
    txt_attn_proj="attn.to_add_out",
    img_mlp_0="ff.net.0.proj",
    img_mlp_2="ff.net.2",
    txt_mlp_0="ff_context.net.0.proj",
    txt_mlp_2="ff_context.net.2",
    img_mod_lin="norm1.linear",
    txt_mod_lin="norm1_context.linear",
    img_attn_norm_query_norm="attn.norm_q",
    img_attn_norm_key_norm="attn.norm_k",
    txt_attn_norm_query_norm="attn.norm_added_q",
    txt_attn_norm_key_norm="attn.norm_added_k",
    processor_qkv_lora1=_QKV,  # XLabs
    processor_qkv_lora2=_TEXT_QKV,
    processor_proj_lora1="attn.to_out.0",
    processor_proj_lora2="attn.to_add_out",
)
_SINGLE: Final = table(
    linear1=(*_QKV, "proj_mlp"),
    linear2="proj_out",
    modulation_lin="norm.linear",
    norm_query_norm="attn.norm_q",
    norm_key_norm="attn.norm_k",
    processor_qkv_lora=_QKV,
    processor_proj_lora="proj_out",
)
_OWN_DOUBLE: Final = table(
    (
        *_QKV,
        *_TEXT_QKV,
        *_NORMS,
        *_TEXT_NORMS,
        "attn.to_out.0",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
        "norm1.linear",
        "norm1_context.linear",
    )
)
_OWN_SINGLE: Final = table((*_QKV, *_NORMS, "norm.linear", "proj_mlp", "proj_out"))
_EMBEDDERS: Final = {"time": "timestep_embedder", "vector": "text_embedder", "guidance": "guidance_embedder"}
_TIME: Final = {
    f"{name}_in_{side}_layer": f"time_text_embed.{path}.linear_{number}"
    for name, path in _EMBEDDERS.items()
    for side, number in (("in", 1), ("out", 2))
}

FLUX: Final = Names(
    blocks={
        "double_blocks": ("transformer_blocks", _DOUBLE),
        "single_blocks": ("single_transformer_blocks", _SINGLE),
        "transformer_blocks": ("transformer_blocks", _OWN_DOUBLE),
        "single_transformer_blocks": ("single_transformer_blocks", _OWN_SINGLE),
    },
    single=table(
        ("x_embedder", "context_embedder", "norm_out.linear", "proj_out", *_TIME.values()),
        img_in="x_embedder",
        txt_in="context_embedder",
        final_layer_linear="proj_out",
        final_layer_adaLN_modulation_1="norm_out.linear",
        **_TIME,
    ),
    swapped=frozenset({"final_layer_adaLN_modulation_1"}),  # BFL: shift, scale; diffusers' norm_out: scale, shift
)
