"""The first half of low-rank terms: what LoRA's small matrices make of activations, for all layers that read them.

    t[..., p] = scale[p] * sum_k x[..., k] down[p, k]

x[..., K] fp16, bf16 or fp32; down[P, K], the matrices of several layers and adapters one below the other; scale[P]
fp32; t[..., P]; x, down and t of one dtype. Accumulated in fp32, scaled, rounded once. For x in e4m3: scaled_low_rank.
Bytes: x and down read, t written. FLOPs: 2 M P K. Memory: 4 M P a piece of the sum, where only few rows make several
(see _low_rank_sums.py); on an H200 these are 17 MB together at most, and stay in L2.
Exactness: reordered.
Source: Hu et al. 2021 (LoRA), whose A is `down`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.ops import _check, _low_rank, _low_rank_sums, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op

Tensor = torch.Tensor


def reference(x: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    return _low_rank.sums(x, down, scale)


def plain(x: Tensor, down: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    made = F.linear(x, down).mul_(scale)
    return made if out is None else out.copy_(made)


def check(x: Tensor, down: Tensor, scale: Tensor) -> tuple[tuple[int, ...]]:
    _check.activation("low_rank", "x", x, "..")
    return (_low_rank.operands("low_rank", x, down, scale),)


def cost(x: Tensor, down: Tensor, scale: Tensor) -> Cost:
    return _low_rank.cost(x, down, scale, x.dtype)


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:
        return "triton's interpreter cannot multiply bfloat16"
    return "no kernels for float64" if x.dtype is torch.float64 else _low_rank_sums.limit(x)


def reads(x: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return x[:0], x, down, scale  # the result may lie on none


def builds() -> list[Build]:
    made = [build for dtype in (torch.bfloat16, torch.float32) for build in _low_rank_sums.builds(dtype)]
    return [*made, _low_rank_sums.sum_build(torch.bfloat16)]


_REAL = ("real",)


def _args(shape: tuple[int, ...], P: int, layout: str = "dense", down: str = "dense") -> tuple[T, ...]:
    matrix, scale = T((P, shape[-1]), down, std=shape[-1] ** -0.5), T((P,), dtype=torch.float32, mean=0.5)
    return T(shape, layout), matrix, scale


CASES = (
    Case("small", _args((2, 5, 64), 8)),
    Case("rows", _args((7, 64), 24)),
    Case("pieces", _args((1, 70, 640), 40)),
    Case("wide", _args((1, 3, 64), 264)),
    Case("one-rank", _args((2, 5, 64), 1), ("small", "odd")),
    Case("odd", _args((1, 3, 50), 11), ("small", "odd")),
    Case("one-input", _args((5, 1), 8), ("small", "odd")),
    Case("joint", _args((2, 5, 64), 16, "joint"), ("small", "strided")),
    Case("sliced", _args((2, 5, 64), 16, "sliced", "sliced"), ("small", "strided")),
    Case("offset", _args((2, 5, 64), 16, "offset", "offset"), ("small", "strided")),
    Case("transposed", _args((2, 5, 64), 16, "transposed", "transposed"), ("small", "strided")),
    Case("empty", _args((2, 0, 64), 8), ("small", "empty")),
    Case("empty-ranks", _args((2, 5, 64), 0), ("small", "empty")),
    Case("flux-qkv", _args((1, 4096, 3072), 96, "joint"), _REAL),
    Case("flux-text", _args((2, 512, 3072), 96, "joint"), _REAL),
    Case("flux-single", _args((1, 4608, 3072), 128), _REAL),
    Case("flux-single-out", _args((1, 4608, 15360), 32), _REAL),
    Case("flux-single-128", _args((1, 4608, 3072), 512), _REAL),
    Case("z-image-qkv", _args((1, 4320, 3840), 96), _REAL),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    reads=reads,
)
def low_rank(x: Tensor, down: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[..., K] @ down[P, K]^T * scale[P] -> t[..., P]."""
    assert out is not None
    _low_rank_sums.run(x, down, scale, out)
    return out
