"""GroupNorm, then SiLU, on channels_last memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: bool = True) -> Tensor:
    x, weight, bias = wide(x, weight, bias)
    N, C, H, W = x.shape
    g = x.reshape(N, groups, -1)
    g = g - g.mean(-1, keepdim=True)
    n = (g * torch.rsqrt(g.square().mean(-1, keepdim=True) + eps)).view(N, C, H, W)
    n = n * weight[:, None, None] + bias[:, None, None]
    return n / (1 + torch.exp(-n)) if silu else n


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    n = F.group_norm(x, groups, weight, bias, eps)
    if silu:
        n = torch.ops.aten.silu.out(n, out=n) if out is None else torch.ops.aten.silu.out(n, out=out)
    elif out is not None:
        n = out.copy_(n)
    if out is None and x.device.type != "cpu":
        n = n.contiguous(memory_format=torch.channels_last)
    return n


def check(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: bool = True
) -> tuple[torch.Size]:
    _check.activation("group_norm_silu", "x", x, "NCHW")
    C = x.shape[1]
    _check.vector("group_norm_silu", "weight", weight, x, (C,), "C")
    _check.vector("group_norm_silu", "bias", bias, x, (C,), "C")
    if groups < 1 or C % groups:
        raise OpError(f"group_norm_silu: groups must divide the channels of x {_check.show(x)}, not {groups}")
    return (x.shape,)


def allocate(x: Tensor, shape: Sequence[int]) -> Tensor:
    """channels_last; on a CPU the layout of x, as plain torch gives it."""
    last = x.device.type != "cpu" or x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last and not (x.device.type == "cpu" and x.is_contiguous()) else None
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout or torch.contiguous_format)


def cost(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: bool = True) -> Cost:
    return Cost(3 * x.nbytes + weight.nbytes + bias.nbytes, x.numel() * (12 if silu else 8))


CASES = (Case("small", (T((2, 64, 4, 6), "channels_last"), T((64,)), T((64,)), 32)),)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    allocate=allocate,
)
def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(GroupNorm(x[N,C,H,W])) -> [N,C,H,W] in channels_last (on a CPU: in the layout of x)."""
    return plain(x, weight, bias, groups, eps, silu, out=out)
