"""Reader: places the groups of a file, each as layers and parameters of the diffusers modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fusedit.errors import LoraError
from fusedit.lora.factors import Parts, build, size
from fusedit.lora.groups import Group
from fusedit.lora.layers import LoraLayer
from fusedit.lora.metadata import alpha_of
from fusedit.lora.names import Names, Place
from fusedit.lora.names_text import find_text
from fusedit.lora.placing import heights, place_layer, swap
from fusedit.lora.twice import differ

MOST_BYTES: Final = 4 << 30
"""Of tensors that LoKr and LoHa layers become: low-rank ones of FLUX take some hundred MiB, whole ones 47 GiB."""
_ALIKE: Final = 1e-2
"""Relative difference up to which two copies of a layer, saved in bf16 apart from each other, count as the same."""


class Reader:
    """Places groups one by one; what came of them is in its attributes."""

    def __init__(self, names: Names, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.names = names
        self.settings = settings
        self.layers: dict[str, LoraLayer] = {}
        self.text: dict[str, dict[str, LoraLayer]] = {}
        self.extra: dict[str, Tensor] = {}
        self.unmatched: list[str] = []
        self.notes: list[str] = []
        self._origin: dict[str, tuple[bool, str]] = {}

    def take(self, groups: list[Group]) -> None:
        placed: list[tuple[str, Place, Group]] = []
        for group in groups:
            if (found := self._find(group)) is None:
                self.unmatched += group.keys.values()
            else:
                placed.append((*found, group))
        self._lend_alphas(placed)
        self._limit(placed)
        for part, place, group in placed:
            self._add(part, place, group)

    def _find(self, group: Group) -> tuple[str, Place] | None:
        """The part of the pipeline and the place in it. The prefix decides where there is one."""
        if "text" not in group.scopes and (place := self.names.find(group.name)) is not None:
            return "transformer", place
        if "text" in group.scopes or not group.scopes:
            return find_text(group.name)
        return None

    def _lend_alphas(self, placed: list[tuple[str, Place, Group]]) -> None:
        """An alpha whose own name has no tensors belongs to the same layer under its other name."""
        alone = {(part, place.paths): group for part, place, group in placed if group.parts.keys() == {"alpha"}}
        for part, place, group in placed:
            giver = alone.get((part, place.paths))
            if giver is not None and giver is not group and "alpha" not in group.parts:
                group.parts["alpha"] = giver.parts["alpha"]
                alone.pop((part, place.paths))
                giver.parts, giver.keys = {}, {}

    def _limit(self, placed: list[tuple[str, Place, Group]]) -> None:
        whole = sum(size(group.name, group.parts) for _, _, group in placed)
        if whole > MOST_BYTES:
            raise LoraError(
                f"its LoKr or LoHa layers have so high a rank that they would take {whole / 2**30:.1f} GiB as pairs of "
                f"matrices, and the limit is {MOST_BYTES / 2**30:.0f}; merge it into the model, or train one of "
                "smaller factors"
            )

    def _add(self, part: str, place: Place, group: Group) -> None:
        layer = build(group.name, group.parts)
        if layer is not None:
            layer = self._finish(part, place, group, layer)
            for path, one in place_layer(place, group.name, layer).items():
                self._put(part, path, one, place.own, group.name)
        rest = self._extras(place, group, layer) if part == "transformer" else {}
        self.extra |= rest
        if layer is None and not rest:
            self.unmatched += group.keys.values()

    def _finish(self, part: str, place: Place, group: Group, layer: LoraLayer) -> LoraLayer:
        """With the alpha that only the settings state, and with DoRA's norms in their two shapes."""
        alpha = layer.alpha
        if alpha is None and {"down", "up"} <= group.parts.keys():
            alpha = alpha_of(self.settings.get(part, {}), place.paths[0], layer.rank)
        return layer._replace(alpha=alpha, magnitude=_magnitude(group, layer))

    def _put(self, part: str, path: str, layer: LoraLayer, own: bool, name: str) -> None:
        """Under its path; of two with the same path, the one under diffusers' own name, else the first, counts."""
        layers = self.layers if part == "transformer" else self.text.setdefault(part, {})
        where = f"{part}.{path}"
        if path not in layers:
            layers[path], self._origin[where] = layer, (own, name)
            return
        other, (other_own, other_name) = layers[path], self._origin[where]
        first = other_own or not own
        kept, gone = (other, layer) if first else (layer, other)
        names = (other_name, name) if first else (name, other_name)
        if gone.alpha is None:
            gone = gone._replace(alpha=kept.alpha)
        if (gap := differ(kept, gone)) > _ALIKE:
            self.notes.append(
                f"{path} is given as {names[0]!r} and as {names[1]!r}, which differ by {gap:.0%}; {names[0]!r} counts"
            )
        layers[path], self._origin[where] = kept, (other_own or own, names[0])

    def _extras(self, place: Place, group: Group, layer: LoraLayer | None) -> dict[str, Tensor]:
        """Biases and whole parameters, by name; see `LoraFile.extra`."""
        parts = group.parts
        found: dict[str, Tensor] = {}
        inputs = None if layer is None else layer.down.shape[1]
        bias = _bias(parts, layer)
        if bias is None and "bias_diff" in parts:
            bias = parts["bias_diff"].float()
        diff = parts["diff"] if "diff" in parts and parts["diff"].ndim == 1 else None
        for suffix, value in (
            ("bias.diff", bias),
            ("weight.diff", diff),
            ("weight", parts.get("value")),
            ("bias", parts.get("bias")),
        ):
            if value is not None and value.ndim > 0:
                rows = torch.split(swap(place, value), heights(place, group.name, value.shape[0], inputs))
                found |= {f"{path}.{suffix}": one for path, one in zip(place.paths, rows, strict=True)}
        return found


def _bias(parts: Parts, layer: LoraLayer | None) -> Tensor | None:
    """scale (B a + b), for a LoRA whose two products have biases a and b."""
    if layer is None or not {"up_bias", "down_bias"} & parts.keys():
        return None
    total = parts["up_bias"].float() if "up_bias" in parts else 0.0
    if "down_bias" in parts:
        total = layer.up.float() @ parts["down_bias"].float() + total
    return layer.scale * total if isinstance(total, Tensor) else None


def _magnitude(group: Group, layer: LoraLayer) -> Tensor | None:
    """[N] or [1, K]. A shape [1, K] or [N, 1, 1, 1] says which axis; a plain vector is peft's, so of outputs."""
    if (given := group.parts.get("magnitude")) is None:
        return None
    outputs, inputs = layer.up.shape[0], layer.down.shape[1]
    shape = tuple(given.shape)
    kernel = shape[2:] if len(shape) in (3, 4) else ()
    if all(extent == 1 for extent in kernel):
        if shape[:1] == (outputs,) and math.prod(shape) == outputs:
            return given.reshape(outputs)
        if len(shape) > 1 and shape[:2] == (1, inputs):
            return given.reshape(1, inputs)
    raise LoraError(
        f"key {group.keys['magnitude']!r} has shape {shape}, where DoRA has ({outputs}, 1) or (1, {inputs}); the file "
        "is damaged, download it again"
    )
