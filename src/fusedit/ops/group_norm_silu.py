"""GroupNorm, then SiLU, on channels_last memory: statistics split over the whole chip, then one pass that writes.

    s[n,c,h,w] = x[n,c,h,w] + pre_bias[c]
    y[n,c,h,w] = silu((s[n,c,h,w] - mean_g) / sqrt(var_g + eps) * weight[c] + bias[c]),  g = group of c
    silu(z) = z sigmoid(z);  with silu=False: y = the norm alone

N images, C channels in G groups, H, W pixels; mean_g and var_g of s over the C/G channels and H W pixels of a group. x
and y fp16, bf16 or fp32; weight, bias and pre_bias (the bias of the convolution that made x, which then needs no pass
of its own) any of them. All in fp32, rounded once; the kernels are in _group_norm.py.
Bytes: x read twice and y written, 3 numel itemsize, where x is larger than the cache. FLOPs: about 12 an element.
x in another layout than channels_last is converted first (a copy). The result is channels_last; plain torch on a CPU
keeps the layout of x.
Exactness: reordered.
Source: Wu and He 2018, as the residual blocks of AutoencoderKL use it.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _group_norm, _group_norm_plain
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
) -> Tensor:
    x, weight, bias, pre_bias = wide(x, weight, bias, pre_bias)
    N, C, H, W = x.shape
    if pre_bias is not None:
        x = x + pre_bias[:, None, None]
    g = x.reshape(N, groups, C // groups * H * W)
    g = g - g.mean(-1, keepdim=True)
    n = (g / torch.sqrt(g.square().mean(-1, keepdim=True) + eps)).view(N, C, H, W)
    n = n * weight[:, None, None] + bias[:, None, None]
    return n / (1 + torch.exp(-n)) if silu else n


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    x = x if pre_bias is None else x + pre_bias[:, None, None]
    return _group_norm_plain.plain(x, weight, bias, groups, eps, silu, out)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: object = True,
    pre_bias: Tensor | None = None,
) -> tuple[torch.Size]:
    return (_group_norm_plain.check("group_norm_silu", x, weight, bias, groups, eps, silu, pre_bias),)


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
) -> Cost:
    del groups, eps
    vectors = sum(t.nbytes for t in (weight, bias, pre_bias) if t is not None)
    return Cost(3 * x.nbytes + vectors, x.numel() * (12 if silu else 8))


def builds() -> list[Build]:
    return _group_norm.builds(residual=False)


def _args(N: int, C: int, H: int, W: int, groups: int, layout: str = "channels_last", mean: float = 0.3) -> Any:
    return (T((N, C, H, W), layout, mean=mean), T((C,)), T((C,)), groups)


CASES = (
    Case("small", _args(2, 64, 4, 6, 4), alias=lambda x, *_: x),
    Case("groups-16", _args(1, 32, 3, 3, 16)),
    Case("no-silu", _args(1, 64, 5, 3, 4), kwargs=(("silu", False),)),
    Case("eps", _args(1, 32, 4, 4, 4), kwargs=(("eps", 0.5),)),
    Case("pre-bias", (*_args(2, 64, 4, 6, 4), 1e-6, True, T((64,), std=3.0)), alias=lambda x, *_: x),
    Case("pre-bias-odd", (*_args(1, 30, 7, 5, 3), 1e-6, False, T((30,), "gapped")), ("small", "odd")),
    Case("one-group", _args(1, 24, 5, 5, 1), ("small", "odd")),
    Case("instance", _args(1, 5, 5, 5, 5), ("small", "odd")),
    Case("three-a-group", _args(1, 12, 7, 5, 4), ("small", "odd")),
    Case("odd-channels", _args(2, 30, 7, 5, 3), ("small", "odd")),
    Case("many-pixels", _args(1, 16, 40, 40, 2)),
    Case("mean-50", _args(1, 32, 20, 20, 2, mean=50.0)),
    Case("blocks-of-channels", _args(1, 640, 3, 5, 2)),
    Case("nchw", _args(2, 64, 4, 6, 4, "dense"), ("small", "strided"), alias=lambda x, *_: x),
    Case("transposed", _args(2, 32, 4, 6, 2, "transposed"), ("small", "strided")),
    Case("offset", _args(2, 32, 4, 6, 2, "offset"), ("small", "strided")),
    Case("one-pixel", _args(2, 32, 1, 1, 2), ("small", "odd")),
    Case("empty-batch", _args(0, 32, 4, 4, 8), ("small", "empty")),
    Case("vae-128x1024", _args(1, 128, 1024, 1024, 32), ("real",)),
    Case("vae-256x512", _args(1, 256, 512, 512, 32), ("real",)),
    Case("vae-512x128", _args(2, 512, 128, 128, 32), ("real",)),
    Case("vae-mean-100", _args(1, 512, 128, 128, 32, mean=100.0), ("real",)),
    Case("vae-nchw", _args(1, 512, 128, 128, 32, "dense"), ("real",), kwargs=(("silu", False),)),
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
)
def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    pre_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(GroupNorm(x[N,C,H,W] + pre_bias[C])) -> [N,C,H,W] channels_last (plain torch on a CPU: as x lies)."""
    assert out is not None
    _group_norm.launch(x, None, pre_bias, weight, bias, groups, eps, silu, None, out)
    return out
