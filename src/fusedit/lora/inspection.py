"""inspect(): what is in a LoRA file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fusedit.lora.layers import LoraFile, LoraLayer


def inspect(file: LoraFile) -> dict[str, Any]:
    """All there is to say about a LoRA, as JSON data.

    Returns:
        `format`, `family`, `keys`; `parts`: part -> `layers` (how many), `ranks` and `alphas` (each value -> how many
        layers), `scales` (least and most), `dora` and `dense` (how many layers; dense: of full rank), `modules` (path
        with `*` for numbers -> how many), `bytes`; `extra`: parameters beside the layers; `unmatched`; `notes`.
    """
    parts = {"transformer": file.layers, **file.text}
    return {
        "format": file.format,
        "family": file.family,
        "keys": file.keys,
        "parts": {part: _part(layers) for part, layers in parts.items() if layers},
        "extra": _kinds(file.extra),
        "unmatched": list(file.unmatched),
        "notes": list(file.notes),
    }


def _part(layers: Mapping[str, LoraLayer]) -> dict[str, Any]:
    scales = [layer.scale for layer in layers.values()]
    tensors = [tensor for layer in layers.values() for tensor in layer if isinstance(tensor, Tensor)]
    return {
        "layers": len(layers),
        "ranks": _sorted(layer.rank for layer in layers.values()),
        "alphas": _sorted(layer.alpha for layer in layers.values()),
        "scales": [min(scales), max(scales)],
        "dora": sum(layer.magnitude is not None for layer in layers.values()),
        "dense": sum(layer.rank == min(layer.up.shape[0], layer.down.shape[1]) for layer in layers.values()),
        "modules": _kinds(layers),
        "bytes": _bytes(tensors),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """A matrix that several layers share counts once."""
    own = {(tensor.data_ptr(), tensor.shape): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(own.values())


def _sorted(values: Iterable[float | None]) -> dict[str, int]:
    """Value -> how many, smallest first; `none` for none."""
    counts = Counter(values)
    ordered = sorted(counts, key=lambda value: -1.0 if value is None else value)
    return {"none" if value is None else f"{value:g}": counts[value] for value in ordered}


def _kinds(paths: Iterable[str]) -> dict[str, int]:
    """Paths with `*` for the number of the block -> how many."""
    return dict(Counter(re.sub(r"\.\d+\.", ".*.", path, count=1) for path in paths))
