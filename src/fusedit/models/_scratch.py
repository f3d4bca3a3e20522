"""Buffers that the products of a block write into one after the other, made when first asked for."""

from __future__ import annotations

import torch

from fusedit.float8.rows import Activation, Rows

Tensor = torch.Tensor


class Scratch:
    """Room for what is read again at once: [B, S, width] for any width up to the ones given.

    Args:
        like: [B, S, ...] of the longest sequence, in the dtype of the activations.
        dense: columns at most, in that dtype.
        codes: columns at most, in e4m3.
    """

    def __init__(self, like: Tensor, dense: int, codes: int) -> None:
        self._like, self._widths = like, {like.dtype: dense, torch.float8_e4m3fn: codes}
        self._made: dict[torch.dtype, Tensor] = {}

    def dense(self, like: Tensor | Rows, width: int) -> Tensor:
        """The first numbers as a dense [B, S, width], for `like` [B, S, ...]."""
        return self._part(self._like.dtype, like, width)

    def codes(self, like: Tensor | Rows, width: int) -> Tensor:
        """The same in e4m3."""
        return self._part(torch.float8_e4m3fn, like, width)

    def _part(self, dtype: torch.dtype, like: Tensor | Rows, width: int) -> Tensor:
        if dtype not in self._made:
            tokens = self._like.shape[0] * self._like.shape[1]
            self._made[dtype] = torch.empty(tokens * self._widths[dtype], dtype=dtype, device=self._like.device)
        batch, length = like.shape[0], like.shape[1]
        return self._made[dtype][: batch * length * width].view(batch, length, width)


class Targets:
    """Where norms put what the next product reads: dense, or rows in e4m3.

    Args:
        dense: [B, S, C]; what a branch gives back may lie there as well, since a norm reads a row before it writes it.
    """

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense
        self._rows: Rows | None = None

    def of(self, rows: bool, tokens: slice | None = None) -> Activation:
        """The place for one kind or the other, all of it or these tokens of every item."""
        if not rows:
            return self.dense if tokens is None else self.dense[:, tokens]
        if self._rows is None:
            self._rows = Rows.like(self.dense)
        return self._rows if tokens is None else self._rows.part(tokens)
