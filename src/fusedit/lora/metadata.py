"""Alphas that are not among the tensors: peft's settings in the metadata of the file, or in adapter_config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_KEY: Final = "lora_adapter_metadata"
"""Where diffusers' save_lora_weights puts it, each setting under `transformer.` or `text_encoder.`."""


def configs(path: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Part (`transformer`, `text_encoder`, ...) -> peft settings, as far as the file or its folder states them."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in _json(metadata.get(_KEY, "")).items():
        part, dot, setting = str(key).partition(".")
        if dot:
            found.setdefault(part, {})[setting] = value
    beside = path.with_name("adapter_config.json")
    if not found and path.name == "adapter_model.safetensors" and beside.is_file():
        found["transformer"] = _json(beside.read_text("utf-8", errors="replace"))
    return found


def alpha_of(config: Mapping[str, Any], path: str, rank: int) -> float | None:
    """The alpha that peft would use for this layer, with its square-root scaling folded in; None: not stated."""
    patterns = config.get("alpha_pattern")
    alpha = config.get("lora_alpha")
    if isinstance(patterns, Mapping):
        alpha = next((value for key, value in patterns.items() if _fits(str(key), path)), alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        return None
    return alpha * math.sqrt(rank) if config.get("use_rslora") is True else float(alpha)


def _fits(pattern: str, path: str) -> bool:
    """As peft reads a pattern: a regular expression for the path or for its end after a dot."""
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", path) is not None
    except re.error:
        return False


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
