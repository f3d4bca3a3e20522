"""Where Z-Image's tokens lie in a batch: lengths, positions, rotary tables, masks; and patches in and out.

Stock pads every image and every caption with a learned token up to a multiple of 32; these pads are attended. A batch
is filled up to its longest item; that filling is masked and has rotary frequency zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

MULTIPLE: Final = 32


@dataclass(frozen=True)
class Table:
    """Rotary tables [B or 1, S, D / 2] in fp32 and the key mask [B, S] (None where all items fill their rows)."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None

    @property
    def length(self) -> int:
        return self.cos.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.cos, self.sin) if self.mask is None else (self.cos, self.sin, self.mask)

    def of(self, tensors: Iterator[torch.Tensor]) -> Table:
        """The same with the next of these tensors in place of its own."""
        cos, sin = next(tensors), next(tensors)
        return Table(cos, sin, None if self.mask is None else next(tensors))


@dataclass(frozen=True)
class Layout:
    """A batch of images and captions.

    Attributes:
        grids: frames, rows and columns of patches of each image.
        patch: rows and columns of a patch.
        frames: frames of a patch.
        image_tokens: patches of each image.
        image_lengths: the same, padded.
        caption_lengths: tokens of each caption, padded.
        images, captions, joint: tables of the three sequences.
    """

    grids: tuple[tuple[int, int, int], ...]
    patch: int
    frames: int
    image_tokens: tuple[int, ...]
    image_lengths: tuple[int, ...]
    caption_lengths: tuple[int, ...]
    images: Table
    captions: Table
    joint: Table

    @property
    def uniform(self) -> bool:
        """All images have the same padded length, so captions begin at the same row in all items."""
        return len(set(self.image_lengths)) == 1

    @property
    def one_size(self) -> bool:
        return len(set(self.grids)) == 1

    @property
    def key(self) -> Hashable:
        """Everything but the tensors, some of which depend on these numbers only."""
        return self.grids, self.patch, self.frames, self.caption_lengths, self.joint.mask is None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a step reads: the tables of the images and of the joint sequence."""
        return (*self.images.tensors, *self.joint.tensors)

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> Layout:
        """The same with the next of these tensors in place of `tensors`."""
        return replace(self, images=self.images.of(tensors), joint=self.joint.of(tensors))

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        captions: Sequence[int],
        patch: int,
        frames: int,
        rope: Any,
        device: torch.device,
    ) -> Layout:
        """The layout of images [C, F, H, W] of these shapes with captions of these lengths; `rope` is stock's."""
        grids = tuple((f // frames, h // patch, w // patch) for _, f, h, w in shapes)
        tokens = tuple(f * h * w for f, h, w in grids)
        lengths = tuple(map(_padded, tokens))
        caption_lengths = tuple(map(_padded, captions))
        image_ids = [
            _image_ids(grid, length, start + 1, device)
            for grid, length, start in zip(grids, lengths, caption_lengths, strict=True)
        ]
        caption_ids = [_caption_ids(length, device) for length in caption_lengths]
        joint_ids = [torch.cat(pair) for pair in zip(image_ids, caption_ids, strict=True)]
        same = len(set(zip(grids, caption_lengths, strict=True))) == 1  # then one row of tables serves all items
        tables = [_table(ids, rope, same) for ids in (image_ids, caption_ids, joint_ids)]
        return cls(grids, patch, frames, tokens, lengths, caption_lengths, *tables)


def _padded(count: int) -> int:
    return count + -count % MULTIPLE


def _caption_ids(length: int, device: torch.device) -> torch.Tensor:
    """Positions [T, 3]: 1, 2, ... on the first axis; its pads go on counting."""
    ids = torch.zeros(length, 3, dtype=torch.int64, device=device)
    ids[:, 0] = torch.arange(1, length + 1, device=device)
    return ids


def _image_ids(grid: tuple[int, int, int], length: int, start: int, device: torch.device) -> torch.Tensor:
    """Positions [X, 3]: frame (counted from `start`, behind the caption), row, column; pads are at 0, 0, 0."""
    ids = torch.zeros(length, 3, dtype=torch.int64, device=device)
    frames, rows, columns = grid
    place = torch.arange(frames * rows * columns, device=device)
    ids[: len(place), 0] = start + place // (rows * columns)
    ids[: len(place), 1] = place // columns % rows
    ids[: len(place), 2] = place % columns
    return ids


def _table(ids: list[torch.Tensor], rope: Any, same: bool) -> Table:
    lengths = [len(part) for part in ids]
    longest = max(lengths)
    turns = [rope(part) for part in (ids[:1] if same else ids)]
    cos = torch.zeros(len(turns), longest, turns[0].shape[-1], dtype=torch.float32, device=ids[0].device)
    sin = torch.zeros_like(cos)
    for i, turn in enumerate(turns):
        cos[i, : len(turn)], sin[i, : len(turn)] = turn.real, turn.imag
    if min(lengths) == longest:
        return Table(cos, sin, None)
    ends = torch.tensor(lengths, device=ids[0].device)
    return Table(cos, sin, torch.arange(longest, device=ids[0].device) < ends[:, None])


def patches(images: Sequence[torch.Tensor], layout: Layout, first: int = 0) -> torch.Tensor:
    """Images [C, F, H, W] of one size -> [B, tokens, frames * patch * patch * C]."""
    f, h, w = layout.grids[first]
    pf, p, c = layout.frames, layout.patch, images[0].shape[0]
    out = images[0].new_empty(len(images), f * h * w, pf * p * p * c)
    for row, image in zip(out, images, strict=True):
        split = image.view(c, f, pf, h, p, w, p)
        row.view(f, h, w, pf, p, p, c).copy_(split.permute(1, 3, 5, 2, 4, 6, 0))
    return out


def unpatched(tokens: torch.Tensor, layout: Layout, channels: int) -> list[torch.Tensor]:
    """[B, X, frames * patch * patch * C] -> images [C, F, H, W]."""
    if layout.one_size:
        return list(_unpatched(tokens, layout, 0, channels).unbind(0))
    return [_unpatched(tokens[i : i + 1], layout, i, channels)[0] for i in range(len(layout.grids))]


def _unpatched(tokens: torch.Tensor, layout: Layout, i: int, channels: int) -> torch.Tensor:
    f, h, w = layout.grids[i]
    pf, p = layout.frames, layout.patch
    x = tokens[:, : f * h * w].view(-1, f, h, w, pf, p, p, channels)
    return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, channels, f * pf, h * p, w * p)
