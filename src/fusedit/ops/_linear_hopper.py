"""Products of bf16 with a low-rank term, by the kernel of _scaled_hopper.py: the term is more steps of the product.

On other chips, and where tiles leave too many multiprocessors idle, the library's product serves and add_low_rank
behind it. Sums pass through bf16 before bias and activation, whose tanh is the hardware's, good to 2^-11.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _gluon, _rows, _scaled_hopper, _triton
from fusedit.ops._build import Build
from fusedit.ops._op import Backend
from fusedit.ops._scaled_hopper_kernel import COLUMNS, STEP
from fusedit.ops.add_low_rank import make_ready as make_ready_behind

Tensor = torch.Tensor


def choose(act: str, x: Tensor, weight: Tensor, t: Tensor | None, up: Tensor | None, part: int, start: int) -> Backend:
    """`hopper`, or `separate` or, on other devices, `plain` with the reason."""
    if x.device.type != "cuda":
        return Backend("plain", f"no kernels for device type {x.device.type}")
    reason = shape_reason(x, weight) or _scaled_hopper.low_reason(t, up, part, pair=act == "swiglu")
    if not reason and start % COLUMNS:
        reason = f"start {start} is no multiple of {COLUMNS}"
    reason = reason or _scaled_hopper.idle(x, weight.shape[0], None if act == "none" else t)
    return Backend("separate", reason) if reason else Backend("hopper", "")


def shape_reason(x: Tensor, weight: Tensor) -> str:
    """Why the kernel cannot take these at any length, or nothing."""
    if _gluon.reason:
        return _gluon.reason
    if not x.is_cuda or _triton.capability(x.device.index or 0) != (9, 0):
        return "written for compute capability 9.0"
    if x.dtype is not torch.bfloat16:
        return f"takes bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if not x.shape[-1]:
        return "has nothing to multiply"
    if x.ndim not in (2, 3):
        return f"takes two or three dimensions, not {x.ndim}"
    if x.stride(-1) != 1 or not weight.is_contiguous():
        return "rows are not dense"
    N, K = weight.shape
    return "needs rows on 16 bytes" if N % 16 or K % 8 or _rows.vector(8, x, weight) == 1 else ""


def into(
    act: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, start: int, t: Tensor, up: Tensor, part: int
) -> None:
    """x [..., K] through weight [N, K] with the term t, up, part into y of any strides: [..., N], or [..., N / 2] for
    `swiglu`; `gelu` from column `start` on."""
    to, gated = (None, y) if act == "swiglu" else (y, None)
    _scaled_hopper.into(act, x, None, weight, None, bias, to, gated, None, start, t, up, part)


_known: set[tuple[Any, ...]] = set()


def make_ready(act: str, x: Tensor, bias: Tensor | None) -> None:
    """Compile both ways at the first call of a kind that the kernel could serve: no later length or rank does."""
    key = act, x.device.index, x.dtype, None if bias is None else bias.dtype
    if key in _known or torch.cuda.is_current_stream_capturing():
        return
    _known.add(key)
    small, weight = x.new_zeros(1, 8, STEP), x.new_zeros(COLUMNS, STEP)
    if shape_reason(small, weight):
        return
    t, up, own = x.new_zeros(1, 8, 8), x.new_zeros(COLUMNS, 8), None if bias is None else bias.new_zeros(COLUMNS)
    y = x.new_zeros(1, 8, COLUMNS // 2 if act == "swiglu" else COLUMNS)
    into(act, small, weight, own, y, 0, t, up, 0)
    make_ready_behind(x, x.dtype)


def builds(act: str) -> list[Build]:
    return _scaled_hopper.builds(act, codes=False)
