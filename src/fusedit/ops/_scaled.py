"""What the products of e4m3 share: their operands, what is right, and the tensors of their cases.

    u[..., n] = x_scale[...] * weight_scale[n] * (sum_k x[..., k] weight[n, k] + low[..., n]) + bias[n]
    low[..., n] = sum_r t[..., p R + r] up[n, r],   p = min(n // part, P - 1); nothing where `t` and `up` are None

x e4m3 [..., K], x_scale fp32 [...], weight e4m3 [N, K], weight_scale fp32 [N], bias [N] of any floating dtype or None,
t [..., P R], up [N, R] of one floating dtype, as _low_rank.py says. The low-rank term is what LoRA adds, in units of
the codes: with weights down and B beside the dequantised weight, t = x . down^T and up = B / weight_scale. It lies
before the scales because there it is more steps of the same product.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _low_rank
from fusedit.ops._cases import T
from fusedit.ops._fp8 import E4M3
from fusedit.ops._op import Cost
from fusedit.ops._values import wide

Tensor = torch.Tensor
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SLACK = 4e-3
"""How far a product may be off beside the 2x rule, as a part of its largest value: the tensor cores of compute
capability 8.9 and 9.0 add products of e4m3 with about 14 bits, whatever the dtype of the result."""
CODES = 6e-3
"""The same of activations before they are rounded to e4m3: where the product goes through memory it is rounded to bf16,
2^-9 of itself."""
GATED = 2 * CODES
"""The same of a product of two such numbers. On an H200 24 of 84,541,440 codes of Z-Image's layer lie beyond CODES."""


def operands(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    up: Tensor | None,
    part: int,
) -> int:
    """Checks them all; returns N."""
    _check.fp8(op, "x", x, "." * max(2, getattr(x, "ndim", 2)))
    _check.fp8(op, "weight", weight, "NK")
    N: int = weight.shape[0]
    _check.like(op, "weight", weight, x, (N, x.shape[-1]))
    _check.like(op, "x_scale", x_scale, x, x.shape[:-1], torch.float32)
    _check.like(op, "weight_scale", weight_scale, x, (N,), torch.float32)
    if bias is not None:
        _check.vector(op, "bias", bias, x, (N,), "N")
    _low_rank.check(op, x, N, t, up, part)
    return N


def output(op: str, dtype: str) -> None:
    """`dtype` is one that a product can have."""
    _check.kind(op, "dtype", dtype, "str")
    if dtype not in DTYPES:
        raise OpError(f"{op}: dtype must be {', '.join(DTYPES)}, not {_check.show(dtype)}")


def scales(op: str, x: Tensor, g_scale: Tensor) -> None:
    """`g_scale` is one of each row of x."""
    _check.like(op, "g_scale", g_scale, x, x.shape[:-1], torch.float32)


def product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Tensor:
    """u in fp32, in fp64 where one of these is fp64."""
    dtype = wide(x).dtype
    u = x.to(dtype) @ weight.to(dtype).T
    if t is not None and up is not None:
        u += _low_rank.low_rank(t.to(dtype), up.to(dtype), part)
    u *= x_scale.to(dtype)[..., None]
    u *= weight_scale.to(dtype)
    return u if bias is None else u.add_(bias.to(dtype))


def cost(x: Tensor, weight: Tensor, written: int, up: Tensor | None) -> Cost:
    """Of one product that writes so many bytes."""
    count = x.numel() // max(1, x.shape[-1])
    vectors = 4 * (count + weight.shape[0])
    flops = 2 * count * weight.numel() + _low_rank.flops(x, up)
    return Cost(x.nbytes + weight.nbytes + vectors + written, flops)


# -- cases ---------------------------------------------------------------------------------------------------------


def codes(*shape: int, layout: str = "dense") -> T:
    return T(shape, layout, dtype=E4M3, std=100.0)


def positive(*shape: int, layout: str = "dense", std: float = 0.01) -> T:
    return T(shape, layout, dtype=torch.float32, fill="positive", std=std)


def weights(N: int, K: int, layout: str = "dense") -> tuple[T, T]:
    """A weight that keeps the size of its input, and its scales."""
    return codes(N, K, layout=layout), positive(N, std=0.01 * max(1, K) ** -0.5)


def arguments(shape: tuple[int, ...], N: int, layout: str = "dense", weight: str = "dense") -> tuple[Any, ...]:
    """x, x_scale, weight, weight_scale."""
    return (codes(*shape, layout=layout), positive(*shape[:-1]), *weights(N, shape[-1], weight))


def rank(shape: tuple[int, ...], N: int, R: int, parts: int = 1) -> tuple[T, T]:
    """t and up of a term about a third as large as the product."""
    sizes = (*shape[:-1], parts * R)
    return T(sizes, dtype=torch.bfloat16, std=30.0), T((N, R), dtype=torch.bfloat16, std=100 * (shape[-1] / R) ** 0.5)
