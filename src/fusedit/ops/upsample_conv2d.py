"""Nearest-neighbour doubling of a picture and the 3x3 convolution behind it, as 2x2 convolutions on the small picture.

    y[n,k,i,j] = bias[k] + sum_{c,r,s} u[n, c, i + r - 1, j + s - 1] weight[k,c,r,s],  u[n,c,i,j] = x[n, c, i//2, j//2]

N pictures, C input and K output channels, x[N,C,H,W], y[N,K,2H,2W]; u counts as 0 outside. Around an output pixel the
nine taps meet only 2 x 2 different pixels of x. In one dimension, with taps a, b, c, the even outputs are
a x[i-1] + (b + c) x[i] and the odd ones (a + b) x[i] + c x[i+1]. So each of the four outputs above a pixel is a 2x2
convolution with sums of the taps: the same mathematics, 4/9 of the products, and no u. Sums in fp32, rounded once.
- `tma`: on Hopper, the four as one product (_conv_tma.py), bias in its epilogue.
- `library`: a transposed convolution 4x4 of stride 2, whose weights are c, b + c, a + b, a, then the bias.
- `plain`: the latter in torch, on a CPU.
The result is channels_last. Bytes: x, weight, bias read, y written. FLOPs: 32 N H W C K. Exactness: reordered.
Source: Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.ops import _conv, _conv_epilogue, _conv_tma, _triton
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Build, Cost, op, wide

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, weight, bias = wide(x, weight, bias)
    return F.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), weight, bias, padding=1)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    y = F.conv_transpose2d(x, transposed(weight), bias, stride=2, padding=1)
    return y if out is None else out.copy_(y)


def transposed(weight: Tensor) -> Tensor:
    """[K,C,3,3] of a convolution after doubling -> [C,K,4,4] of the transposed convolution that equals both."""
    w = weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight
    for dim in (2, 3):
        before, here, after = w.unbind(dim)
        w = torch.stack((after, here + after, before + here, before), dim)
    return w.transpose(0, 1).to(weight.dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[tuple[int, ...]]:
    N, K, H, W = _conv.check("upsample_conv2d", (3,), x, weight, bias, None, "none")
    return ((N, K, 2 * H, 2 * W),)


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    pixels = x.numel() // max(1, x.shape[1])
    moved = x.nbytes + weight.nbytes + 4 * pixels * weight.shape[0] * x.element_size()
    return Cost(moved + (0 if bias is None else bias.nbytes), 32 * pixels * weight.shape[0] * weight.shape[1])


def reads(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return tuple(t for t in (x[:0], x, weight, bias) if t is not None)  # the result may lie on none of them


def choose(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del bias
    usable, why = _triton.status(x.device, x.dtype)
    if not (x.is_cuda or _triton.INTERPRETING):
        return Backend("plain", why or f"no kernels for device type {x.device.type}")
    if usable and x.dtype == torch.float64:
        usable, why = False, "no kernels for float64"
    reason = why if not usable else _conv_tma.reason(x, weight.shape[0])
    if not reason and weight.shape[0] % 128:
        reason = f"{weight.shape[0]} outputs are no multiple of 128"
    return Backend("library", reason) if reason else Backend("tma", "")


def builds() -> list[Build]:
    return _conv_tma.builds_of_doubled()


def _args(N: int, C: int, H: int, W: int, K: int, layout: str = "channels_last") -> Any:
    return (T((N, C, H, W), layout), T((K, C, 3, 3), std=(9 * C) ** -0.5), T((K,)))


CASES = (
    Case("small", _args(1, 16, 3, 5, 128)),
    Case("two-steps", (*_args(1, 72, 1, 2, 128)[:2],)),
    Case("three-pictures", _args(3, 8, 3, 2, 128)),
    Case("one-pixel", _args(2, 8, 1, 1, 128), ("small", "odd")),
    Case("odd", _args(1, 35, 3, 5, 13), ("small", "odd")),
    Case("nchw", _args(1, 8, 3, 5, 128, "dense"), ("small", "strided")),
    Case("offset", _args(1, 8, 3, 5, 128, "offset"), ("small", "strided")),
    Case("empty", _args(0, 16, 3, 5, 128), ("small", "empty")),
    Case("vae-512x64", _args(1, 512, 64, 64, 512), ("real",)),
    Case("vae-512x128", _args(1, 512, 128, 128, 512), ("real",)),
    Case("vae-512x256", _args(1, 512, 256, 256, 512), ("real",)),
    Case("vae-256x512", _args(1, 256, 512, 512, 256), ("real",)),
    Case("vae-odd", _args(3, 256, 61, 133, 256), ("real",)),
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
    allocate=_conv.channels_last,
)
def upsample_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """conv3x3(nearest-doubled x[N,C,H,W], weight[K,C,3,3]) + bias[K] -> [N,K,2H,2W] channels_last."""
    x = _conv.dense(x)
    name = choose(x, weight, bias).name
    upsample_conv2d.ran[name] += 1
    if name == "plain":
        return upsample_conv2d.unchecked(x, weight, bias, out=out)
    if name == "library":
        made = F.conv_transpose2d(x, transposed(weight), stride=2, padding=1)
        if bias is None:
            return made if out is None else out.copy_(made)
        return _conv_epilogue.epilogue(made, bias, None, "none", made if out is None else out)
    N, _, H, W = x.shape
    shape = (N, weight.shape[0], 2 * H, 2 * W)
    direct = out is not None and out.is_contiguous(memory_format=torch.channels_last) and out.data_ptr() % 16 == 0
    y = out if out is not None and direct else _conv.channels_last(x, shape)
    _conv_tma.doubled(x, weight, bias, y)
    return y if out is None or direct else out.copy_(y)
