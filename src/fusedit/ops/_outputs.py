"""What every op asks of the `out` that a caller gives: shape, dtype and device, and what else lies where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedit.errors import OpError
from fusedit.ops import _check

Tensor = torch.Tensor


def check(
    op: str,
    outs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    x: Tensor,
    inputs: Sequence[Tensor],
    *,
    in_order: bool,
) -> None:
    """Each output is like `x`, in its shape, and lies on an input exactly or not at all.

    Args:
        inputs: what is read.
        in_order: the i-th output may lie on the i-th input only; else any output on any input.
    """
    for place, (target, shape) in enumerate(zip(outs, shapes, strict=True)):
        name = "out" if len(outs) == 1 else f"out[{place}]"
        _check.like(op, name, target, x, shape)
        if target.requires_grad and torch.is_grad_enabled():
            raise OpError(f"{op}: {name} requires a gradient; call it under torch.no_grad()")
        if not target.is_contiguous() and _check.self_overlap(target):
            raise OpError(f"{op}: {name} has several indices for one element (strides {target.stride()})")
        for index, source in enumerate(inputs):
            if target is source and not in_order:
                continue
            if _check.overlap(target, source) and not (
                _check.same_place(target, source) and (not in_order or index == place)
            ):
                raise OpError(
                    f"{op}: {name} {_check.show(target)} partly overlaps an input {_check.show(source)}; "
                    "it may lie exactly on an input of its shape, or apart from all"
                )
        for other in outs[:place]:
            if _check.overlap(target, other):
                raise OpError(f"{op}: {name} overlaps another output")
