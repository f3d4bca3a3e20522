"""The text encoders' names: CLIP and T5 of FLUX, Qwen3 of Z-Image; paths as in transformers 5."""

from __future__ import annotations

from typing import Final

from fusedit.lora.names import Names, Place, flatten, table

_CLIP_LAYER: Final = table(
    (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"),
    **{f"self_attn_to_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    self_attn_to_out_0="self_attn.out_proj",
)
_QWEN_LAYER: Final = table(
    (
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
_T5_BLOCK: Final = table(
    (
        *(f"layer.0.SelfAttention.{name}" for name in ("q", "k", "v", "o")),
        *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
    )
)

_CLIP: Final = Names({"encoder_layers": ("encoder.layers", _CLIP_LAYER)}, {})
_T5: Final = Names({"encoder_block": ("encoder.block", _T5_BLOCK)}, {})
_QWEN: Final = Names({"layers": ("layers", _QWEN_LAYER)}, {})


def find_text(name: str) -> tuple[str, Place] | None:
    """(`text_encoder` or `text_encoder_2`, place) of a text encoder's layer. The name decides: trainers number the
    encoders differently (T5 is te2 to OneTrainer, te3 to kohya). None: no encoder of FLUX or Z-Image has it.
    """
    flat = flatten(name)
    for names, part, root in (
        (_CLIP, "text_encoder", "text_model_"),
        (_T5, "text_encoder_2", ""),
        (_QWEN, "text_encoder", "model_"),
    ):
        if (place := names.find(flat.removeprefix(root))) is not None:
            return part, place
    return None
