"""Where a result was measured: device, driver, versions, date and commit; and the energy counter."""

from __future__ import annotations

import datetime
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """JSON data that every results file carries."""
    root = Path(__file__).resolve().parent.parent
    # The variable is for a copy of a commit's tree whose own history ends earlier, or is absent.
    commit = os.environ.get("FUSEDIT_COMMIT") or _describe(root)
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {name: version(name) for name in ("torch", "triton", "diffusers", "transformers")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit,
    }


def _describe(root: Path) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or None


def _nvml() -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # any failure of an optional library only means that there is no counter
        return None
    return pynvml


def _driver() -> str | None:
    nvml = _nvml()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def joules() -> float | None:
    """NVML's energy counter of the current device since the driver was loaded, in joules, or None."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        uuid = "GPU-" + str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:  # not every card or container has the counter
        return None
