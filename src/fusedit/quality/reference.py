"""A twin of a pipeline to measure with, and its fp32 form: the caller's pipeline is never touched."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from fusedit.drawing import out_of_memory_as_error
from fusedit.errors import ArgumentError
from fusedit.finite import modules_of

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def twin(pipe: Any) -> Any:
    """A second pipeline object over the same components, with a scheduler of its own.

    accelerate() works on pipeline objects, so the twin can be accelerated, paused and restored while the caller's
    pipeline, accelerated or not, keeps its handle, its counters and its scheduler's state.
    """
    other = copy.copy(pipe)
    if getattr(pipe, "scheduler", None) is not None:
        vars(other)["scheduler"] = copy.deepcopy(pipe.scheduler)
    if hasattr(pipe, "image_processor"):
        vars(other)["image_processor"] = copy.copy(pipe.image_processor)
    return other


def fp32_twin(pipe: Any) -> Any:
    """Stock in fp32: a twin whose components are fp32 copies. Needs their memory once more, at four bytes a weight.

    Raises:
        ArgumentError: the weights are offloaded or quantised, so that no fp32 copy can be made.
        DeviceMemoryError: there is no room for the copies.
    """
    other = twin(pipe)
    for name, module in modules_of(pipe):
        if any(_hooked(part) for part in module.modules()):
            raise ArgumentError(
                f"the fp32 reference needs a copy of {name}, which is offloaded; compare before enabling offload"
            )
        if any(getattr(module, name, None) is not None for name in ("hf_quantizer", "quantization_method")):
            raise ArgumentError(f"the fp32 reference needs the unquantised weights of {name}; load those")
        vars(other)[name] = out_of_memory_as_error(partial(_in_fp32, module), f"copying {name} to fp32", other)
    return other


def _hooked(module: torch.nn.Module) -> bool:
    """Whether accelerate or diffusers moves this module's weights; an empty hook registry is only left over."""
    return hasattr(module, "_hf_hook") or bool(getattr(getattr(module, "_diffusers_hook", None), "hooks", None))


def _in_fp32(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module).float()


def compute_dtype(pipe: Any) -> str:
    """`fp32`, `bf16` or `fp16`: the dtype of the part that denoises."""
    module = getattr(pipe, "transformer", None) or next(module for _, module in modules_of(pipe))
    dtype = next(module.parameters()).dtype
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
