"""GroupNorm, SiLU and a convolution to few channels, as a VAE's decoder ends, without the norm's picture in between.

    s = x + pre_bias[c] + residual                                            either may be missing
    n = silu(GroupNorm(s) * norm_weight[c] + norm_bias[c])                    as in group_norm_silu
    y[n,k,h,w] = bias[k] + sum_{c,r,s} n[n, c, h + r - R//2, w + s - R//2] weight[k,c,r,s]

N pictures, C input and K output channels, H, W pixels, R x R taps, K R^2 <= 32; n counts as 0 outside. x, residual,
weight and y of one dtype; norm_weight, norm_bias, bias and pre_bias any. Statistics as in _group_norm.py, with a
residual as s is written; then each pixel is normalised, rounded and multiplied with all taps as it is read
(_conv_gather.py). The result is dense NCHW, as a picture leaves a VAE.
Bytes: x read twice, y written, and with a residual that read and s written: n in memory would cost two more passes.
FLOPs: 2 N H W C K R^2. Exactness: reordered.
Source: the last layers of AutoencoderKL's decoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _conv, _conv_gather, _group_norm, _group_norm_plain, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.conv2d import reference as conv_reference
from fusedit.ops.group_norm_silu import plain as plain_norm
from fusedit.ops.group_norm_silu import reference as norm_reference

Tensor = torch.Tensor


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    pre_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    if residual is not None:
        x = wide(x) + wide(residual)
    return conv_reference(norm_reference(x, norm_weight, norm_bias, groups, eps, True, pre_bias), weight, bias)


def plain(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    pre_bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if residual is not None:
        x, pre_bias = (x if pre_bias is None else x + pre_bias[:, None, None]) + residual, None
    n = plain_norm(x, norm_weight, norm_bias, groups, eps, True, pre_bias)
    y = F.conv2d(n, weight, bias, padding=weight.shape[-1] // 2)
    return y if out is None else out.copy_(y)


def check(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    pre_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[tuple[int, ...]]:
    name = "group_norm_silu_conv2d"
    _group_norm_plain.check(name, x, norm_weight, norm_bias, groups, eps, True, pre_bias)
    shape = _conv.check(name, (1, 3), x, weight, bias, None, "none")
    if residual is not None:
        _check.like(name, "residual", residual, x)
    if weight.shape[0] * weight.shape[2] ** 2 > _conv_gather.COLUMNS:
        raise OpError(f"{name}: outputs times taps of weight must be at most 32, not {_check.show(weight)}")
    return (shape,)


def cost(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    pre_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Cost:
    del groups, eps
    small = sum(t.nbytes for t in (norm_weight, norm_bias, weight, bias, pre_bias) if t is not None)
    count = x.numel() // max(1, x.shape[1])
    written = count * weight.shape[0] * x.element_size()
    added = 0 if residual is None else residual.nbytes + x.nbytes
    return Cost(2 * x.nbytes + added + written + small, 2 * count * weight.numel() + 12 * x.numel())


def reads(x: Tensor, *others: Any, **named: Any) -> tuple[Tensor, ...]:
    """The result may lie on none of them."""
    given = (x, *others, *named.values())
    return (x[:0], *(t for t in given if isinstance(t, Tensor)))


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:  # it would multiply the bit patterns, as whole numbers
        return "triton's interpreter cannot multiply bfloat16"
    return _group_norm_plain.limit(x)


def builds() -> list[Build]:
    return _conv_gather.builds(norm=True)


def _args(N: int, C: int, H: int, W: int, groups: int, K: int = 3, R: int = 3, layout: str = "channels_last") -> Any:
    norm = (T((N, C, H, W), layout, mean=0.3), T((C,)), T((C,)), groups)
    return (*norm, T((K, C, R, R), std=(R * R * C) ** -0.5), T((K,)))


def _every_second(*args: Any) -> Any:
    *norm, weight, bias = args
    return (*norm, weight.contiguous(memory_format=torch.channels_last)[::2], bias[::2])


CASES = (
    Case("small", _args(2, 32, 5, 7, 4)),
    Case("one-by-one", _args(1, 64, 3, 5, 8, 20, 1)),
    Case("pre-bias", (*_args(1, 32, 4, 6, 4), 1e-5, T((32,), std=3.0))),
    Case("residual", (*_args(1, 32, 4, 6, 4), 1e-6, T((32,)), T((1, 32, 4, 6)))),
    Case("no-bias", (*_args(1, 48, 4, 6, 4)[:5],)),
    Case("odd", _args(3, 30, 7, 1, 3, 2), ("small", "odd")),
    Case("nchw", _args(1, 32, 4, 5, 4, layout="dense"), ("small", "strided")),
    Case("transposed", _args(2, 32, 4, 5, 4, layout="transposed"), ("small", "strided")),
    Case("every-second-output", _args(1, 32, 4, 5, 4, 6), ("small", "strided"), packed=_every_second),
    Case("empty", _args(0, 32, 4, 5, 4), ("small", "empty")),
    Case(
        "vae-128x1024",
        (*_args(1, 128, 1024, 1024, 32), 1e-6, T((128,)), T((1, 128, 1024, 1024), "channels_last")),
        ("real",),
    ),
    Case("vae-odd", _args(3, 128, 333, 200, 32), ("real",)),
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
    fits=lambda _: True,
)
def group_norm_silu_conv2d(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    pre_bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """conv(silu(GroupNorm(x[N,C,H,W] + pre_bias[C] + residual)), weight[K,C,R,R]) + bias[K] -> [N,K,H,W] dense."""
    assert out is not None
    x = _group_norm.lying(x)
    if residual is None:
        centers, factors = _group_norm.moments(x, None, pre_bias, norm_weight, groups, eps)
    else:
        summed = _conv.channels_last(x, x.shape)
        residual = _group_norm.lying(residual)
        centers, factors = _group_norm.moments(x, residual, pre_bias, norm_weight, groups, eps, summed)
        x = summed
    norm = _conv_gather.Norm(centers, factors, norm_bias.contiguous())
    _conv_gather.gather(x, weight, bias, None, "none", out, norm)
    return out
