"""The same picture with the channels of a pixel side by side in memory (channels_last).

    y[n,c,h,w] = x[n,c,h,w];  y lies in memory as [N, H, W, C]

N pictures, C channels, H, W pixels; x at any strides, x and y fp16, bf16 or fp32. `out` may lie in any way, so a slice
of a wider buffer too. Tensor cores take products over channels, so a convolution wants them dense: a library that is
given NCHW makes this copy before and its inverse after.
Bytes: 2 numel itemsize. FLOPs: none. Exactness: bitwise.
Source: torch's contiguous(memory_format=torch.channels_last).
"""

from __future__ import annotations

import torch

from fusedit.ops import _check, _rows, _transpose
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._conv import channels_last
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor) -> Tensor:
    return wide(x).clone(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def plain(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    return x.clone(memory_format=torch.channels_last) if out is None else out.copy_(x)


def check(x: Tensor) -> tuple[torch.Size]:
    _check.activation("nchw_to_nhwc", "x", x, "NCHW")
    return (x.shape,)


def cost(x: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 0)


def builds() -> list[Build]:
    return _transpose.transposing_builds(_transpose.ALONG_PIXELS, _transpose.ALONG_CHANNELS)


def limit(x: Tensor) -> str:
    return _rows.too_many(x.shape[0], *x.shape[2:])


CASES = (
    Case("small", (T((2, 64, 4, 6)),), alias=lambda x: x),
    Case("three-channels", (T((1, 3, 9, 16)),), ("small", "odd")),
    Case("sixteen-channels", (T((1, 16, 24, 40)),)),
    Case("many-pixels", (T((1, 8, 40, 40)),)),
    Case("more-than-a-block", (T((1, 136, 3, 40)),)),
    Case("odd", (T((3, 75, 7, 5)),), ("small", "odd")),
    Case("one-channel", (T((2, 1, 5, 8)),), ("small", "odd")),
    Case("one-pixel", (T((2, 24, 1, 1)),), ("small", "odd")),
    Case("one-column", (T((2, 24, 9, 1)),), ("small", "odd")),
    Case("sliced", (T((2, 24, 4, 8), "sliced"),), ("small", "strided")),
    Case("joint", (T((2, 24, 4, 8), "joint"),), ("small", "strided")),
    Case("inside", (T((2, 24, 4, 8), "inside"),), ("small", "strided")),
    Case("offset", (T((2, 24, 4, 8), "offset"),), ("small", "strided")),
    Case("transposed", (T((2, 24, 6, 8), "transposed"),), ("small", "strided")),
    Case("gapped", (T((2, 24, 4, 8), "gapped"),), ("small", "strided")),
    Case("channels-last", (T((2, 24, 4, 8), "channels_last"),), ("small", "strided"), alias=lambda x: x),
    Case("empty-batch", (T((0, 32, 4, 4)),), ("small", "empty")),
    Case("picture", (T((1, 3, 1024, 1024)),), ("real",)),
    Case("vae-128x1024", (T((1, 128, 1024, 1024)),), ("real",)),
    Case("vae-512x128", (T((1, 512, 128, 128)),), ("real",)),
    Case("latents", (T((1, 16, 128, 128)),), ("real",)),
)


@op(
    exactness="bitwise",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    fits=lambda _: True,
    allocate=channels_last,
)
def nchw_to_nhwc(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[N,C,H,W] at any strides -> the same in channels_last memory."""
    assert out is not None
    return _transpose.transpose(x, out)
