"""The one place that imports triton: whether kernels can run, why not, and the decorator that every kernel wears."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["INTERPRETING", "capability", "kernel", "status", "tl", "triton", "unspecialised"]

_MINIMUM = (3, 6)
_reason = ""
try:
    import triton
    import triton.language as tl

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _MINIMUM:
        _reason = f"triton {triton.__version__} is older than {'.'.join(map(str, _MINIMUM))}"
except ImportError as error:
    triton = tl = None
    _reason = f"triton is not installed ({error})"
except Exception as error:  # a broken optional package must not break the import of fusedit
    triton = tl = None
    _reason = f"triton cannot be imported ({type(error).__name__}: {error})"


INTERPRETING = not _reason and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in triton's interpreter (TRITON_INTERPRET=1), where CPU tensors take the kernel's path."""


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` with the house rules; without triton, a stub that raises when it is launched.

    Parameters named `*_ptr` are never specialised on alignment and numbers never on their value, so that a new length,
    stride or slice compiles nothing. Alignment is a constexpr (`VEC`) that the launcher chooses: two variants at most.
    """
    if _reason:

        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"kernel {function.__name__} cannot run: {_reason}")

        return missing
    numbers, pointers = unspecialised(function)
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)


def unspecialised(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Names of the numbers and of the pointers among a kernel's parameters."""
    names = [p.name for p in inspect.signature(function).parameters.values() if "constexpr" not in str(p.annotation)]
    return [n for n in names if not n.endswith("_ptr")], [n for n in names if n.endswith("_ptr")]


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of one CUDA device."""
    return torch.cuda.get_device_capability(index)


def status(device: torch.device | None = None, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Whether kernels can run (on this device, for this dtype), and if not, why not in one clause."""
    if _reason:
        return False, _reason
    if device is None or INTERPRETING:
        return True, ""
    if device.type != "cuda":
        return False, f"no kernels for device type {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    usable, reason = _probe(index)
    if usable and dtype is torch.bfloat16 and capability(index) < (8, 0):
        return False, "bfloat16 kernels need compute capability 8.0"
    return usable, reason


@kernel
def _touch(x_ptr: tl.tensor, one: tl.tensor) -> None:
    tl.store(x_ptr, one)


@cache
def _probe(index: int) -> tuple[bool, str]:
    """Launches one trivial kernel, once a device: a missing C compiler or assembler shows here, not in the middle."""
    if torch.version.hip is not None:
        return False, "ROCm is not supported"
    if capability(index) < (7, 5):
        return False, f"compute capability {'.'.join(map(str, capability(index)))} is below 7.5"
    try:
        with torch.cuda.device(index):
            _touch[(1,)](torch.empty(1, device=f"cuda:{index}"), 1.0, num_warps=1, enable_fp_fusion=True)
    except Exception as error:
        return False, f"triton cannot launch a kernel ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    return True, ""
