"""A 3x3 or 1x1 convolution, its bias and a residual, and the sum normalised for the next convolution.

    s[n,k,h,w] = sum_{c,r,s} x[n, c, h + r - R//2, w + s - R//2] weight[k,c,r,s] + bias[k] + residual[n,k,h,w]
    y[n,k,h,w] = silu((s[n,k,h,w] - mean_g) / sqrt(var_g + eps) * norm_weight[k] + norm_bias[k]),  g = group of k
    silu(z) = z sigmoid(z);  with silu=False: y = the norm alone

N pictures, C input and K output channels, the latter in G groups, H, W pixels, R x R taps; x counts as 0 outside. x,
weight, residual, s and y of one dtype, bias, norm_weight and norm_bias of any; bias and residual may be missing. Sums
in fp32; y is made of the rounded s, with the statistics of it or of what it was rounded from.
Who serves a call is asked with `conv2d_group_norm_silu.backend(...)`:
- `hopper`: the kernel of ops.conv2d of that name, which adds bias and residual and, where its tiles are whole (even
  heights, widths of 128), takes the norm's statistics with the products, so that s is written once and read once.
- `library`: cuDNN, then the kernels of the norms, the first of which adds bias and residual.
- `plain`: torch.
Results are channels_last (on a CPU as x lies); with out=(t, t) the norm takes the place of s. Bytes: x, weight,
residual read, s written and read, y written. FLOPs: 2 N H W C K R^2 and about 14 an element. Exactness: reordered.
Source: a residual block of AutoencoderKL, and two as they follow each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.ops import _conv, _conv_direct, _conv_epilogue, _conv_hopper, _group_norm, _group_norm_plain, _triton
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops.conv2d import choose as choose_conv
from fusedit.ops.conv2d import cost as conv_cost
from fusedit.ops.conv2d import reference as conv_reference
from fusedit.ops.group_norm_silu import reference as norm_reference

Tensor = torch.Tensor


def reference(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    s = conv_reference(x, weight, bias, residual)
    return s, norm_reference(s, norm_weight, norm_bias, groups, eps, silu)


def plain(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    s = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    s = _conv_epilogue.in_torch(s, None, residual, "none", None if out is None else out[0])
    return s, _group_norm_plain.plain(s, norm_weight, norm_bias, groups, eps, silu, None if out is None else out[1])


def check(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: object = True,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    name = "conv2d_group_norm_silu"
    shape = _conv.check(name, (1, 3), x, weight, bias, residual, "none")
    _group_norm_plain.check_norm(name, x, shape[1], norm_weight, norm_bias, groups, eps, silu, "norm_")
    return shape, shape


def cost(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
) -> Cost:
    del groups, eps
    moved, flops = conv_cost(x, weight, bias, residual)
    count = x.numel() // max(1, x.shape[1]) * weight.shape[0]
    moved += 2 * count * x.element_size() + norm_weight.nbytes + norm_bias.nbytes
    return Cost(moved, flops + count * (14 if silu else 10))


def reads(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
) -> tuple[Tensor, ...]:
    """s may lie on the residual, y on x, and neither on anything else."""
    del groups, eps, silu
    first = x[:0] if residual is None else residual
    return tuple(t for t in (first, x, weight, norm_weight, norm_bias, bias) if t is not None)


def choose(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del norm_weight, norm_bias, groups, eps, silu
    reason = _group_norm_plain.limit(x)
    usable, why = _triton.status(x.device, x.dtype)
    if not usable or x.dtype is torch.float64 or reason:
        return Backend("plain", why or reason or "no kernels for float64")
    if not x.is_cuda:  # the interpreter
        return Backend("library", "no library on a CPU") if x.dtype is not torch.bfloat16 else Backend("plain", "")
    found = choose_conv(x, weight, bias, residual)
    return found if found.name == "hopper" else Backend("library", found.reason)


def _args(
    N: int,
    C: int,
    H: int,
    W: int,
    K: int,
    groups: int,
    R: int = 3,
    layout: str = "channels_last",
    residual: bool = True,
) -> Any:
    conv = (T((N, C, H, W), layout), T((K, C, R, R), std=(R * R * C) ** -0.5))
    more = (T((K,), std=3.0), T((N, K, H, W), layout, mean=0.3) if residual else None)
    return (*conv, T((K,)), T((K,)), groups, *more)


def _onto(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return others[-1], x


def _onto_the_residual(_: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return others[-1], torch.full_like(others[-1], float("nan"))


def _onto_x(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.full_like(x, float("nan")), x


def _every_second(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, groups: int, bias: Tensor, residual: Tensor) -> Any:
    weight = weight.contiguous(memory_format=torch.channels_last)[::2]
    return x, weight, a[::2], b[::2], groups, bias[::2], residual[:, ::2]


CASES = (
    Case("small", _args(2, 64, 4, 6, 64, 4), alias=_onto),
    Case("more-outputs", _args(2, 32, 4, 6, 48, 4), alias=_onto_the_residual),
    Case("alone", _args(2, 64, 4, 6, 64, 4, residual=False), alias=_onto_x),
    Case("no-silu", (*_args(1, 32, 5, 3, 32, 4)[:5], None, None, 0.5, False)),
    Case("one-by-one", _args(1, 48, 4, 5, 32, 4, 1)),
    Case("odd-channels", (*_args(2, 45, 7, 5, 30, 3)[:5], T((30,), "gapped")), ("small", "odd")),
    Case("nchw", _args(2, 32, 4, 6, 32, 4, 3, "dense"), ("small", "strided"), alias=_onto),
    Case("transposed", _args(2, 32, 4, 6, 32, 2, 3, "transposed"), ("small", "strided")),
    Case("every-second-output", _args(1, 32, 4, 6, 64, 2), ("small", "strided"), packed=_every_second),
    Case("offset", _args(1, 32, 4, 6, 32, 2, 3, "offset"), ("small", "strided")),
    Case("one-pixel", _args(3, 32, 1, 1, 32, 2), ("small", "odd")),
    Case("empty-batch", _args(0, 32, 4, 4, 32, 8), ("small", "empty")),
    Case("vae-128x512", _args(1, 128, 512, 512, 128, 32), ("real",), alias=_onto),
    Case("vae-256x256", _args(1, 256, 256, 256, 256, 32), ("real",), alias=_onto),
    Case("vae-512x128", _args(2, 512, 128, 128, 512, 32), ("real",), alias=_onto_the_residual),
    Case("vae-alone-128x512", _args(1, 128, 512, 512, 128, 32, residual=False), ("real",), alias=_onto_x),
    # Tiles that end inside: the statistics are a pass of their own.
    Case("vae-odd", _args(2, 128, 261, 250, 128, 32), ("real",), alias=_onto),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    backend=choose,
    reads=reads,
    allocate=_group_norm_plain.allocate,
    one_place=True,
)
def conv2d_group_norm_silu(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    groups: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """s = conv(x[N,C,H,W], weight[K,C,R,R]) + bias[K] + residual[N,K,H,W] and y = silu(GroupNorm(s)) -> (s, y)."""
    this, norm = conv2d_group_norm_silu, (norm_weight, norm_bias, groups, eps, silu)
    name = choose(x, weight, norm_weight, norm_bias, groups, bias, residual).name
    if name == "plain":
        this.ran[name] += 1
        made = this.unchecked(x, weight, norm_weight, norm_bias, groups, bias, residual, eps, silu, out=out)
        return made if out is not None else (_as_allocated(x, made[0]), _as_allocated(x, made[1]))
    N, _, H, W = x.shape
    shape = (N, weight.shape[0], H, W)
    s, y = (_group_norm_plain.allocate(x, shape), _group_norm_plain.allocate(x, shape)) if out is None else out
    if name == "hopper" and not (_group_norm.fits(s) and _group_norm.fits(y)):
        name = "library"  # whatever a caller gave as `out`
    if name == "hopper" and _conv_hopper.reason(x, len(weight), 3, "none", residual, s):
        name = "library"
    this.ran[name] += 1
    (_hopper if name == "hopper" else _library)(x, weight, norm, bias, residual, s, y)
    return s, y


Norm = tuple[Tensor, Tensor, int, float, bool]


def _hopper(
    x: Tensor, weight: Tensor, norm: Norm, bias: Tensor | None, residual: Tensor | None, s: Tensor, y: Tensor
) -> None:
    norm_weight, norm_bias, groups, eps, silu = norm
    H, W = x.shape[2:]
    whole = _conv_hopper.measures(H, W)
    found = _conv_hopper.conv(x, _conv_direct.rows_of(weight), bias, residual, "none", s, moments=whole)
    if found is None:
        centers, factors = _group_norm.moments(s, None, None, norm_weight, groups, eps)
    else:
        tiles = (found.means, found.squares, None, norm_weight, groups, eps, H * W, found.size)
        centers, factors = _group_norm.joined(*tiles)
    return _group_norm.normalise(s, centers, factors, norm_bias, silu, y)


def _library(
    x: Tensor, weight: Tensor, norm: Norm, bias: Tensor | None, residual: Tensor | None, s: Tensor, y: Tensor
) -> None:
    product = F.conv2d(_conv.dense(x), weight, padding=weight.shape[-1] // 2)
    if residual is None:
        _conv_epilogue.epilogue(product, bias, None, "none", s)
        return _group_norm.launch(s, None, None, *norm, None, y)
    return _group_norm.launch(product, residual, bias, *norm, s, y)


def _as_allocated(x: Tensor, made: Tensor) -> Tensor:
    return made.contiguous(memory_format=_group_norm_plain.memory_format(x))
