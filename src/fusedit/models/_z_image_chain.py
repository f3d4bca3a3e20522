"""A chain of Z-Image's blocks on one residual stream: what runs between a first norm and the one that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit.float8.rows import Activation
from fusedit.models._scratch import Scratch, Targets
from fusedit.models._z_image_block import Block
from fusedit.models._z_image_layout import Table
from fusedit.runtime.inspect_module import offload_hook

if TYPE_CHECKING:
    from fusedit.models.z_image import ZImage

Tensor = torch.Tensor
Norm = tuple[Tensor, Tensor | None]
"""The norm after a residual: weight [C] and scale [B, C] (None in the caption's refiner)."""
Following = tuple[Tensor, Tensor | None, Activation]
"""The same, and where it puts what it gives."""
Mods = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Scale and gate of attention, then scale and gate of the feed-forward layer, each [B, C]."""
NO_MODS: Final[Mods] = (None, None, None, None)


def first_norm(blocks: Any, mods: list[Mods] | None) -> Norm:
    """That of the first of these stock blocks."""
    return blocks[0].attention_norm1.weight, None if mods is None else mods[0][0]


def eps_of(blocks: Any) -> float:
    """Its epsilon."""
    return float(blocks[0].attention_norm1.eps)


def scratch_for(h: Tensor, blocks: Sequence[Block]) -> Scratch:
    """Room for the products of any of these blocks on h [B, S, C]."""
    dense = max((block.scratch_width() for block in blocks), default=0)
    return Scratch(h, dense, max((block.hidden() for block in blocks), default=0))


def run_chain(
    model: ZImage,
    blocks: list[Block],
    h: Tensor,
    targets: Targets,
    tokens: slice | None,
    scratch: Scratch,
    mods: list[Mods],
    table: Table,
    bounds: list[Tensor | None],
    then: Following | None = None,
    residuals: dict[int, Tensor] | None = None,
    rows: int | None = None,
) -> None:
    """Blocks on the residual stream h, in place. These tokens of the targets hold the first block's normed input
    and are overwritten; `then` is the norm that follows and where it goes; of the last block only the first `rows`
    rows are computed."""
    offloaded = offload_hook(model.module)
    for i, block in enumerate(blocks):
        last = i + 1 == len(blocks)
        stock = block.stock
        reads = block.reads_rows()
        scale_mlp, gate_attention, gate_mlp = mods[i][2], mods[i][1], mods[i][3]
        y = block.attend(targets.of(reads[0], tokens), scratch, table, offloaded, rows if last else None)
        if y.shape[1] < h.shape[1]:
            h, targets, tokens = h[:, : y.shape[1]], Targets(torch.empty_like(y)), None
        eps = stock.attention_norm2.eps
        inner = (stock.attention_norm2.weight, gate_attention, stock.ffn_norm1.weight, scale_mlp, eps)
        n = targets.of(reads[1], tokens)
        model.gate_norm(h, y, *inner, out=(h, n))
        block.feed(n, scratch, y, offloaded, bounds[i])
        if last:
            following = then
        else:
            place = targets.of(blocks[i + 1].reads_rows()[0], tokens)
            following = (blocks[i + 1].stock.attention_norm1.weight, mods[i + 1][0], place)
        branch = (y, stock.ffn_norm2.weight, gate_mlp)
        extra = None if residuals is None else residuals.get(i)
        if following is not None and extra is None:
            model.gate_norm(h, *branch, *following[:2], eps, out=(h, following[2]))
            continue
        model.gate(h, *branch, eps, out=h)
        if extra is not None:
            h += extra[:, : h.shape[1]]
            if following is not None:
                model.norm(h, *following[:2], eps, out=following[2])
