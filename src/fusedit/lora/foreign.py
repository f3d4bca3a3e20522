"""LoRAs for other models, and adapters that are no low-rank change: known by their keys, refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from fusedit.errors import LoraError

_MODELS: Final = {
    "Stable Diffusion 1, 2 or XL": r"(?:^|[._])(?:(?:down|up|input|output)_blocks|mid_block|middle_block)[._]",
    "Qwen-Image": r"transformer_blocks[._]\d+[._](?:img|txt)_(?:mlp[._]net|mod)[._]",
    "Stable Diffusion 3": r"joint_blocks[._]",
    "PixArt, LTX-Video, CogVideoX or Stable Diffusion 3.5": r"transformer_blocks[._]\d+[._]attn[12][._]",
    "Wan or Cosmos": r"(?:^|[._])blocks[._]\d+[._](?:self_attn|cross_attn)[._]",
    "HunyuanVideo": r"(?:img|txt)_mlp[._]fc[12]|individual_token_refiner|double_blocks\.\d+\.(?:img|txt)_attn_\w+\.",
    "FLUX.2": r"(?:double|single)_stream_modulation|to_qkv_mlp_proj|ff(?:_context)?[._]linear_(?:in|out)",
    "HiDream": r"(?:double|single)_stream_blocks[._]",
    "Chroma": r"distilled_guidance_layer",
    "AuraFlow": r"joint_transformer_blocks[._]",
}
_ADAPTERS: Final = {
    "OFT": r"\.oft_\w+(?:\.\w+)*$",
    "BOFT": r"\.boft_\w+(?:\.\w+)*$",
    "GLoRA": r"\.[ab][12]\.weight$",
    "IA3": r"\.on_input$|\.ia3_l(?:\.\w+)*$",
    "VeRA": r"\.vera_lambda_\w+(?:\.\w+)*$",
    "a LoRA of convolutions with a core tensor": r"\.lora_mid\.weight$",
}


def refuse_foreign(keys: Iterable[str]) -> None:
    """Look at the names alone.

    Raises:
        LoraError: they are those of another model, or of another kind of adapter.
    """
    listed = list(keys)
    for model, pattern in _MODELS.items():
        if (key := _first(pattern, listed)) is not None:
            raise LoraError(f"the LoRA is for {model} (key {key!r}); load one made for FLUX.1 or Z-Image")
    for kind, pattern in _ADAPTERS.items():
        if (key := _first(pattern, listed)) is not None:
            raise LoraError(
                f"the file holds {kind} (key {key!r}), not a LoRA, LoKr or LoHa; merge it into the model first"
            )


def _first(pattern: str, keys: list[str]) -> str | None:
    searched = re.compile(pattern)
    return next((key for key in keys if searched.search(key)), None)
