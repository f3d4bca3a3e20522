"""What the GroupNorm ops share besides their kernels: arguments, the layout of a result, and plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _rows

Tensor = torch.Tensor


def check(
    op: str, x: Any, weight: Any, bias: Any, groups: object, eps: object, silu: object, pre_bias: Any
) -> torch.Size:
    _check.activation(op, "x", x, "NCHW")
    C = x.shape[1]
    check_norm(op, x, C, weight, bias, groups, eps, silu)
    if pre_bias is not None:
        _check.vector(op, "pre_bias", pre_bias, x, (C,), "C")
    return x.shape  # type: ignore[no-any-return]


def check_norm(
    op: str, x: Tensor, C: int, weight: Any, bias: Any, groups: object, eps: object, silu: object, prefix: str = ""
) -> None:
    """What makes a norm of C channels beside x; weight and bias have this prefix to their names."""
    _check.vector(op, f"{prefix}weight", weight, x, (C,), "C")
    _check.vector(op, f"{prefix}bias", bias, x, (C,), "C")
    if type(groups) is not int:
        _check.kind(op, "groups", groups, "int")
    if groups < 1 or C % groups:  # type: ignore[operator]
        shown = _check.show(groups).removeprefix("int ")
        raise OpError(f"{op}: groups must divide the {C} channels, not {shown}")
    _check.eps(op, eps)
    if type(silu) is not bool:
        _check.kind(op, "silu", silu, "bool")


def memory_format(x: Tensor) -> torch.memory_format:
    """Layout of a result: channels_last; on a CPU the layout of x."""
    if x.device.type == "cpu" and not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def allocate(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    return _rows.too_many(x.shape[0], *x.shape[2:])


def plain(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, out: Tensor | None) -> Tensor:
    """The norm of x in plain torch."""
    if x.is_cpu and x.dtype is torch.float32 and memory_format(x) is torch.channels_last:
        n = _normalised(x, weight, bias, groups, eps)
    else:
        n = F.group_norm(x, groups, weight, bias, eps)
    if out is not None:
        return torch.ops.aten.silu.out(n, out=out) if silu else out.copy_(n)
    if silu:
        n = F.silu(n, inplace=True)
    return n.contiguous(memory_format=memory_format(x))


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """GroupNorm of a channels_last x on a CPU, as near to fp64 as torch's on NCHW.

    torch's own for this layout sums x and x^2 in one fp32 chain: 1e-5 off at 256x256 where this is 8e-8.
    """
    N, C = x.shape[:2]
    mean = x.mean((2, 3)).view(N, groups, C // groups).mean(-1)
    d = x - mean.repeat_interleave(C // groups, 1)[:, :, None, None]
    variance = d.square().mean((2, 3)).view(N, groups, C // groups).mean(-1)
    scale = torch.rsqrt(variance + eps).repeat_interleave(C // groups, 1) * weight
    return torch.addcmul(bias[:, None, None], d, scale[:, :, None, None], out=d)
