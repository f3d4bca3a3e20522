"""One key of a LoRA file, taken apart: where it is meant for, which layer, and what the tensor is to that layer."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_ADAPTER: Final = r"(?:\.(?!weight$|bias$)[^.]+)?"
"""peft's adapter name inside a key: `lora_A.default.weight`."""
_OLD: Final = r"(?:\.lora|\.lora_linear_layer|(?<=_lora)|(?<=_lora[12]))"
"""Before `.down.weight`: trainers on diffusers' former attention processors, and XLabs."""

_ROLES: Final = {
    role: re.compile(f"(?:{pattern})$")
    for role, pattern in {
        "down": rf"\.lora_(?:A|down){_ADAPTER}\.weight|{_OLD}\.down\.weight",
        "up": rf"\.lora_(?:B|up){_ADAPTER}\.weight|{_OLD}\.up\.weight",
        "down_bias": rf"\.lora_(?:A|down){_ADAPTER}\.bias",
        "up_bias": rf"\.lora_(?:B|up){_ADAPTER}\.bias",
        "alpha": r"(?:\.lora_(?:A|down)|\.lora|\.lora_linear_layer)?(?:\.down)?(?:\.weight)?\.alpha",
        "magnitude": r"\.dora_scale|\.lora_magnitude_vector(?:\.[^.]+)*",
        **{f"lokr_{part}": rf"\.lokr_{part}{_ADAPTER}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
        **{f"hada_{part}": rf"\.hada_{part}{_ADAPTER}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
        "bias_diff": r"\.diff_b",
        "diff": r"\.diff",
        "value": r"\.weight|(?<=_norm)\.scale",  # BFL calls the weight of a norm its scale
        "bias": r"\.bias",
    }.items()
}
WHOLE: Final = frozenset({"value", "bias", "alpha"})
"""Roles that a whole model's tensors have too: a file of these alone is no LoRA."""

_SCOPES: Final = (
    (
        "text",
        re.compile(r"lora_te\d?_|text_encoders?(?:_\d)?\.(?:(?:clip_l|clip_g|t5xxl|qwen3_4b)\.)?(?:transformer\.)?"),
    ),
    ("kohya", re.compile(r"lora_unet[._]+|lycoris_+")),
    ("onetrainer", re.compile(r"lora_transformer_")),
    ("comfy", re.compile(r"(?:model\.)?diffusion_model\.")),
    ("diffusers", re.compile(r"base_model\.model\.|transformer\.|default\.")),
)


class Key(NamedTuple):
    """A key in parts.

    Attributes:
        scopes: what its prefixes say: `text`, `kohya`, `onetrainer`, `comfy` (a `diffusion_model.`), `diffusers`.
        name: the layer as the file calls it.
        role: what the tensor is: `down`, `up`, `alpha`, `magnitude`, `lokr_w1`, ...; None: not known.
    """

    scopes: frozenset[str]
    name: str
    role: str | None


def split(key: str) -> Key:
    """Take a key apart; prefixes may be stacked (`base_model.model.transformer.`)."""
    scopes = set()
    name = key
    while (found := next(((s, m) for s, p in _SCOPES if (m := p.match(name)) is not None), None)) is not None:
        scopes.add(found[0])
        name = name[found[1].end() :]
    for role, pattern in _ROLES.items():
        if (end := pattern.search(name)) is not None and end.start() > 0:
            return Key(frozenset(scopes), name[: end.start()], role)
    return Key(frozenset(scopes), name, None)
