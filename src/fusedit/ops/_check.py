"""What every op asks of its arguments: one sentence naming the argument, with its shape, dtype and device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from fusedit.errors import OpError

Tensor = torch.Tensor
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
STRIDED = torch.strided
_COUNTS = {1: "one dimension", 2: "two dimensions"}


def show(t: object) -> str:
    """`bfloat16[1, 4608, 3072] on cuda:0`; of what is no tensor its type, and its value where that is short."""
    if not isinstance(t, Tensor):
        kind = type(t).__name__
        if isinstance(t, list | tuple):
            return f"a {kind} of {len(t)}"
        shape = getattr(t, "shape", None)
        if isinstance(shape, tuple) and shape:  # an array
            return f"{kind} {getattr(t, 'dtype', '')}{list(shape)}"
        try:
            value = repr(t)
        except Exception:  # a whole number of thousands of digits, or whatever a foreign class does
            return kind
        return kind if "\n" in value or len(value) > 60 else f"{kind} {value}"
    dtype = str(t.dtype).removeprefix("torch.")
    if t.is_nested:  # has no shape
        return f"nested {dtype} on {t.device}"
    layout = "" if t.layout is STRIDED else f"{str(t.layout).removeprefix('torch.').removeprefix('_')} "
    return f"{layout}{dtype}{list(t.shape)} on {t.device}"


def dense(op: str, name: str, t: Any) -> None:
    """`t` is a tensor whose elements lie at strides in memory, as they are: not sparse, nested or quantised."""
    if not isinstance(t, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, not {show(t)}")
    if t.is_nested:
        raise OpError(f"{op}: {name} must be a dense tensor, not {show(t)}; pad it with to_padded_tensor()")
    if t.layout is not STRIDED:
        raise OpError(f"{op}: {name} must be a dense tensor, not {show(t)}; convert it with to_dense()")
    if t.is_quantized:
        raise OpError(f"{op}: {name} must be floating point, not {show(t)}; convert it with dequantize()")


def tensors(op: str, name: str, values: Any) -> None:
    """`values` is a list, whose items are left to other checks."""
    if not isinstance(values, list | tuple):
        wrap = f"; for one, give [{name}]" if isinstance(values, Tensor) else ""
        raise OpError(f"{op}: {name} must be a list of tensors, not {show(values)}{wrap}")


def activation(op: str, name: str, x: Any, letters: str) -> None:
    """`x` is a floating point tensor with one dimension a letter; with dots alone, as many as dots at least."""
    if not isinstance(x, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, not {show(x)}")
    if x.dtype not in FLOATS or x.layout is not STRIDED:
        dense(op, name, x)
        raise OpError(f"{op}: {name} must be float16, bfloat16 or float32, not {show(x)}")
    if x.ndim != len(letters):
        _dimensions(op, name, x, letters)


def fp8(op: str, name: str, t: Any, letters: str) -> None:
    """`t` is an e4m3 tensor with one dimension a letter; with dots alone, as many as dots at least."""
    if not isinstance(t, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, not {show(t)}")
    if t.dtype is not torch.float8_e4m3fn or t.layout is not STRIDED:
        dense(op, name, t)
        raise OpError(f"{op}: {name} must be float8_e4m3fn, not {show(t)}; make it with quantize_rows")
    if t.ndim != len(letters):
        _dimensions(op, name, t, letters)


def filled(op: str, name: str, x: Tensor) -> None:
    """Rows of `x` have an element, so that each has a largest one."""
    if x.shape[-1] == 0:
        raise OpError(f"{op}: {name} must have at least one element a row, not {show(x)}")


def _dimensions(op: str, name: str, x: Tensor, letters: str) -> None:
    dense(op, name, x)
    if letters.strip("."):
        raise OpError(f"{op}: {name} must be [{', '.join(letters)}], not {show(x)}")
    if x.ndim < len(letters):
        least = _COUNTS.get(len(letters), f"{len(letters)} dimensions")
        raise OpError(f"{op}: {name} must have at least {least}, not {show(x)}")


def like(
    op: str, name: str, t: Any, x: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> None:
    """`t` has the dtype and device of `x`, and its shape, unless another shape or dtype is given."""
    want = x.shape if shape is None else shape
    kept = x.dtype if dtype is None else dtype
    if not isinstance(t, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, not {show(t)}")
    if t.layout is not STRIDED:
        dense(op, name, t)
    if t.dtype is not kept or t.device != x.device or t.shape != want:
        word = str(kept).removeprefix("torch.")
        raise OpError(f"{op}: {name} must be {word}{list(want)} on {x.device}, not {show(t)}")


def vector(op: str, name: str, t: Any, x: Tensor, shape: tuple[int, ...], letters: Sequence[str]) -> None:
    """`t` is a floating point tensor of this shape on the device of `x`; its dtype may differ (fp32 weights)."""
    if not isinstance(t, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, not {show(t)}")
    if t.layout is not STRIDED:
        dense(op, name, t)
    if t.dtype not in FLOATS or t.device != x.device or t.shape != shape:
        raise OpError(
            f"{op}: {name} must be [{', '.join(letters)}] = {list(shape)}, floating point on {x.device}, not {show(t)}"
        )


KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "float": (float | int | torch.SymFloat | torch.SymInt, "a number"),
    "int": (numbers.Integral | torch.SymInt, "a whole number"),
    "bool": (bool | torch.SymBool, "True or False"),
    "str": (str, "a name"),
}
"""Types in the language of torch.library: what is taken, and how it is called."""


def kind(op: str, name: str, value: Any, wanted: str) -> None:
    """`value` is a float, int, bool or name (a key of KINDS); a bool is no number."""
    known, words = KINDS[wanted]
    if not isinstance(value, known) or (isinstance(value, bool) and wanted != "bool"):
        real = wanted == "float" and isinstance(value, numbers.Real) and not isinstance(value, bool)
        convert = "; convert it with float()" if real else ""
        raise OpError(f"{op}: {name} must be {words}, not {show(value)}{convert}")


def number(op: str, name: str, value: Any, words: str, least: float = -math.inf) -> None:
    """`value` is a finite number, at least `least`: what `words` say."""
    kind(op, name, value, "float")
    if isinstance(value, torch.SymFloat | torch.SymInt):  # not known before the call
        return
    if isinstance(value, int) and abs(value) >= 2**63:
        raise OpError(f"{op}: {name} must be below 2**63 where it is a whole number, not {show(value)}")
    if not math.isfinite(value) or value < least:
        raise OpError(f"{op}: {name} must be {words}, not {show(value)}")


def eps(op: str, value: Any) -> None:
    """`value` is what is added to a variance."""
    if type(value) is not float or not 0.0 <= value < math.inf:  # almost always a float: any other costs more
        number(op, "eps", value, "finite and 0 or more", 0.0)


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the very same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors share any element of memory; exact, but for hopelessly tangled strides: True."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return _overlap_bytes(a, b)
    return _overlap(b.storage_offset() - a.storage_offset(), a.shape, a.stride(), b.shape, b.stride())


def self_overlap(t: Tensor) -> bool:
    """Whether two indices of one tensor may name the same element (expanded tensors)."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _overlap_bytes(a: Tensor, b: Tensor) -> bool:
    def extent(t: Tensor) -> tuple[int, int]:
        start = t.data_ptr()
        reach = sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))
        return start, start + (reach + 1) * t.element_size()

    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 < b1 and b0 < a1


