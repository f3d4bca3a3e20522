"""An op's results: how they are made, and what is asked of the `out` that a caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check

Tensor = torch.Tensor
Dtypes = tuple[torch.dtype | None, ...]


def empty(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class Results:
    """How an op makes its results.

    Attributes:
        count: how many there are.
        dense: whether they lie dense in memory.
    """

    def __init__(
        self, count: int, allocate: Callable[..., Tensor], dtypes: Dtypes | Callable[..., Dtypes] | None
    ) -> None:
        """`allocate` and `dtypes` as `op` takes them."""
        self.count = count
        self.dense = allocate is empty
        self._allocate = allocate
        self._dtypes = dtypes

    def dtypes(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """Of a call's results; x is its first argument."""
        if self._dtypes is None:
            return (x.dtype,) * self.count
        declared = self._dtypes(*args, **kwargs) if callable(self._dtypes) else self._dtypes
        return tuple(x.dtype if dtype is None else dtype for dtype in declared)

    def one(self, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An empty result."""
        return self._allocate(x, shape) if dtype is x.dtype else torch.empty(shape, dtype=dtype, device=x.device)

    def all(
        self, x: Tensor, shapes: Sequence[Sequence[int]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Every result of a call, empty."""
        if self._dtypes is None:
            return [self._allocate(x, shape) for shape in shapes]
        return [self.one(x, *kept) for kept in zip(shapes, self.dtypes(x, args, kwargs), strict=True)]

    def pack(self, tensors: Sequence[Tensor]) -> Any:
        """As an op returns them: one by itself, several as a tuple."""
        return tensors[0] if self.count == 1 else tuple(tensors)

    def as_allocated(self, made: Any) -> Any:
        """Plain torch may keep the strides of a transposed input; an op's result is laid out as its fake says."""
        if not self.dense:
            return made
        return made.contiguous() if self.count == 1 else tuple(t.contiguous() for t in made)


def check(
    op: str,
    outs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    x: Tensor,
    inputs: Sequence[Tensor],
    named: Callable[[Tensor], str],
    *,
    in_order: bool,
    one_place: bool,
) -> None:
    """Each output has its shape and dtype, is where `x` is, and lies on an input exactly or not at all.

    Args:
        inputs: what is read.
        named: an input -> how a message calls it.
        in_order: the i-th output may lie on the i-th input only; else any output on any input.
        one_place: outputs may be one tensor, which then holds the last.
    """
    for place, (target, shape, dtype) in enumerate(zip(outs, shapes, dtypes, strict=True)):
        name = "out" if len(outs) == 1 else f"out[{place}]"
        _check.like(op, name, target, x, shape, dtype)
        if target.requires_grad and torch.is_grad_enabled():
            raise OpError(f"{op}: {name} requires a gradient; call it under torch.no_grad()")
        if target.is_neg():
            raise OpError(f"{op}: {name} is a negated view, which kernels cannot write; give another tensor")
        if not target.is_contiguous() and _check.self_overlap(target):
            raise OpError(f"{op}: {name} has several indices for one element (strides {target.stride()})")
        for index, source in enumerate(inputs):
            if target is source and not in_order:
                continue
            if _check.overlap(target, source) and not (
                _check.same_place(target, source) and (not in_order or index == place)
            ):
                own = inputs[place] if in_order else None
                raise OpError(f"{op}: {name} {_check.show(target)} {_why_not(target, source, own, named)}")
        for other in outs[:place]:
            if _check.overlap(target, other) and not (one_place and _check.same_place(target, other)):
                raise OpError(f"{op}: {name} overlaps another output")


def _why_not(target: Tensor, source: Tensor, own: Tensor | None, named: Callable[[Tensor], str]) -> str:
    """Why an output may not lie on this input; `own`: the one that it may lie on, none if empty; None: any."""
    if own is None:
        return (
            f"partly overlaps an input {_check.show(source)}; it may lie exactly on an input of its shape, or apart "
            "from all"
        )
    exact = _check.same_place(target, source)
    how = "lies on" if exact else "partly overlaps"
    why = ", which is still read while that is written" if exact else ""
    if own.numel() == 0 or (_check.overlap(own, source) and (exact or own is not source)):
        may = "on no input of this call"
    elif own is source:
        may = "on it exactly, or apart from all inputs"
    else:
        name = named(own)
        may = f"exactly on {'the one that it is made of' if name == 'an input' else name}, or apart from all inputs"
    return f"{how} {named(source)} {_check.show(source)}{why}; it may lie {may}"
