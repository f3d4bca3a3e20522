"""The first half of low-rank terms, of activations that are codes: LoRA's small matrices are codes as well.

    t[..., p] = scale[p] * sum_k x[..., k] down[p, k]

x[..., K], down[P, K] e4m3, the matrices of several layers and adapters one below the other; scale[P] fp32, the scale of
each row of down's codes times that of its adapter; t[..., P] in `dtype`. The scales of x are left to the product that
takes t. Accumulated in fp32 (with about 14 bits in the tensor cores of compute capability 8.9 and 9.0).
In e4m3 the matrices are as exact as the weights they stand beside: 2.6 % of what they add, at random.
Bytes: x and down read, t written. FLOPs: 2 M P K. Memory: as low_rank.
Exactness: lossy, as codes are; against the exact sums of the codes only sums and t are rounded.
Source: Hu et al. 2021 (LoRA), whose A is `down`.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _fp8, _low_rank, _low_rank_sums, _scaled
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import E4M3
from fusedit.ops._op import Cost, op
from fusedit.ops._scaled import DTYPES, codes

Tensor = torch.Tensor


def reference(x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16") -> Tensor:
    del dtype
    return _low_rank.sums(x, down, scale)


def plain(x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16", *, out: Tensor | None = None) -> Tensor:
    made = reference(x, down, scale)
    return made.to(DTYPES[dtype]) if out is None else out.copy_(made)


def check(x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16") -> tuple[tuple[int, ...]]:
    _check.fp8("scaled_low_rank", "x", x, "..")
    _scaled.output("scaled_low_rank", dtype)
    return (_low_rank.operands("scaled_low_rank", x, down, scale),)


def cost(x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16") -> Cost:
    return _low_rank.cost(x, down, scale, DTYPES[dtype])


def dtypes(*args: Any, dtype: str = "bfloat16", **_: Any) -> tuple[torch.dtype]:
    return (DTYPES[args[3] if len(args) > 3 else dtype],)


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    return _fp8.limit(x) or _low_rank_sums.limit(x)


def reads(x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16") -> tuple[Tensor, ...]:
    del dtype
    return x[:0], x, down, scale  # the result may lie on none


def builds() -> list[Build]:
    return _low_rank_sums.builds(E4M3)


_REAL = ("real",)


def _args(shape: tuple[int, ...], P: int, layout: str = "dense", down: str = "dense") -> tuple[T, ...]:
    scale = T((P,), dtype=torch.float32, std=0.01 * max(1, shape[-1]) ** -0.5)
    return codes(*shape, layout=layout), codes(P, shape[-1], layout=down), scale


CASES = (
    Case("small", _args((2, 5, 64), 8)),
    Case("rows", _args((7, 64), 24)),
    Case("fp32", (*_args((7, 64), 24), "float32")),
    Case("fp16", (*_args((2, 5, 64), 8), "float16")),
    Case("pieces", _args((1, 70, 2700), 40)),
    Case("wide", _args((1, 3, 64), 256)),
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
    Case("flux-text-out", _args((1, 512, 12288), 32), _REAL),
    Case("z-image-qkv", _args((1, 4320, 3840), 96), _REAL),
    Case("z-image-out", _args((1, 4320, 10240), 32), _REAL),
)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    reads=reads,
    dtypes=dtypes,
    slack=(_scaled.SLACK,),
    mixed=True,
)
def scaled_low_rank(
    x: Tensor, down: Tensor, scale: Tensor, dtype: str = "bfloat16", *, out: Tensor | None = None
) -> Tensor:
    """x[..., K] @ down[P, K]^T * scale[P], x and down e4m3 -> t[..., P] in `dtype`."""
    assert out is not None
    del dtype
    _low_rank_sums.run(x, down, scale, out)
    return out
