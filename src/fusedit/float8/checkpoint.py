"""Checkpoints of converted models: a diffusers folder whose transformer has e4m3 weights and their scales.

Keys are stock's: `<layer>.weight` in e4m3 and beside it `<layer>.weight_scale`, fp32. The config of the transformer
says so under `quantization_config`, by a method that diffusers does not know: read by `from_pretrained` alone the codes
would pass for values, so it has to refuse them.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fusedit.errors import OutputError, UnsupportedPipelineError
from fusedit.finite import is_finite, weight_error
from fusedit.float8.conversion import mark_loaded
from fusedit.float8.linear import CODES, Float8Linear
from fusedit.float8.mark import METHOD
from fusedit.float8.source import INDEX, SINGLE

COMPONENT: Final = "transformer"
_CODES: Final = "F8_E4M3"
"""CODES, as safetensors names it."""


def marked(folder: Path) -> dict[str, str] | None:
    """Path -> precision of the converted layers of a pipeline's folder; None where it is an ordinary one.

    Raises:
        UnsupportedPipelineError: a newer version wrote it, or it has lost its mark.
    """
    try:
        config = json.loads((folder / COMPONENT / "config.json").read_text(encoding="utf-8"))
        mark = config.get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(mark, Mapping) or not mark.get("quant_method"):
        _refuse_codes(folder / COMPONENT)
        return None
    if mark["quant_method"] != METHOD:
        return None
    if mark.get("schema") != 1:
        raise UnsupportedPipelineError(
            f"the e4m3 weights of {str(folder)!r} were written by another version of fusedit (schema "
            f"{mark.get('schema')!r}, this one reads 1); upgrade it or quantise the model again"
        )
    precision = mark.get("precision")
    if not isinstance(precision, dict):
        found = f"is {precision!r:.60}, not an object of" if "precision" in mark else "is missing, which gives"
        raise UnsupportedPipelineError(
            f"the config.json of {str(folder / COMPONENT)!r} is damaged: precision in its quantization_config {found} "
            "paths with fp8 or weights; quantise the model again"
        )
    return precision


def _refuse_codes(place: Path) -> None:
    """Refuse files with codes and scales where the config does not say so: by their headers, whose data is not read."""
    kinds = {key: kind for name in _names(place) for key, kind in _kinds(place / name).items()}
    found = next((key for key in sorted(kinds) if kinds[key] == _CODES and f"{key}_scale" in kinds), None)
    if found is not None:
        raise UnsupportedPipelineError(
            f"{str(place)!r} holds float8 weights with a scale beside each ({found}), and its config.json has no "
            "quantization_config that says so; put the config.json back that was written with them, or quantise the "
            "model again"
        )


def _kinds(file: Path) -> dict[str, str]:
    """Key -> dtype, as safetensors names it, of all tensors of a file; empty where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        opener: Any = safe_open(file, framework="pt")  # its stubs leave the methods untyped
        with opener as opened:
            return {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError):  # whoever loads it says so
        return {}


def _names(place: Path) -> set[str]:
    """The files of a component; none where their index cannot be read."""
    index = place / INDEX
    if not index.is_file():
        return {SINGLE}
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def load_transformer(folder: Path, precision: Mapping[str, str], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The transformer of a marked folder, read straight onto the device: its bf16 weights never exist.

    Raises:
        UnsupportedPipelineError: the files are not what the config says.
        NonFiniteError: a scale holds NaN or infinity.
    """
    from fusedit.models import registry

    place = folder / COMPONENT
    config: dict[str, Any] = json.loads((place / "config.json").read_text(encoding="utf-8"))
    stock = {model.stock_class().__name__: model.stock_class() for model in registry().values() if model.denoiser}
    kind: Any = stock.get(config.get("_class_name", ""))
    if kind is None:
        raise UnsupportedPipelineError(
            f"{str(place)!r} is a {config.get('_class_name')!r}, which no file of fusedit.models serves; load another"
        )
    config.pop("quantization_config", None)
    with torch.device("meta"):
        module: nn.Module = kind.from_config(config)
    try:
        for path, value in precision.items():
            _empty(module, path, value, dtype)
        state = _read(place, device)
        _check(state, precision)
        module.load_state_dict(_in_dtype(state, dtype), assign=True)
    except (AttributeError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        words = " ".join(str(error).split())[:200]
        raise UnsupportedPipelineError(f"{str(place)!r} cannot be loaded: {words}; quantise the model again") from None
    module.requires_grad_(False)
    module.eval()
    mark_loaded(module, precision)
    return module


def _empty(module: nn.Module, path: str, value: str, dtype: torch.dtype) -> None:
    """Make this layer one whose codes are still to come."""
    layer: Any = module.get_submodule(path)
    if type(layer) is not nn.Linear or value not in ("fp8", "weights"):
        raise ValueError(f"its config says {value!r} of {path}, which is a {type(layer).__name__}")
    scale = torch.empty(layer.out_features, dtype=torch.float32, device="meta")
    layer.weight = nn.Parameter(torch.empty(layer.weight.shape, dtype=CODES, device="meta"), False)
    made: Any = layer
    made.__class__ = Float8Linear
    made.become(scale, dtype, value == "fp8")


def _check(state: Mapping[str, torch.Tensor], precision: Mapping[str, str]) -> None:
    """Codes and scales where the config says so, and nowhere else; missing keys are left to torch."""
    for key, t in state.items():
        path, _, name = key.rpartition(".")
        expected = {"weight": CODES, "weight_scale": torch.float32}.get(name) if path in precision else None
        if t.dtype is not expected and (expected is not None or t.dtype is CODES):
            raise ValueError(f"{key} is {t.dtype}" + (f", not {expected}" if expected else ", which its config omits"))
        if expected is torch.float32 and not is_finite(t):  # as of any other weight
            raise weight_error(f"{COMPONENT}.{key}")


def _read(place: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """All tensors of a component's files, on the device."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    names = sorted(_names(place))
    if not names:
        raise OSError(f"{INDEX} is damaged")
    for name in names:
        if not (place / name).is_file():
            raise OSError(f"{name} is missing")
        try:
            state |= load_file(place / name, device=str(device))
        except SafetensorError as error:
            raise OSError(f"{name} is damaged ({error})") from None
    return state


def _in_dtype(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same tensors; those that are neither codes nor scales in dtype."""
    scales = {key for key in state if key.endswith(".weight_scale")}
    return {
        key: t if t.dtype is CODES or key in scales or not t.is_floating_point() else t.to(dtype)
        for key, t in state.items()
    }


def save(pipe: Any, folder: Path) -> None:
    """Write a pipeline whose transformer was converted, whole or not at all.

    Raises:
        OutputError: the folder is there and not empty, or it cannot be written.
    """
    from safetensors import SafetensorError

    check_new(folder)
    temporary = folder.parent / f".{folder.name[:80]}.{secrets.token_hex(6)}.part"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        pipe.save_pretrained(temporary, safe_serialization=True, max_shard_size="5GB")
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write {str(folder)!r}: {reason}; choose another place") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Prove that a folder of this name can be made.

    Raises:
        OutputError: it is there and not empty, or its place takes no files.
    """
    from fusedit.files import check_folder

    check_folder(folder.parent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{str(folder)!r} is there already; name a new folder")
