"""FLUX's blocks on one residual stream: from the norm before the first to the modulated norm behind the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusedit.float8.rows import part
from fusedit.models._flux_double import Double
from fusedit.models._flux_parts import Pair, Residuals, Vectors, width_of
from fusedit.models._flux_single import Single
from fusedit.models._scratch import Scratch, Targets
from fusedit.runtime.inspect_module import offload_hook

if TYPE_CHECKING:
    from fusedit.models.flux import Flux

Tensor = torch.Tensor


def run_blocks(
    model: Flux,
    h: Tensor,
    y: Tensor,
    vectors: Vectors,
    t: int,
    rotary: Pair,
    double: Residuals,
    single: Residuals,
    bounds: list[Tensor | None],
) -> None:
    """All blocks on the residual stream h [B, T + I, C], which is overwritten; text is the tokens before t.

    y, like h, leaves with the modulated final norm. `bounds` are those of the blocks, two of each double one.
    """
    m: Any = model.module
    offloaded = offload_hook(m)
    doubles, singles = model.doubles(m.transformer_blocks), model.singles(m.single_transformer_blocks)
    entry, joint, final = vectors.double, vectors.single, vectors.final
    image, text = slice(t, None), slice(None, t)
    targets = Targets(y)
    # Where the norm before each block, and the last one, puts what it gives: for image and text, then for both.
    split = [tuple(map(targets.of, block.reads_rows())) for block in doubles]
    whole = [targets.of(block.reads_rows()) for block in singles] + [y]
    after = joint[0][:2] if joint else final  # the norm that follows the last double block, in both streams
    if entry:
        model.norm(h[:, image], *entry[0][0][:2], out=part(split[0][0], image))
        model.norm(h[:, text], *entry[0][1][:2], out=part(split[0][1], text))
    else:
        model.norm(h, *after, out=whole[0])
    everything: list[Double | Single] = [*doubles, *singles]
    blocks = [block.block for block in everything]
    coded = any(bound is not None for bound in bounds)
    codes = max((block.codes_width() for block in everything), default=0) if coded else 0
    # Every product of a block writes here: attention's inputs first, then the feed-forward layer's.
    scratch = Scratch(h, max([0, *map(width_of, blocks)]), codes)
    for i, block in enumerate(doubles):
        n = part(split[i][0], image), part(split[i][1], text)
        block.attend(n, y, scratch, t, rotary, offloaded)
        if i + 1 < len(doubles):
            then = entry[i + 1][0][:2], entry[i + 1][1][:2]
            where = part(split[i + 1][0], image), part(split[i + 1][1], text)
        else:
            then, where = (after, after), (part(whole[0], image), part(whole[0], text))
        following = (then[0], where[0]), (then[1], where[1])
        block.feed(h, y, targets, scratch, t, entry[i], following, double.at(i), bounds[2 * i : 2 * i + 2])
    for i, one in enumerate(singles):
        one(whole[i], y, scratch, rotary, offloaded, bounds[2 * len(doubles) + i])
        gate = joint[i][2]
        following_norm = joint[i + 1][:2] if i + 1 < len(singles) else final
        extra = single.at(i)
        if extra is None:
            model.gate_norm(h, y, gate, *following_norm, out=(h, whole[i + 1]))
        else:
            model.gate(h, y, gate, out=h)
            h[:, t:] += extra
            model.norm(h, *following_norm, out=whole[i + 1])
