"""Energy that the GPU used, from NVML's counter."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def nvml() -> Any | None:
    """The library, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # any failure of an optional library only means that there is no counter
        return None
    return pynvml


@functools.cache
def _handle() -> Any:
    library = nvml()
    assert library is not None
    # By identifier and not by index: NVML counts all cards, torch those that CUDA_VISIBLE_DEVICES leaves.
    uuid = "GPU-" + str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return library.nvmlDeviceGetHandleByUUID(uuid)


def joules() -> float | None:
    """The counter of the current device since the driver was loaded, or None; waits for the GPU first."""
    library = nvml()
    if library is None:
        return None
    try:
        torch.cuda.synchronize()
        return float(library.nvmlDeviceGetTotalEnergyConsumption(_handle())) / 1e3
    except Exception:  # not every card or container has the counter
        return None


def power_limit() -> float | None:
    """Watts that the card may draw, or None."""
    library = nvml()
    if library is None:
        return None
    try:
        return float(library.nvmlDeviceGetEnforcedPowerLimit(_handle())) / 1e3
    except Exception:  # as above
        return None
