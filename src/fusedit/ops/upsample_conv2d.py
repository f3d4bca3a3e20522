"""Nearest-neighbour doubling of a picture and the 3x3 convolution behind it, as 2x2 convolutions on the small picture.

    y[n,k,i,j] = bias[k] + sum_{c,r,s} u[n, c, i + r - 1, j + s - 1] weight[k,c,r,s],  u[n,c,i,j] = x[n, c, i//2, j//2]

N pictures, C input and K output channels, x[N,C,H,W], y[N,K,2H,2W]; u counts as 0 outside. Around an output pixel the
nine taps meet only 2 x 2 different pixels of x. In one dimension, with taps a, b, c, the even outputs are
a x[i-1] + (b + c) x[i] and the odd ones (a + b) x[i] + c x[i+1]. So each of the four outputs above a pixel is a 2x2
convolution with sums of the taps: the same mathematics, 4/9 of the products, and no u. All four together are a
transposed convolution 4x4 of stride 2, whose taps are c, b + c, a + b, a; sums in fp32, rounded once, in each call.
- `library`: on CUDA, one kernel for the sums, cuDNN for the transposed convolution, and one for a bias.
- `plain`: torch, on a CPU; in half precision and for small pictures with u.
An own product by TMA over the four 2x2 convolutions took 254 us for 512 channels at 128x128 on an H200 (the library
208), 938 at 256x256 (750) and 995 for 256 channels at 512x512 (850): there is none.
Where x is infinite the result may be so where stock's is not a number, since sums of taps meet it once.
The result is channels_last. Bytes: x, weight, bias read, y written. FLOPs: 32 N H W C K. Exactness: reordered.
Source: Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?".
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.ops import _conv, _conv_epilogue, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._rows import cdiv
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
_BLOCK: Final = 32
_SMALL: Final = 1024
"""Pixels of x from which plain torch sums the taps: with 512 channels at 8x8 that is three times as slow as stock."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, weight, bias = wide(x, weight, bias)
    return F.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), weight, bias, padding=1)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    if not x.numel():
        y = x.new_empty((x.shape[0], weight.shape[0], 2 * x.shape[2], 2 * x.shape[3]))
        return y if out is None else out
    # In half precision the sums would be rounded once more; on a small picture they take longer than they save.
    if x.dtype in (torch.bfloat16, torch.float16) or x.shape[2] * x.shape[3] < _SMALL:
        y = F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)
    else:
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
    del weight, bias
    on_gpu = x.is_cuda or _triton.INTERPRETING
    return Backend("library", "") if on_gpu else Backend("plain", f"no kernels for device type {x.device.type}")


@kernel
def _taps(at: tl.tensor, w_s: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One row of taps in fp32."""
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + w_s, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(at + 2 * w_s, mask=mask, other=0.0).to(tl.float32)
    return a, b, c


@kernel
def _spread(to: tl.tensor, K: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, mask: tl.tensor) -> None:
    """One row of the larger kernel: c, b + c, a + b, a."""
    tl.store(to, c.to(to.dtype.element_ty), mask=mask)
    tl.store(to + K, (b + c).to(to.dtype.element_ty), mask=mask)
    tl.store(to + 2 * K, (a + b).to(to.dtype.element_ty), mask=mask)
    tl.store(to + 3 * K, a.to(to.dtype.element_ty), mask=mask)


@kernel
def _fold(
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.tensor,
    C: tl.tensor,
    w_k: tl.tensor,
    w_c: tl.tensor,
    w_r: tl.tensor,
    w_s: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """out[c, i, j, k] = sum of the taps weight[k, c, r, s] with i + r and j + s in (2, 3), in fp32."""
    across = tl.cdiv(K, BLOCK)
    k = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    mask = (k < K)[:, None] & (c < C)[None, :]
    at = weight_ptr + (k.to(tl.int64) * w_k)[:, None] + (c.to(tl.int64) * w_c)[None, :]
    to = out_ptr + k[:, None] + (c.to(tl.int64) * 16 * K)[None, :]
    a0, b0, c0 = _taps(at, w_s, mask)
    a1, b1, c1 = _taps(at + w_r, w_s, mask)
    a2, b2, c2 = _taps(at + 2 * w_r, w_s, mask)
    _spread(to, K, a2, b2, c2, mask)
    _spread(to + 4 * K, K, a1 + a2, b1 + b2, c1 + c2, mask)
    _spread(to + 8 * K, K, a0 + a1, b0 + b1, c0 + c1, mask)
    _spread(to + 12 * K, K, a0, b0, c0, mask)


def folded(weight: Tensor) -> Tensor:
    """[K,C,3,3] -> [C,K,4,4] channels_last, as `transposed`, by the kernel where it can run."""
    usable, _ = _triton.status(weight.device, weight.dtype)
    if not usable or weight.dtype == torch.float64:
        return transposed(weight).contiguous(memory_format=torch.channels_last)
    K, C = weight.shape[:2]
    out = _conv.channels_last(weight, (C, K, 4, 4))
    strides = (weight.stride(d) for d in range(4))
    grid = (cdiv(K, _BLOCK) * cdiv(C, _BLOCK),)
    _fold[grid](weight, out, K, C, *strides, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
    return out


def builds() -> list[Build]:
    types = {"weight_ptr": "*bf16", "out_ptr": "*bf16"}
    return [Build.of("fold-bf16", _fold, types, {"BLOCK": _BLOCK}, 4, "no-spill")]


def _args(N: int, C: int, H: int, W: int, K: int, layout: str = "channels_last") -> Any:
    return (T((N, C, H, W), layout), T((K, C, 3, 3), std=(9 * C) ** -0.5), T((K,)))


CASES = (
    Case("small", _args(1, 16, 3, 5, 32)),
    Case("two-blocks", (*_args(1, 40, 1, 2, 72)[:2],)),
    Case("three-pictures", _args(3, 8, 3, 2, 24)),
    Case("one-pixel", _args(2, 8, 1, 1, 24), ("small", "odd")),
    Case("odd", _args(1, 35, 3, 5, 13), ("small", "odd")),
    Case("nchw", _args(1, 8, 3, 5, 24, "dense"), ("small", "strided")),
    Case("offset", _args(1, 8, 3, 5, 24, "offset"), ("small", "strided")),
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
    if choose(x, weight, bias).name == "plain":
        upsample_conv2d.ran["plain"] += 1
        made = upsample_conv2d.unchecked(x, weight, bias, out=out)
        return made if out is not None else made.contiguous(memory_format=torch.channels_last)
    upsample_conv2d.ran["library"] += 1
    made = F.conv_transpose2d(_conv.dense(x), folded(weight), stride=2, padding=1)
    if bias is None:
        return made if out is None else out.copy_(made)
    return _conv_epilogue.epilogue(made, bias, None, "none", made if out is None else out)
