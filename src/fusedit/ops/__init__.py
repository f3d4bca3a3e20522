"""The arithmetic of the models, one file an op. An op knows tensors, never models.

    from fusedit import ops
    y = ops.layer_norm_modulate(x, scale, shift, eps=1e-6)
    ops.gated_residual(x, y, gate, out=x)
    ops.registry()                     # every op by name
    ops.layer_norm_modulate.plain(...) # the same in plain torch
    ops.attention.backend(q, k, v)     # which implementation serves this call, and why no faster one does
    ops.triton_status()                # (False, "triton is not installed ...")

Ops load on first use; importing this package imports neither triton nor a kernel.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = ["registry", "triton_status"]


def registry() -> Any:
    """Every op by name: a mapping of name to Op. Loads them all; a broken file raises."""
    return importlib.import_module("fusedit.ops._registry").registry()


def triton_status(device: Any = None, dtype: Any = None) -> tuple[bool, str]:
    """Whether Triton kernels can run here (on a torch.device, for a torch.dtype), and if not, why not."""
    status: tuple[bool, str] = importlib.import_module("fusedit.ops._triton").status(device, dtype)
    return status


class _Ops(ModuleType):
    """The package's module: `ops.name` is the op, also after the file of that name was imported as a module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and not name.startswith("_"):
            value = getattr(value, name, value)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'fusedit.ops' has no attribute {name!r}")
    try:
        op = importlib.import_module("fusedit.ops._registry").load(name)
    except ModuleNotFoundError as error:
        if error.name != f"fusedit.ops.{name}":
            raise
        raise AttributeError(f"fusedit.ops has no op {name!r}") from None
    globals()[name] = op
    return op


sys.modules[__name__].__class__ = _Ops
