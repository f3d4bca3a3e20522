"""fusedit: diffusion-transformer image generation, faster in place, and proved. Import is light and touches no GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusedit import errors

if TYPE_CHECKING:
    from fusedit.loading import load
    from fusedit.lora.life import load_lora, set_loras, unload_lora
    from fusedit.lora.record import LoraReport
    from fusedit.pipeline import Handle, accelerate
    from fusedit.plan import Plan
    from fusedit.quality import Comparison, compare
    from fusedit.report import Report

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Handle",
    "LoraReport",
    "Plan",
    "Report",
    "accelerate",
    "compare",
    "errors",
    "load",
    "load_lora",
    "set_loras",
    "unload_lora",
]

_HOME = {
    "Comparison": "fusedit.quality",
    "Handle": "fusedit.pipeline",
    "LoraReport": "fusedit.lora.record",
    "Plan": "fusedit.plan",
    "Report": "fusedit.report",
    "accelerate": "fusedit.pipeline",
    "compare": "fusedit.quality",
    "load": "fusedit.loading",
    "load_lora": "fusedit.lora.life",
    "set_loras": "fusedit.lora.life",
    "unload_lora": "fusedit.lora.life",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import fusedit` pulls in neither torch nor diffusers."""
    if name not in _HOME:
        raise AttributeError(f"module 'fusedit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
