"""Rows of activations as e4m3 codes whose scales are known before.

    q[b,s,k] = e4m3(x[b,s,k] / s[b,s])          to nearest, at most +-448

B batch (may be missing), S tokens, K channels. x fp16, bf16 or fp32; s fp32; q e4m3. The quotient in fp32, as product
with the reciprocal, which is exact where s is a power of two (row_bounds). NaN gives NaN, and so does an inf in x,
which the clamp would otherwise hide.
Bytes: x read, codes written, (1 + itemsize) B S K, and 4 a row. FLOPs: 2 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small.
Source: quantize_rows, for activations whose bound follows from what they are made of.
"""

from __future__ import annotations

import torch

from fusedit.ops import _fp8
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._check import like
from fusedit.ops._op import Cost, op
from fusedit.ops.quantize_rows import _kernel, accept, limit, run

Tensor = torch.Tensor


def reference(x: Tensor, s: Tensor) -> Tensor:
    return _fp8.scaled_by(x, s)


def plain(x: Tensor, s: Tensor, *, out: Tensor | None = None) -> Tensor:
    q = _fp8.scaled_by(x, s).to(_fp8.E4M3)
    return q if out is None else out.copy_(q)


def check(x: Tensor, s: Tensor) -> tuple[torch.Size]:
    accept("scale_rows", x)
    like("scale_rows", "s", s, x, x.shape[:-1], torch.float32)
    return (x.shape,)


def cost(x: Tensor, s: Tensor) -> Cost:
    return Cost(x.nbytes + s.nbytes + x.numel(), 2 * x.numel())


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "q_ptr", {"GIVEN": True})


def _args(shape: tuple[int, ...], layout: str = "dense", scales: str = "dense", s: float = 0.01) -> tuple[T, T]:
    return T(shape, layout), T(shape[:-1], scales, torch.float32, "positive", std=s)


CASES = (
    Case("small", _args((2, 5, 64))),
    Case("two-dimensions", _args((7, 64))),
    Case("saturating", _args((1, 3, 64), s=1e-3)),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd")),
    Case("wide", _args((1, 3, 2304))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided")),
    Case("joint", _args((2, 5, 96), "joint", "joint"), ("small", "strided")),
    Case("offset", _args((2, 5, 96), "offset", "offset"), ("small", "strided")),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed"), ("small", "strided")),
    Case("gapped-scales", _args((2, 5, 96), "gapped", "gapped"), ("small", "strided")),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("flux-feed-forward", _args((1, 4096, 12288)), ("real",)),
    Case("z-image-feed-forward", _args((1, 4320, 10240)), ("real",)),
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
    dtypes=(_fp8.E4M3,),
    slack=_fp8.SLACK[:1],
    mixed=True,
)
def scale_rows(x: Tensor, s: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[S,K] or [B,S,K] / s[S] or [B,S] (fp32) -> q e4m3, like x."""
    assert out is not None
    run(x, out, s, None)
    return out
