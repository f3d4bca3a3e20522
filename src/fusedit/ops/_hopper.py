"""What the products written for Hopper share: persistent programs, TMA tiles, wgmma, and an epilogue in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fusedit.ops import _gluon, _rows, _triton
from fusedit.ops._op import Backend
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
BM: Final = 128
"""Rows of a tile."""
BN: Final = 256
"""Columns of a product's tile; its epilogue takes them in two halves."""
BK: Final = 64
STAGES: Final = 4
"""Four stages of 48 KiB and a half of the result fill shared memory."""
FULL: Final = 0.9
"""Share of the multiprocessors that must be busy, on average over all waves of tiles; else the library serves.
On an H200, both ops, 20 lengths from 1248 to 4608 rows: from 90.9 % on they take 0.95 to 1.00 of the library's time, at
86.6 % (Z-Image at 512x512) 1.055. At 95.5 % (FLUX at 512x512) a step takes as long either way, and 3 % less energy."""


def choose(x: Tensor, weight: Tensor, columns: int) -> Backend:
    """`triton` where a kernel with weight[N, K] as it lies serves x[..., K], with tiles over so many of the N columns;
    `separate` or, on other devices, `plain` and the reason where none does."""
    if x.device.type != "cuda":
        return Backend("plain", f"no kernels for device type {x.device.type}")
    usable, reason = _triton.status(x.device, x.dtype)
    if usable:
        reason = shape_reason(x, weight)
    if usable and not reason:
        count, needed = _rows.multiprocessors(x.device.index or 0), tiles(x, columns)
        share = needed / (_rows.cdiv(needed, count) * count)
        if share < FULL:
            reason = f"{needed} tiles keep only {share:.0%} of {count} multiprocessors busy"
    return Backend("separate", reason) if reason else Backend("triton", "")


def shape_reason(x: Tensor, weight: Tensor) -> str:
    """Why the kernels cannot take these at any length, or nothing."""
    if x.is_cuda and _triton.capability(x.device.index or 0) != (9, 0):
        return f"written for compute capability 9.0, not {_triton.capability(x.device.index or 0)}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes half precision, not {str(x.dtype).removeprefix('torch.')}"
    if not x.shape[-1]:
        return "has nothing to multiply"
    if x.ndim not in (2, 3):
        return f"takes two or three dimensions, not {x.ndim}"
    if weight.shape[0] % 8 or x.shape[-1] % 8 or not weight.is_contiguous() or _rows.vector(8, x, weight) == 1:
        return "needs rows on 16 bytes"
    return "" if x.stride(-1) == 1 else "rows of x are not dense"


def tiles(x: Tensor, columns: int) -> int:
    """Tiles of a product of x [R, K] or [B, S, K] with so many columns (no tile reaches over two items)."""
    batch, length = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
    return batch * _rows.cdiv(length, BM) * _rows.cdiv(columns, BN)


def programs(x: Tensor, columns: int) -> int:
    """One a multiprocessor; a few in the interpreter."""
    return min(_rows.multiprocessors(x.device.index or 0) if x.is_cuda else 4, tiles(x, columns))


def descriptor(t: Tensor, block: list[int], layout: Any = None) -> Any:
    """Tiles of a tensor with dense rows on 16 bytes, by TMA; with a layout of shared memory, for a kernel in Gluon."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A dimension of one element may have any stride in torch, but TMA asks for multiples of 16 bytes.
    strides = [s if n > 1 else 8 * t.shape[-1] for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    if layout is not None:
        return _gluon.descriptor_class(t, list(t.shape), [*strides, 1], block, layout)
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block)


@kernel
def place(tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Row and column of a tile in a grid of tiles; GROUP row tiles share weights in L2 before the next columns."""
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % (GROUP * columns) % height, tile % (GROUP * columns) // height


def into_dense(launch: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> Tensor:
    """launch(x [B,S,K], y [B,S,N]) for x and y of two or three dimensions; y by way of a dense tensor where TMA cannot
    write to it."""
    direct = y.stride(-1) == 1 and _rows.vector(8, y) > 1
    target = y if direct else torch.empty_like(y, memory_format=torch.contiguous_format)
    if x.ndim == 3:
        launch(x, target)
    else:
        launch(x[None], target[None])
    return y if target is y else y.copy_(target)


_known: set[tuple[str, int | None, torch.dtype]] = set()


def first_time(op: str, x: Tensor, weight: Tensor) -> bool:
    """Whether an op should compile both its ways now, so that no later length does: at the first call
    of a dtype whose kernel could serve another length."""
    key = (op, x.device.index, x.dtype)
    if key in _known or shape_reason(x, weight) or torch.cuda.is_current_stream_capturing():
        return False
    _known.add(key)
    return True
