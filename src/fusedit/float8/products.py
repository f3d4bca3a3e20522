"""Products with e4m3 weights, on rows that are quantised already or are quantised here."""

from __future__ import annotations

import torch

from fusedit import ops
from fusedit.float8.rows import Rows

Tensor = torch.Tensor


def quantise(x: Tensor) -> Rows:
    """x [..., K] as rows with scales of their own, in a pass of its own."""
    return Rows(*ops.quantize_rows.direct(x))


def scaled(
    x: Rows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
    low: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Quantised rows [..., K] through a weight e4m3 [N, K] with its scale fp32 [N] -> [..., N] in `dtype` or `out`.

    Args:
        low: t, up and part of a low-rank term, in units of the codes.
    """
    name = str(dtype if out is None else out.dtype).removeprefix("torch.")
    made: Tensor = ops.scaled_linear.direct(x.codes, x.scale, weight, scale, bias, name, *(low or ()), out=out)
    return made
