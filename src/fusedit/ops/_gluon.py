"""The one place that imports Gluon, triton's lower language: its names in triton 3.6 to 3.9, or why it is not here.

Gluon is experimental and changes from version to version; kernels in it are optional, and callers have another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusedit.ops import _triton

__all__ = ["copy_in", "copy_out", "descriptor_class", "gl", "hopper", "kernel", "reason", "sync", "view"]

reason = _triton.status()[1]
"""Why no kernel in Gluon can be built, or nothing."""
gl: Any = None
hopper: Any = None
copy_in: Any = None
copy_out: Any = None
view: Any = None
sync: Any = None
descriptor_class: Any = None
if not reason and _triton.INTERPRETING:
    reason = "triton's interpreter does not know Gluon"
if not reason:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language import _core
        from triton.experimental.gluon.language.nvidia import hopper as _hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        gl, hopper, descriptor_class = language, _hopper, TensorDescriptor
        # Names on the left are those of 3.9, on the right those of 3.6.
        copy_in = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
        copy_out = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
        _memory = getattr(gl, "shared_memory_descriptor", None) or _core.shared_memory_descriptor
        view = getattr(_memory, "reinterpret", None) or _memory._reinterpret
        sync = getattr(gl, "barrier", None) or gl.thread_barrier
    except Exception as error:  # other names again
        reason = f"triton {_triton.triton.__version__} has another Gluon ({type(error).__name__}: {error})"


def kernel(function: Callable[..., Any]) -> Any:
    """`gluon.jit` with the rules of _triton.kernel; where there is no Gluon, the function as it is, never launched."""
    if reason:
        return function
    numbers, pointers = _triton.unspecialised(function)
    return gluon.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)
