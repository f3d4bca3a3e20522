"""Adds a convolution's bias and a residual, and normalises the sum for the next convolution.

    s[n,c,h,w] = x[n,c,h,w] + pre_bias[c] + residual[n,c,h,w]
    y[n,c,h,w] = silu((s[n,c,h,w] - mean_g) / sqrt(var_g + eps) * weight[c] + bias[c]),  g = group of c
    silu(z) = z sigmoid(z);  with silu=False: y = the norm alone

N images, C channels in G groups, H, W pixels. x, residual, s and y fp16, bf16 or fp32; weight, bias and pre_bias (None:
nothing is added) any of them. In fp32, s and y rounded once each; y is made of the rounded s, and its statistics are
taken as s is written. The kernels are in _group_norm.py.
Bytes: x, residual read, s written and read, y written, 5 numel itemsize: an addition of the bias, one of the residual
and a GroupNorm + SiLU move 8. FLOPs: about 14 an element.
Layouts as in group_norm_silu. Exactness: reordered.
Source: two residual blocks of AutoencoderKL as they follow each other.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _group_norm, _group_norm_plain
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.group_norm_silu import reference as norm_reference

Tensor = torch.Tensor


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x, residual, pre_bias = wide(x, residual, pre_bias)
    s = x + residual if pre_bias is None else x + pre_bias[:, None, None] + residual
    return s, norm_reference(s, weight, bias, groups, eps, silu)


def plain(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias, pre_bias)):  # in the widest, but for s
        wider, other, pre_bias, weight, bias = wide(x, residual, pre_bias, weight, bias)
        s = plain(wider, other, weight, bias, groups, eps, False, pre_bias)[0].to(x.dtype)
        y = _group_norm_plain.plain(s.to(wider.dtype), weight, bias, groups, eps, silu, None).to(x.dtype)
        return (s, y) if out is None else (out[0].copy_(s), out[1].copy_(y))
    x = x if pre_bias is None else x + pre_bias[:, None, None]
    s = torch.add(x, residual, out=None if out is None else out[0])
    return s, _group_norm_plain.plain(s, weight, bias, groups, eps, silu, None if out is None else out[1])


def check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: object = True,
    pre_bias: Tensor | None = None,
) -> tuple[torch.Size, torch.Size]:
    name = "residual_group_norm_silu"
    shape = _group_norm_plain.check(name, x, weight, bias, groups, eps, silu, pre_bias)
    _check.like(name, "residual", residual, x)
    return shape, shape


def cost(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
) -> Cost:
    del groups, eps
    vectors = sum(t.nbytes for t in (weight, bias, pre_bias) if t is not None)
    return Cost(4 * x.nbytes + residual.nbytes + vectors, x.numel() * (14 if silu else 10))


def builds() -> list[Build]:
    return _group_norm.builds(residual=True)


def _args(
    N: int, C: int, H: int, W: int, groups: int, layout: str = "channels_last", other: str = "channels_last"
) -> Any:
    return (T((N, C, H, W), layout, mean=0.3), T((N, C, H, W), other), T((C,)), T((C,)), groups)


def _onto(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x, torch.full_like(x, float("nan"))


CASES = (
    Case("small", _args(2, 64, 4, 6, 4), alias=_onto),
    Case("pre-bias", (*_args(2, 64, 4, 6, 4), 1e-6, True, T((64,), std=3.0)), alias=_onto),
    Case("onto-both", _args(1, 32, 4, 4, 4), ("small", "alias"), alias=lambda x, residual, *_: (residual, x)),
    Case("no-silu", (*_args(1, 32, 5, 3, 4), 0.5, False)),
    Case("many-pixels", _args(1, 16, 40, 40, 2), alias=_onto),
    Case("odd-channels", (*_args(2, 30, 7, 5, 3), 1e-6, True, T((30,), "gapped")), ("small", "odd"), alias=_onto),
    Case("blocks-of-channels", _args(1, 640, 3, 5, 2)),
    Case("nchw", _args(2, 64, 4, 6, 4, "dense", "dense"), ("small", "strided"), alias=_onto),
    Case("mixed-layouts", _args(2, 32, 4, 6, 2, "transposed", "offset"), ("small", "strided")),
    Case("fp32-vectors", (*(T((1, 32, 4, 4)),) * 2, *(T((32,), dtype=torch.float32),) * 2, 4), ("small", "mixed")),
    Case("one-pixel", _args(3, 32, 1, 1, 2), ("small", "odd")),
    Case("empty-batch", _args(0, 32, 4, 4, 8), ("small", "empty")),
    Case("vae-128x1024", (*_args(1, 128, 1024, 1024, 32), 1e-6, True, T((128,))), ("real",), alias=_onto),
    Case("vae-256x512", (*_args(1, 256, 512, 512, 32), 1e-6, True, T((256,))), ("real",), alias=_onto),
    Case("vae-512x128", (*_args(2, 512, 128, 128, 32), 1e-6, True, T((512,))), ("real",), alias=_onto),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=_group_norm_plain.limit,
    fits=lambda _: True,
    allocate=_group_norm_plain.allocate,
    mixed=True,
)
def residual_group_norm_silu(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x[N,C,H,W] + pre_bias[C] + residual and y = silu(GroupNorm(s)) -> (s, y); s may lie on x or residual."""
    assert out is not None
    _group_norm.launch(x, residual, pre_bias, weight, bias, groups, eps, silu, *out)
    return out
