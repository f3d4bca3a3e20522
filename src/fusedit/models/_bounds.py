"""Bounds: how large the output of a fused activation can be, known before its product is computed.

A row of scales for it would need the largest of 12,288 numbers, which lie in 48 tiles of the product. But by
Cauchy-Schwarz |x . w_n| <= |x| |w_n|, |x| is known to the norm that made x, and e4m3 has 15 binades in which its
relative precision is the same: a scale that is 10 or 50 times too large costs nothing (measured on the embedded models,
see docs/fp8.md), and a scale that cannot be too small needs no second pass over 113 MB a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fusedit.runtime.hoist import RunCache

Tensor = torch.Tensor
_ROWS: Final = 4096
SILU_LEAST: Final = 0.2785
"""-silu(u) is nowhere larger, for no u."""


class Bounds:
    """The bounds of one model's layers, fp32 [L, 4] for `ops.row_bounds`, computed once a run and when weights change.

    Args:
        cache: the model's, which knows the run.
        make: layers of one row of the result -> its four numbers.
    """

    def __init__(self, cache: RunCache, make: Callable[[Any], Tensor]) -> None:
        self._cache, self._make = cache, make
        self._kept: tuple[Any, Any, Tensor] | None = None

    def __call__(self, groups: Sequence[Sequence[Any]]) -> Tensor | None:
        """One row for each group of layers, zeros for an empty one; None where all are empty."""
        if not any(groups):
            return None
        run = None if self._cache.run is None else self._cache.run.timesteps
        stamp = tuple(_stamp(layer) for group in groups for layer in group), tuple(map(len, groups))
        if self._kept is not None and self._kept[0] is run and self._kept[1] == stamp:
            return self._kept[2]
        device = next(layer.weight.device for group in groups for layer in group)
        rows = [self._make(group) if group else torch.zeros(4, device=device) for group in groups]
        made = torch.stack(rows)
        self._kept = run, stamp, made
        return made

    def clear(self) -> None:
        self._kept = None


def _stamp(layer: Any) -> tuple[Any, ...]:
    return tuple(
        (t.data_ptr(), -1 if t.is_inference() else t._version)
        for t in (layer.weight, layer.weight_scale, layer.bias)
        if t is not None
    )


def lengths(layer: Any) -> Tensor:
    """L2 norm of each row of a Float8Linear's weight, fp32 [N]."""
    made = torch.empty_like(layer.weight_scale)
    for first in range(0, len(made), _ROWS):
        rows = slice(first, first + _ROWS)
        codes = layer.weight[rows].to(torch.bfloat16)  # exact, and half of fp32's memory
        made[rows] = torch.linalg.vector_norm(codes, dim=1, dtype=torch.float32)
    made *= layer.weight_scale
    return made


def largest(layers: Sequence[Any]) -> Tensor:
    """Of linear layers: the largest norm of a row and the largest bias, fp32 [2]."""
    norms = torch.stack([lengths(layer).amax() for layer in layers]).amax()
    biases = [layer.bias.float().abs().amax() for layer in layers if layer.bias is not None]
    return torch.stack([norms, torch.stack(biases).amax() if biases else torch.zeros_like(norms)])


def gelu_bounds(layers: Sequence[Any]) -> Tensor:
    """fp32 [4] for gelu(first layer), and for what shares its scales: a mean of rows of the second (attention's v)."""
    rest = largest(layers[1:]) if len(layers) > 1 else torch.zeros(2, device=layers[0].weight.device)
    return torch.cat([largest(layers[:1]), rest])


def swiglu_bounds(layers: Sequence[Any]) -> Tensor:
    """fp32 [4] for silu(a) b with a, b the two layers' outputs, which have no bias.

    a b <= |x|^2 (|w| |v| + w . v) / 2 for a, b of one sign, and where a < 0, |silu(a)| < SILU_LEAST.
    """
    gate, value = layers
    dots = torch.empty_like(gate.weight_scale)
    for first in range(0, len(dots), _ROWS):
        rows = slice(first, first + _ROWS)
        dots[rows] = (gate.weight[rows].float() * value.weight[rows].float()).sum(dim=1)
    dots *= gate.weight_scale * value.weight_scale
    a, b = lengths(gate), lengths(value)
    square = ((a * b + dots.abs()) / 2).amax()
    zero = torch.zeros_like(square)
    return torch.stack([square, SILU_LEAST * b.amax(), zero, zero])
