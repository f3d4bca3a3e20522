"""Where everything of a LoRA file goes in one pipeline, all checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusedit.errors import LoraError
from fusedit.lora.adapters import why_not
from fusedit.lora.layers import LoraFile, LoraLayer
from fusedit.lora.making import Change
from fusedit.lora.matching import Match, check
from fusedit.lora.overwrite import Overwrite, overwritten
from fusedit.lora.record import LoraReport

TRANSFORMER: Final = "transformer"


@dataclass(frozen=True)
class Part:
    """What a LoRA does to one component."""

    name: str
    module: nn.Module
    match: Match
    changes: Mapping[str, Change]


def parts_of(pipe: Any, transformer: nn.Module, file: LoraFile, *, text_encoders: bool) -> list[Part]:
    """Where everything of the file goes, the transformer first. Changes nothing."""
    match = check(file, transformer)
    parts = [Part(TRANSFORMER, transformer, match, _changes(transformer, file, match))]
    for name, layers in file.text.items() if text_encoders else ():
        encoder = getattr(pipe, name, None)
        if not isinstance(encoder, nn.Module):
            raise LoraError(
                f"the LoRA changes {len(layers)} layers of {name}, which this pipeline has not; "
                "text_encoders=False leaves them out"
            )
        found = check(file, encoder, name)
        if found.missing:
            path, reason = found.missing[0]
            raise LoraError(
                f"the LoRA does not fit {name}: {path}: {reason} ({found.matched} of {found.total} layers fit); "
                "text_encoders=False leaves them out"
            )
        parts.append(Part(name, encoder, found, {path: Change(layer) for path, layer in layers.items()}))
    if not any(part.match.matched or part.match.wider for part in parts):
        listed = "; ".join(f"{path}: {reason}" for path, reason in match.missing[:2]) or "it names no layer"
        raise LoraError(f"nothing of the LoRA fits {type(transformer).__name__} ({listed}); load one made for it")
    for part in parts:
        for path, change in part.changes.items():
            refusal = why_not(part.module, path, change)
            if refusal is not None:
                raise LoraError(f"the LoRA cannot be loaded into {part.name}.{path}: {refusal}")
    return parts


def _changes(transformer: nn.Module, file: LoraFile, match: Match) -> dict[str, Change]:
    """The low-rank layers that fit, with the biases that belong to them."""
    fits = {*match.paths, *match.wider}
    changes = {path: Change(layer) for path, layer in file.layers.items() if path in fits}
    for name, value in file.extra.items():
        path, _, kind = name.removesuffix(".diff").rpartition(".")
        if path not in fits or not name.endswith(".diff"):
            continue
        inputs = getattr(transformer.get_submodule(path), "in_features", None)
        if kind != "bias" or inputs is None:
            raise LoraError(
                f"the LoRA adds to {path}.{kind}, and fusedit adds only to the weights and biases of linear layers; "
                "use a LoRA without it"
            )
        nothing = LoraLayer(
            torch.zeros(1, inputs, dtype=torch.float32), torch.zeros(len(value), 1, dtype=torch.float32), None
        )
        changes[path] = Change(changes[path].layer if path in changes else nothing, value)
    return changes


def overwrite_of(pipe: Any, transformer: nn.Module, file: LoraFile, match: Match) -> Overwrite:
    """What replaces parameters and widens layers, checked."""
    fits = set(match.paths)
    values = {
        name: value
        for name, value in file.extra.items()
        if not name.endswith(".diff") and name.rpartition(".")[0] in fits
    }
    if (values or match.wider) and overwritten(transformer):
        raise LoraError(
            "the LoRA replaces norms or widens layers, as one that is loaded already does; unload that one first"
        )
    for path, inputs in match.wider.items():
        layer: Any = transformer.get_submodule(path)
        if not type(pipe).__name__.startswith("FluxControl") or "ControlNet" in type(pipe).__name__:
            raise LoraError(
                f"the LoRA widens {path} from {layer.in_features} to {inputs} inputs for a control image, which "
                f"{type(pipe).__name__} does not take; load it into a FluxControlPipeline"
            )
        if hasattr(layer, "base_layer"):
            raise LoraError(f"the LoRA widens {path}, which has another LoRA; load this one first")
    return Overwrite(transformer, values, match.wider)


def report_of(
    name: str, source: str | None, file: LoraFile, scale: float, parts: list[Part], *, text_encoders: bool
) -> LoraReport:
    notes = list(file.notes)
    if file.text and not text_encoders:
        left = ", ".join(f"{len(layers)} layers of {part}" for part, layers in file.text.items())
        notes.append(f"left out as asked: {left}")
    missing = [
        (path if part.name == TRANSFORMER else f"{part.name}.{path}", reason)
        for part in parts
        for path, reason in part.match.missing
        if path not in part.match.wider
    ]
    total = sum(part.match.total for part in parts)
    return LoraReport(
        name=name,
        file=source,
        format=file.format,
        family=file.family,
        scale=float(scale),
        matched=total - len(missing),
        total=total,
        missing=tuple(missing),
        parts={part.name: len(part.changes) for part in parts},
        notes=tuple(notes),
    )
