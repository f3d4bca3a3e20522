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
        module.__dict__["_internal_dict"] = _rebuilt(config, {**config, _KEY: mark})


def take(module: Any) -> None:
    """The config without the mark."""
    module.__dict__.update(without(module.__dict__))


def there(module: Any) -> bool:
    """Whether the config has the mark."""
    mark = (module.__dict__.get("_internal_dict") or {}).get(_KEY)
    return isinstance(mark, Mapping) and mark.get("quant_method") == METHOD


def without(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module, its config without the mark; the given ones are not changed."""
    config = state.get("_internal_dict")
    if config is None or _KEY not in config:
        return state
    return {**state, "_internal_dict": _rebuilt(config, {k: v for k, v in config.items() if k != _KEY})}


def _rebuilt(config: Any, items: Mapping[str, Any]) -> Any:
    """A config of these items, with what was set on the former as an attribute: a control LoRA's width is there."""
    made = type(config)(items)
    vars(made).update({k: v for k, v in vars(config).items() if k != _KEY})
    return made
