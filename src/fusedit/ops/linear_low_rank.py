"""A linear layer and what LoRA adds to it.

    y[..., n] = bias[n] + sum_k x[..., k] weight[n, k] + low[..., n]
    low[..., n] = sum_r t[..., p R + r] up[n, r]                            parts p of columns as _low_rank.py says

x[..., K], weight[N, K], bias[N] or None, t[..., P R] (from low_rank), up[N, R], y[..., N], one dtype. For a packed
weight all layers' terms at once.
- `hopper`: bf16 on Hopper, where tiles fill the chip: the term is one more step of the product for 64 ranks, where a
  pass behind it would read and write y again.
- `separate`: the library's product, and add_low_rank in place.
`linear_low_rank.backend(...)` says which, and why.
Bytes: x, weight, bias, t, up read, y written. FLOPs: 2 M N (K + R). Exactness: reordered.
Source: Hu et al. 2021 (LoRA).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _linear_hopper, _low_rank
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._low_rank import rank
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._values import wide
from fusedit.ops.add_low_rank import add_low_rank
from fusedit.runtime.product import multiply

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, part: int = 0) -> Tensor:
    x, weight, bias, t, up = wide(x, weight, bias, t, up)
    u = x @ weight.T + _low_rank.low_rank(t, up, part)
    return u if bias is None else u + bias


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, part: int = 0, *, out: Tensor | None = None
) -> Tensor:
    made = F.linear(x, weight, bias)
    made += _low_rank.low_rank(t, up, part)
    return made if out is None else out.copy_(made)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, part: int = 0
) -> tuple[tuple[int, ...]]:
    name = "linear_low_rank"
    _check.activation(name, "x", x, "." * max(2, getattr(x, "ndim", 2)))
    _check.activation(name, "weight", weight, "NK")
    N = weight.shape[0]
    _check.like(name, "weight", weight, x, (N, x.shape[-1]))
    if bias is not None:
        _check.like(name, "bias", bias, x, (N,))
    if t is None or up is None:
        raise OpError(f"{name}: t and up must be tensors, not None")
    _low_rank.check(name, x, N, t, up, part, x.dtype)
    return ((*x.shape[:-1], N),)


def cost(x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, part: int = 0) -> Cost:
    del part
    count = x.numel() // max(1, x.shape[-1])
    read = _low_rank.nbytes(x, weight, bias, t, up)
    flops = 2 * count * weight.numel() + _low_rank.flops(x, up)
    return Cost(read + count * weight.shape[0] * x.element_size(), flops)


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # the result may lie on none


def choose(x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, part: int = 0) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del bias
    return _linear_hopper.choose("none", x, weight, t, up, part, 0)


def builds() -> list[Build]:
    return _linear_hopper.builds("none")


_X, _REAL = (2, 5, 64), ("real",)


def _args(
    shape: tuple[int, ...], N: int, R: int, parts: int = 1, x: str = "dense", bias: bool = True
) -> tuple[Any, ...]:
    weight = T((N, shape[-1]), std=shape[-1] ** -0.5)
    return T(shape, x), weight, T((N,)) if bias else None, *rank(shape, N, R, parts, std=0.3)


CASES = (
    Case("small", _args(_X, 96, 8)),
    Case("no-bias", _args(_X, 96, 8, bias=False)),
    Case("rows", _args((7, 64), 96, 40)),
    Case("four-dimensions", _args((2, 3, 5, 64), 96, 8)),
    Case("parts", (*_args(_X, 96, 8, 3), 32)),
    Case("parts-rest", (*_args(_X, 96, 8, 3), 16)),
    Case("odd", (*_args((1, 3, 50), 35, 3, 2), 11), ("small", "odd")),
    Case("joint", _args(_X, 96, 8, x="joint"), ("small", "strided")),
    Case("sliced", _args(_X, 96, 8, x="sliced"), ("small", "strided")),
    Case("transposed", _args(_X, 96, 8, x="transposed"), ("small", "strided")),
    Case("empty", _args((2, 0, 64), 96, 8), ("small", "empty")),
    Case("flux-qkv", (*_args((1, 4096, 3072), 9216, 32, 3), 3072), _REAL),
    Case("flux-text", _args((2, 512, 3072), 3072, 32, x="joint"), _REAL),
    Case("flux-mlp-out", _args((1, 4096, 12288), 3072, 32), _REAL),
    Case("z-image-qkv-128", (*_args((1, 4320, 3840), 11520, 128, 3, bias=False), 3840), _REAL),
    Case("z-image-joint", _args((2, 4128, 3840), 3840, 72, x="joint", bias=False), _REAL),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
    reads=reads,
)
def linear_low_rank(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    t: Tensor,
    up: Tensor,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x[..., K] @ weight[N, K]^T + bias[N] + t[..., P R] @ up[N, R]^T part by part -> [..., N]."""
    name = choose(x, weight, bias, t, up, part).name
    linear_low_rank.ran[name] += 1
    if name == "plain":
        return plain(x, weight, bias, t, up, part, out=out)
    _linear_hopper.make_ready("none", x, bias)
    if name == "hopper":
        y = x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
        _linear_hopper.into("none", x, weight, bias, y, 0, t, up, part)
        return y
    direct = out is not None and out.ndim in (2, 3) and out.stride(-1) == 1
    y = multiply(x, weight, bias, out if direct else None)
    add_low_rank(y, t, up, part, out=y)
    return y if out is None or direct else out.copy_(y)
