"""The same picture with the pixels of a channel side by side in memory, as torch lays it by default.

    y[n,c,h,w] = x[n,c,h,w];  y lies in memory as [N, C, H, W]

N pictures, C channels, H, W pixels; x at any strides, x and y fp16, bf16 or fp32. `out` may lie in any way, so a slice
of a wider buffer too. What a model in channels_last gives back to those who expect NCHW.
Bytes: 2 numel itemsize. FLOPs: none. Exactness: bitwise.
Source: torch's contiguous().
"""

from __future__ import annotations

import torch

from fusedit.ops import _check, _rows, _transpose
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor) -> Tensor:
    return wide(x).clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


def plain(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


def check(x: Tensor) -> tuple[torch.Size]:
    _check.activation("nhwc_to_nchw", "x", x, "NCHW")
    return (x.shape,)


def cost(x: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 0)


def builds() -> list[Build]:
    return _transpose.transposing_builds(_transpose.ALONG_CHANNELS, _transpose.ALONG_PIXELS)


def limit(x: Tensor) -> str:
    return _rows.too_many(x.shape[0], *x.shape[2:])


def _channels_of_more(x: Tensor) -> tuple[Tensor, ...]:
    """All but the first 8 and the last 8 channels of pixels."""
    return (x[:, 8:-8],)


CASES = (
    Case("small", (T((2, 64, 4, 6), "channels_last"),), alias=lambda x: x),
    Case("three-channels", (T((1, 3, 9, 16), "channels_last"),), ("small", "odd")),
    Case("sixteen-channels", (T((1, 16, 24, 40), "channels_last"),)),
    Case("many-pixels", (T((1, 8, 40, 40), "channels_last"),)),
    Case("more-than-a-block", (T((1, 136, 3, 40), "channels_last"),)),
    Case("odd", (T((3, 75, 7, 5), "channels_last"),), ("small", "odd")),
    Case("one-channel", (T((2, 1, 5, 8), "channels_last"),), ("small", "odd")),
    Case("one-pixel", (T((2, 24, 1, 1), "channels_last"),), ("small", "odd")),
    Case("one-column", (T((2, 24, 9, 1), "channels_last"),), ("small", "odd")),
    Case("of-more", (T((2, 40, 4, 8), "channels_last"),), ("small", "strided"), packed=_channels_of_more),
    Case("offset", (T((2, 24, 4, 8), "offset"),), ("small", "strided")),
    Case("transposed", (T((2, 24, 6, 8), "transposed"),), ("small", "strided")),
    Case("gapped", (T((2, 24, 4, 8), "gapped"),), ("small", "strided")),
    Case("inside", (T((2, 24, 4, 8), "inside"),), ("small", "strided")),
    Case("nchw", (T((2, 24, 4, 8)),), ("small", "strided"), alias=lambda x: x),
    Case("empty-batch", (T((0, 32, 4, 4)),), ("small", "empty")),
    Case("picture", (T((1, 3, 1024, 1024), "channels_last"),), ("real",)),
    Case("vae-128x1024", (T((1, 128, 1024, 1024), "channels_last"),), ("real",)),
    Case("vae-512x128", (T((1, 512, 128, 128), "channels_last"),), ("real",)),
    Case("latents", (T((1, 16, 128, 128), "channels_last"),), ("real",)),
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
)
def nhwc_to_nchw(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[N,C,H,W] at any strides, as channels_last -> the same in dense NCHW memory."""
    assert out is not None
    return _transpose.transpose(x, out)
