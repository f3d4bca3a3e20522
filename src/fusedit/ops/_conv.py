"""What the convolutions share: their arguments, the definition of right, the epilogue, and the shapes of a VAE.

    y[n,k,h,w] = act(bias[k] + sum_{c,r,s} x[n, c, h + r - R//2, w + s - R//2] weight[k,c,r,s]) + residual[n,k,h,w]

N pictures, C input and K output channels, H, W pixels, R x R taps (1 or 3); x counts as 0 outside of the picture.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _rows
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
ACTIVATIONS: Final = ("none", "silu", "relu")


def check_epilogue(op: str, x: Tensor, K: int, bias: Any, residual: Any, shape: tuple[int, ...], act: Any) -> None:
    """bias[K] of any dtype, residual like the result, and the name of an activation."""
    if bias is not None:
        _check.vector(op, "bias", bias, x, (K,), "K")
    if residual is not None:
        _check.activation(op, "residual", residual, "NKHW")
        _check.like(op, "residual", residual, x, shape)
    if act not in ACTIVATIONS:
        raise OpError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, not {_check.show(act)}")


def check(
    op: str, sizes: tuple[int, ...], x: Any, weight: Any, bias: Any, residual: Any, activation: Any
) -> tuple[int, ...]:
    """The shape of the result; the weight has R x R taps, R one of `sizes`."""
    _check.activation(op, "x", x, "NCHW")
    if not x.shape[1]:
        raise OpError(f"{op}: x must have at least one channel, not {_check.show(x)}")
    _check.activation(op, "weight", weight, "KCRR")
    K, _, R, _ = weight.shape
    if R not in sizes or weight.shape[3] != R:
        taps = " or ".join(f"{r} x {r}" for r in sizes)
        raise OpError(f"{op}: weight must have {taps} taps, not {_check.show(weight)}")
    if weight.shape[1] != x.shape[1] or weight.dtype is not x.dtype or weight.device != x.device:
        raise OpError(
            f"{op}: x and weight must have one dtype, device and number of channels, not x "
            f"{_check.show(x)} and weight {_check.show(weight)}"
        )
    shape = (x.shape[0], K, *x.shape[2:])
    check_epilogue(op, x, K, bias, residual, shape, activation)
    return shape


def channels_last(x: Tensor, shape: Any) -> Tensor:
    """An empty result, whose pixels hold their channels side by side."""
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def fits(t: Tensor) -> bool:
    """Channels side by side; any strides from pixel to pixel."""
    return t.shape[1] == 1 or t.stride(1) == 1


def dense(x: Tensor) -> Tensor:
    """The same values with channels side by side; a copy only where they are not."""
    return x if fits(x) else x.contiguous(memory_format=torch.channels_last)


def countable(x: Tensor) -> bool:
    """Whether kernels can count the pixels of all pictures in 32 bits, those of a last block that ends outside too."""
    return x.shape[0] * x.shape[2] * x.shape[3] < 2**31 - 2**20


def pixels(t: Tensor, vec: int) -> tuple[int, int, int]:
    """Steps of a picture from image to image, row to row and pixel to pixel, in units of vec."""
    return t.stride(0) // vec, t.stride(2) // vec, t.stride(3) // vec


def vector(C: int, *tensors: Tensor) -> int:
    """_rows.vector of pictures with C dense channels; 1 where one has others."""
    if any(t.stride(1) != 1 for t in tensors):
        return 1
    return _rows.vector(C, *(t.permute(0, 2, 3, 1) for t in tensors))


@kernel
def places(
    base_ptr: tl.tensor,
    n: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    c: tl.tensor,
    n_step: tl.tensor,
    h_step: tl.tensor,
    w_step: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Addresses of channels c of pixels (n, h, w), n in 64 bits; steps in units of VEC."""
    rows = base_ptr + (n * n_step + h.to(tl.int64) * h_step + w.to(tl.int64) * w_step) * VEC
    if VEC > 1:
        rows = tl.multiple_of(rows, 16)
    return rows[:, None] + c[None, :]


@kernel
def activate(u: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """ACT: 0 nothing, 1 SiLU, 2 ReLU."""
    if ACT == 1:
        return u / (1.0 + tl.exp(-u))
    if ACT == 2:
        return tl.where(u <= 0.0, 0.0, u)  # NaN stays NaN
    return u


class Layer(NamedTuple):
    """A convolution of FLUX's AutoencoderKL: channels, taps, and its picture's side as a share of the whole one's."""

    C: int
    K: int
    R: int
    scale: int


VAE: Final = (
    Layer(16, 512, 3, 8),
    Layer(512, 512, 3, 8),
    Layer(512, 512, 3, 4),
    Layer(512, 512, 3, 2),
    Layer(512, 256, 3, 2),
    Layer(512, 256, 1, 2),
    Layer(256, 256, 3, 2),
    Layer(256, 256, 3, 1),
    Layer(256, 128, 3, 1),
    Layer(256, 128, 1, 1),
    Layer(128, 128, 3, 1),
    Layer(128, 3, 3, 1),
    Layer(3, 128, 3, 1),
    Layer(128, 256, 3, 2),
    Layer(128, 256, 1, 2),
    Layer(256, 512, 3, 4),
    Layer(256, 512, 1, 4),
    Layer(512, 32, 3, 8),
)
"""Every shape of decoder and encoder with stride 1; those after a doubling (see upsample_conv2d) as they are stock."""
