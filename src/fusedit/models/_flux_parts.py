"""Parts of FLUX's fused forward: where its modulation vectors, ControlNet residuals and scratch memory lie."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from fusedit.runtime.branches import without_adapters

Pair = tuple[torch.Tensor, torch.Tensor]
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Residuals:
    """ControlNet residuals of one kind of block, by stock's interval rule."""

    def __init__(self, samples: Any, blocks: int, repeat: bool) -> None:
        self.samples, self.blocks, self.repeat = tuple(samples or ()), blocks, repeat
        self.count = len(self.samples)

    def of(self, tensors: list[torch.Tensor]) -> Residuals:
        """The same with the first of these tensors in place of the samples."""
        return Residuals(tensors[: self.count], self.blocks, self.repeat)

    def at(self, i: int) -> torch.Tensor | None:
        if not self.samples:
            return None
        place = i % self.count if self.repeat else i // math.ceil(self.blocks / self.count)
        sample: torch.Tensor = self.samples[place]
        return sample


class Vectors:
    """What lies where in a row of modulation vectors [B, N]: two streams of each double block, single blocks, the end.

    Attributes:
        double: for each double block, the six vectors of the image stream and of the text stream.
        single: for each single block, scale, shift and gate.
        final: scale and shift of the last norm.
    """

    def __init__(self, mods: torch.Tensor, wide: int, doubles: int, singles: int) -> None:
        rows = torch.split(mods, [6 * wide] * 2 * doubles + [3 * wide] * singles + [2 * wide], dim=1)
        streams = list(map(_six, rows[: 2 * doubles]))
        self.double = list(zip(streams[::2], streams[1::2], strict=True))
        self.single = list(map(_three, rows[2 * doubles : -1]))
        scale, shift = rows[-1].chunk(2, dim=1)
        self.final = (scale, shift)


def _six(row: torch.Tensor) -> Six:
    """scale, shift, gate of the attention half, then scale, shift, gate of the MLP half, each [B, C]."""
    shift1, scale1, gate1, shift2, scale2, gate2 = row.chunk(6, dim=1)
    return scale1, shift1, gate1, scale2, shift2, gate2


def _three(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shift, scale, gate = row.chunk(3, dim=1)
    return scale, shift, gate


def width_of(block: Any) -> int:
    """Numbers a token that the products of a block need at once."""
    inner: int = 3 * block.attn.inner_dim
    if not hasattr(block, "ff"):
        return inner + len(block.proj_mlp.weight)
    return max(inner, *(len(ff.net[0].proj.weight) for ff in (block.ff, block.ff_context)))


def eps(norm: Any, x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps if norm.eps is None else float(norm.eps)


def typical_conditions(m: Any) -> torch.Tensor:
    """What modulation layers read [n, C]: over time steps, guidance, and pooled prompts of many directions and lengths.

    With 8 prompts instead of 64, or all of one length, codes suit the samples and nothing else: the error on real
    prompts is then larger than that of the nearest codes.
    """
    weight = m.time_text_embed.timestep_embedder.linear_1.weight
    generator = torch.Generator().manual_seed(0)
    pooled = torch.randn(64, m.config.pooled_projection_dim, dtype=torch.float32, generator=generator)
    pooled *= torch.linspace(0, 1, 64, dtype=torch.float32)[:, None]
    times = torch.linspace(0.01, 1, 16, dtype=torch.float32) * 1000
    grid = [times, torch.arange(64, dtype=torch.float32)]
    if m.config.guidance_embeds:
        grid.insert(1, torch.tensor([1.0, 2.5, 3.5, 5.0], dtype=torch.float32) * 1000)
    *numbers, prompt = torch.cartesian_prod(*grid).unbind(1)
    with torch.no_grad(), without_adapters(m.time_text_embed):
        made: torch.Tensor = m.time_text_embed(*(t.to(weight) for t in (*numbers, pooled[prompt.long()])))
        return functional.silu(made)
