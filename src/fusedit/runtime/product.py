"""multiply(): the library's product, also into rows that lie in a wider or longer buffer."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

Tensor = torch.Tensor


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias -> [..., N], into `out` (dense columns) where given.

    One product where the rows of x and out follow each other, else one an item.
    """
    rows_in = rows(x)
    if out is None:  # torch would take a batched product for a slice whose batch stride is that of the whole buffer
        return F.linear(x if rows_in is None else rows_in, weight, bias).view(*x.shape[:-1], len(weight))
    rows_out = rows(out)
    if rows_in is not None and rows_out is not None:
        if bias is None:
            torch.mm(rows_in, weight.t(), out=rows_out)
        else:
            torch.addmm(bias, rows_in, weight.t(), out=rows_out)
    else:  # a slice along the sequence with batch > 1: one product an item still fills the chip at image sizes
        for x_item, out_item in zip(x, out, strict=True):
            multiply(x_item, weight, bias, out_item)
    return out


def rows(x: Tensor) -> Tensor | None:
    """[..., K] as a matrix without a copy, or None where the strides do not allow it."""
    if x.ndim == 3 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x.as_strided((x.shape[0] * x.shape[1], x.shape[2]), (x.stride(1), x.stride(2)))
    return x if x.ndim == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1]) if x.is_contiguous() else None
