"""How far two low-rank layers for the same module are apart, without their dense changes."""

from __future__ import annotations

import torch

from fusedit.lora.layers import LoraLayer


def differ(one: LoraLayer, two: LoraLayer) -> float:
    """|D1 - D2| / max(|D1|, |D2|) of the changes D = scale B A in the Frobenius norm; 1 where shapes differ."""
    if (one.up.shape[0], one.down.shape[1]) != (two.up.shape[0], two.down.shape[1]):
        return 1.0
    first, second, both = _inner(one, one), _inner(two, two), _inner(one, two)
    largest = max(first, second)
    return 0.0 if largest == 0 else float(max(first + second - 2 * both, 0.0) / largest) ** 0.5


def _inner(one: LoraLayer, two: LoraLayer) -> float:
    """sum(D1 * D2), by way of the two [R1, R2] matrices B1^T B2 and A1 A2^T."""
    ups = one.up.double().T @ two.up.double()
    downs = one.down.double() @ two.down.double().T
    return one.scale * two.scale * float(torch.sum(ups * downs))
