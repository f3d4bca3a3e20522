"""One layer of a file onto the diffusers layers that it covers: fused matrices split by rows, halves swapped."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedit.errors import LoraError
from fusedit.lora.layers import LoraLayer
from fusedit.lora.names import Place


def heights(place: Place, name: str, rows: int, inputs: int | None) -> list[int]:
    """How many of the rows each of the place's paths gets. FLUX's q, k, v and MLP in one: the first three are square.

    Args:
        inputs: K of the matrix; only needed for four paths.

    Raises:
        LoraError: the rows cannot be divided so.
    """
    parts = len(place.paths)
    if parts == 4:
        if inputs is None or rows <= 3 * inputs:
            raise LoraError(
                f"layer {name!r} has {rows} outputs and {inputs} inputs; q, k, v and the MLP of a FLUX block have more "
                "than 3 outputs an input, so the LoRA is for another model"
            )
        return [inputs, inputs, inputs, rows - 3 * inputs]
    if rows % parts:
        raise LoraError(f"layer {name!r} has {rows} outputs, which are no q, k and v of one size; download it again")
    return [rows // parts] * parts


def place_layer(place: Place, name: str, layer: LoraLayer) -> dict[str, LoraLayer]:
    """Path -> layer. `down` is shared whole by the parts, never divided: each row of `up` needs all of the rank.

    Raises:
        LoraError: the rows cannot be divided, or column norms (DoRA on inputs) are of a fused matrix.
    """
    magnitude = layer.magnitude
    if len(place.paths) > 1 and magnitude is not None and magnitude.ndim == 2:
        raise LoraError(
            f"layer {name!r} has DoRA norms of the columns of a fused matrix, which its parts do not have; train it on "
            "the separate layers, or with the norms on the output axis"
        )
    sizes = heights(place, name, layer.up.shape[0], layer.down.shape[1])
    ups = torch.split(swap(place, layer.up), sizes)
    norms: list[Tensor | None] = [magnitude] * len(sizes)
    if magnitude is not None and magnitude.ndim == 1:
        norms = list(torch.split(swap(place, magnitude), sizes))
    return {
        path: LoraLayer(layer.down, up, layer.alpha, norm)
        for path, up, norm in zip(place.paths, ups, norms, strict=True)
    }


def swap(place: Place, rows: Tensor) -> Tensor:
    """The rows in diffusers' order."""
    if not place.swapped:
        return rows
    if rows.shape[0] % 2:
        raise LoraError(
            f"layer {place.paths[0]!r} has {rows.shape[0]} outputs, which are no shift and scale of one size"
        )
    return torch.cat(rows.chunk(2)[::-1])
