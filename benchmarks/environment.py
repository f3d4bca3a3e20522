"""Where a result was measured: device, driver, versions, date and commit."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.energy import nvml, power_limit
from fusedit.environment import version_of

PACKAGES: Final = ("torch", "triton", "diffusers", "transformers", "torchao")
ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """JSON data that every results file carries."""
    now = datetime.datetime.now(datetime.UTC)
    # The variable is for a copy of a commit's tree whose own history ends earlier, or is absent.
    commit = os.environ.get("FUSEDIT_COMMIT") or _describe()
    return {
        "device": torch.cuda.get_device_name(),
        "power_limit_w": power_limit(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "versions": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "date": now.strftime("%Y-%m-%d"),
        "time": now.isoformat(timespec="seconds"),
        "commit": commit,
    }


def _describe() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


def _driver() -> str | None:
    library = nvml()
    return None if library is None else str(library.nvmlSystemGetDriverVersion())
