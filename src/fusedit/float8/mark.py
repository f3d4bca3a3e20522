"""The mark of a converted model in its config, so that whoever saves it saves that too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

METHOD: Final = "fusedit"
_KEY: Final = "quantization_config"


def put(module: Any, precision: Mapping[str, str]) -> None:
    """Say in the config of a diffusers module which of its layers are e4m3; other modules have no config."""
    config = module.__dict__.get("_internal_dict")
    if config is not None:
        mark = {"quant_method": METHOD, "schema": 1, "precision": dict(precision)}
        module.__dict__["_internal_dict"] = type(config)({**config, _KEY: mark})


def take(module: Any) -> None:
    """The config without the mark."""
    config = module.__dict__.get("_internal_dict")
    if config is not None and _KEY in config:
        module.__dict__["_internal_dict"] = type(config)({k: v for k, v in config.items() if k != _KEY})
