"""Where a result was measured: versions, device, driver, date, commit. Asked for when needed, never at import."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

PACKAGES: Final = ("fusedit", "torch", "triton", "diffusers", "transformers", "accelerate", "peft")


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge a measurement, as JSON data."""
    import torch  # here and not above: doctor must run where torch cannot be imported

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": driver() if device.type == "cuda" else None,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
    }


def version_of(package: str) -> str | None:
    """The installed version of a package, or None. Reads its metadata and does not import it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "fusedit":  # run from a checkout that was not installed
            from fusedit import __version__

            return __version__
        return None


def driver() -> str | None:
    """The NVIDIA driver's version, or None. Any failure of the optional library counts as unknown."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return None


def processor() -> str:
    """The CPU's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout this runs from, with a + if it has changes; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
