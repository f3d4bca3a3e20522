"""What arguments are like, whatever the op: signs kept in a flag, and the dtype to compute in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

Tensor = torch.Tensor
_LISTS: Final = (list, tuple)


def negated(values: Iterable[Any]) -> bool:
    """Whether one of these, or of a list among them, has its sign in a flag of a view, which kernels do not read."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_neg():
                return True
        elif isinstance(value, _LISTS) and negated(value):
            return True
    return False


def resolved(value: Any) -> Any:
    """With every sign written out."""
    if isinstance(value, _LISTS):
        return type(value)(map(resolved, value))
    return value.resolve_neg() if isinstance(value, Tensor) else value


def widest(values: Sequence[Any]) -> torch.dtype:
    """fp64 where a tensor among these is fp64, else fp32."""
    found = any(isinstance(t, Tensor) and t.dtype is torch.float64 for t in values)
    return torch.float64 if found else torch.float32


def wide(*tensors: Any) -> Any:
    """These in fp32, and all in fp64 where one of them is: what references compute in."""
    dtype = widest(tensors)
    made = [None if t is None else t.to(dtype) for t in tensors]
    return made[0] if len(made) == 1 else made
