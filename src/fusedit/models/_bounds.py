"""Bounds: how large the output of a fused activation can be, known before its product is computed.

A row of scales for it would need the largest of 12,288 numbers, which lie in 48 tiles of the product. But by
Cauchy-Schwarz |x . w_n| <= |x| |w_n|, |x| is known to the norm that made x, and e4m3 has 15 binades in which its
relative precision is the same: a scale that is 10 to 250 times too large costs next to nothing (measured on the
embedded models, see docs/fp8.md), and one that cannot be too small needs no second pass over 113 MB a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from fusedit import ops
from fusedit.runtime.branches import Split
from fusedit.runtime.hoist import RunCache

Tensor = torch.Tensor
SILU_LEAST: Final = 0.2785
"""-silu(u) is nowhere larger, for no u."""


Groups = Sequence[Sequence[Split]]


class Limits(NamedTuple):
    """The bounds of one call.

    Attributes:
        table: fp32 [L, 4], a row for each group of layers, zeros for an empty one; None where all are empty.
        there: whether each group holds layers.
    """

    table: Tensor | None
    there: tuple[bool, ...]

    def rows(self, table: Tensor | None) -> list[Tensor | None]:
        """The row of each group in `table`, which is this one or a copy of it; None for an empty group."""
        return [table[i] if table is not None and there else None for i, there in enumerate(self.there)]


class Bounds:
    """The bounds of one model's layers for `ops.row_bounds`, computed once a run and when weights change.

    Args:
        cache: the model's, which knows the run.
        make: layers of one row of the result, each with what LoRA adds to it -> its four numbers.
    """

    def __init__(self, cache: RunCache, make: Callable[[Sequence[Split]], Tensor]) -> None:
        self._cache, self._make = cache, make
        self._kept: tuple[Any, Any, Limits] | None = None
        self._look: int | None = None

    def __call__(self, groups: Callable[[], Groups], look: int | None = None) -> Limits:
        """One row for each group of layers.

        Args:
            groups: gives them.
            look: the content of a `Look` at the model in this call: where it is that of the call before, and the run
                too, nothing is asked. None: it is.
        """
        run = None if self._cache.run is None else self._cache.run.timesteps
        again = self._kept is not None and self._kept[0] is run
        if again and self._kept is not None and look is not None and look == self._look:
            return self._kept[2]
        self._look = look
        found = groups()
        stamp = tuple(_stamp(part) for group in found for part in group), tuple(map(len, found))
        if again and self._kept is not None and self._kept[1] == stamp:
            return self._kept[2]
        made = Limits(self._table(found), tuple(map(bool, found)))
        self._kept = run, stamp, made
        return made

    def _table(self, groups: Groups) -> Tensor | None:
        if not any(groups):
            return None
        weight: Any = next(part.base.weight for group in groups for part in group)
        rows = [
            self._make(group) if group else torch.zeros(4, dtype=torch.float32, device=weight.device)
            for group in groups
        ]
        return torch.stack(rows)

    def clear(self) -> None:
        self._kept = None


def _stamp(part: Split) -> tuple[Any, ...]:
    layer: Any = part.base
    matrices = (t for branch in part.branches for t in branch[:2])
    seen = tuple(
        (t.data_ptr(), -1 if t.is_inference() else t._version)
        for t in (layer.weight, layer.weight_scale, layer.bias, *matrices)
        if t is not None
    )
    return seen, tuple(branch.scale for branch in part.branches)


def lengths(part: Split) -> Tensor:
    """L2 norm of each row of a Float8Linear's weight, fp32 [N]."""
    layer: Any = part.base
    made: Tensor = ops.row_dots.direct(layer.weight.detach())[0].sqrt_().mul_(layer.weight_scale)
    return made


def changes(part: Split) -> Tensor:
    """At most what each row of LoRA's change to a layer is long, fp32 [N]: |b A|^2 = b (A A^T) b^T, b a row of B."""
    layer: Any = part.base
    made = torch.zeros_like(layer.weight_scale)
    for down, up, scale in part.branches:
        a, b = down.float(), up.float()
        peak = a.abs().amax().clamp_min_(2.0**-126)  # squares of very small or large numbers are 0 or infinite
        a, b = a / peak, b * peak
        square = ((b @ (a @ a.T)) * b).sum(dim=1)
        made += abs(scale) * square.clamp_min_(0).sqrt_()
    return made


def largest(parts: Sequence[Split]) -> Tensor:
    """Of linear layers: the largest norm of a row and the largest bias, fp32 [2]."""
    norms = torch.stack([(lengths(part) + changes(part)).amax() for part in parts]).amax()
    layers: list[Any] = [part.base for part in parts]
    biases = [layer.bias.float().abs().amax() for layer in layers if layer.bias is not None]
    return torch.stack([norms, torch.stack(biases).amax() if biases else torch.zeros_like(norms)])


def gelu_bounds(parts: Sequence[Split]) -> Tensor:
    """fp32 [4] for gelu(first layer), and for what shares its scales: a mean of rows of the second (attention's v)."""
    first = largest(parts[:1])
    return torch.cat([first, largest(parts[1:]) if len(parts) > 1 else torch.zeros_like(first)])


def swiglu_bounds(parts: Sequence[Split]) -> Tensor:
    """fp32 [4] for silu(a) b with a, b the two layers' outputs, which have no bias.

    a b <= |x|^2 (|w| |v| + w . v) / 2 for a, b of one sign, and where a < 0, |silu(a)| < SILU_LEAST. LoRA's changes c
    and d of w and v make w . v larger by |w| |d| + |v| |c| + |c| |d| at most.
    """
    w: Any
    v: Any
    w, v = (part.base for part in parts)
    squares: Tensor = ops.row_dots.direct(w.weight.detach(), v.weight.detach())
    a, b = squares[0].sqrt() * w.weight_scale, squares[1].sqrt() * v.weight_scale
    dots = squares[2] * (w.weight_scale * v.weight_scale)
    c, d = map(changes, parts)
    dots = dots.abs() + a * d + b * c + c * d
    a, b = a + c, b + d
    square = ((a * b + dots) / 2).amax()
    zero = torch.zeros_like(square)
    return torch.stack([square, SILU_LEAST * b.amax(), zero, zero])