@lru_cache(maxsize=4096)
def _overlap(
    delta: int, shape_a: tuple[int, ...], stride_a: tuple[int, ...], shape_b: tuple[int, ...], stride_b: tuple[int, ...]
) -> bool:
    """Is `sum i*stride_a = delta + sum j*stride_b` solvable? Bounded search, largest stride first."""
    ranges: dict[int, list[int]] = {}
    for sizes, strides, sign in ((shape_a, stride_a, 1), (shape_b, stride_b, -1)):
        for size, stride in zip(sizes, strides, strict=True):
            if size > 1 and stride:
                low_high = ranges.setdefault(stride, [0, 0])
                low_high[0 if sign < 0 else 1] += sign * (size - 1)
    terms = sorted(ranges.items(), reverse=True)
    reach = [(0, 0)]
    for stride, (low, high) in reversed(terms):
        reach.append((reach[-1][0] + stride * low, reach[-1][1] + stride * high))
    reach.reverse()
    budget = 20_000
    stack = [(0, delta)]
    while stack:
        depth, rest = stack.pop()
        low_sum, high_sum = reach[depth]
        if not low_sum <= rest <= high_sum:
            continue
        if depth == len(terms):
            return True
        budget -= 1
        if budget == 0:
            return True
        stride, (low, high) = terms[depth]
        next_low, next_high = reach[depth + 1]
        first = max(low, -((next_high - rest) // stride))
        last = min(high, (rest - next_low) // stride)
        stack.extend((depth + 1, rest - stride * k) for k in range(first, last + 1))
        if len(stack) > budget:
            return True
    return False
