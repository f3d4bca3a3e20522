"""Low-rank terms: what LoRA adds to a product, as the ops on products take it.

    low[..., n] = sum_r t[..., p R + r] up[n, r],   p = min(n // part, P - 1)

t [..., P R], up [N, R] of one floating dtype; P layers that are packed in one weight have `part` columns each, the
last the rest (part 0: all columns are one part). Where layers are not that wide, or a tile holds columns of two (a
gate reads both), P is 1 and `up` block-diagonal.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import T
from fusedit.ops._fp8 import E4M3
from fusedit.ops._op import Cost
from fusedit.ops._values import wide

Tensor = torch.Tensor


def check(
    op: str, x: Tensor, N: int, t: Tensor | None, up: Tensor | None, part: int, dtype: torch.dtype | None = None
) -> None:
    """t, up and part are a term for x[..., K] and N columns, or there is none.

    Args:
        dtype: that both must have; None: any that is alike.
    """
    if t is None and up is None:
        return
    if t is None or up is None:
        missing = "t" if t is None else "up"
        raise OpError(f"{op}: {missing} is None; a low-rank term needs both t and up")
    _check.activation(op, "up", up, "NR")
    R = up.shape[1]
    kept = up.dtype if dtype is None else dtype
    _check.like(op, "up", up, x, (N, R), kept)
    wide_t = getattr(t, "shape", (0,))[-1]
    if R == 0 or wide_t == 0 or wide_t % R:
        raise OpError(f"{op}: t must have the {R} ranks of up once a part, not {_check.show(t)}")
    _check.like(op, "t", t, x, (*x.shape[:-1], wide_t), kept)
    if type(part) is not int or part < 0 or (wide_t > R and not 0 < part * (wide_t // R - 1) < N):
        shown = _check.show(part).removeprefix("int ")
        raise OpError(f"{op}: part must be how many of {N} columns each of {wide_t // R} parts has, not {shown}")


def operands(op: str, x: Tensor, down: Tensor, scale: Tensor) -> tuple[int, ...]:
    """`down` and `scale` are those of the first half for x[..., K], of its dtype; the shape of t."""
    if x.ndim not in (2, 3):
        raise OpError(f"{op}: x must be [S, K] or [B, S, K], not {_check.show(x)}; flatten its first dimensions")
    (_check.fp8 if x.dtype is E4M3 else _check.activation)(op, "down", down, "PK")
    P = down.shape[0]
    _check.like(op, "down", down, x, (P, x.shape[-1]))
    _check.like(op, "scale", scale, x, (P,), torch.float32)
    return (*x.shape[:-1], P)


def sums(x: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """The first half in fp32, in fp64 where one of these is fp64."""
    x, down, scale = wide(x, down, scale)
    return (x @ down.T) * scale


def cost(x: Tensor, down: Tensor, scale: Tensor, dtype: torch.dtype) -> Cost:
    """Of the first half, whose t is of this dtype."""
    count, P = x.numel() // max(1, x.shape[-1]), down.shape[0]
    return Cost(x.nbytes + down.nbytes + scale.nbytes + count * P * dtype.itemsize, 2 * count * down.numel())


def low_rank(t: Tensor, up: Tensor, part: int) -> Tensor:
    """low [..., N], in the dtype of both."""
    parts = torch.split(t, up.shape[1], dim=-1)
    return torch.cat([a @ up[b].T for a, b in zip(parts, columns(up.shape[0], len(parts), part), strict=True)], dim=-1)


def columns(N: int, parts: int, part: int) -> list[slice]:
    """The columns of each part."""
    last = parts - 1
    return [slice(p * part, N if p == last else (p + 1) * part) for p in range(parts)]


def side(t: Tensor, up: Tensor, part: int, first: int, last: int) -> tuple[Tensor | None, Tensor | None, int]:
    """t, up and part of columns first to last alone, where a part begins at `first` and one ends at `last`; else t and
    up in one part, with zeros in up."""
    if first == last:
        return None, None, 0
    N, R = up.shape
    ends = [0, *(c.stop for c in columns(N, t.shape[-1] // R, part))]
    if first in ends and last in ends:
        begin, end = ends.index(first), ends.index(last)
        return t[..., begin * R : end * R], up[first:last], part
    whole = up.new_zeros(N, t.shape[-1])
    for p, c in enumerate(columns(N, t.shape[-1] // R, part)):
        whole[c, p * R : (p + 1) * R] = up[c]
    return t, whole[first:last], 0


def flops(x: Tensor, up: Tensor | None) -> int:
    """Of the term of a product of x[..., K]."""
    return 0 if up is None else 2 * x.numel() // max(1, x.shape[-1]) * up.numel()


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def rank(shape: tuple[int, ...], N: int, R: int, parts: int = 1, std: float = 1.0, **kept: Any) -> tuple[T, T]:
    """t and up of a case, of a term as large as `std`, for x of this shape."""
    return T((*shape[:-1], parts * R), **kept), T((N, R), std=std * R**-0.5, **kept)
