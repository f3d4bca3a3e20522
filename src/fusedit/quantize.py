"""`fusedit quantize`: a checkpoint with e4m3 weights, from a model that is loaded and converted layer by layer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedit.errors import PlanError, UnsupportedPipelineError
from fusedit.plan import Plan
from fusedit.progress import Progress


@dataclass(frozen=True)
class Quantised:
    """What was written.

    Attributes:
        path: the folder.
        layers: how many linear layers are e4m3.
        kept: how many stay in the model's dtype.
        bytes_before, bytes_after: of the transformer's weights.
        convert_s, total_s: seconds for the conversion alone, and for everything.
    """

    path: Path
    layers: int
    kept: int
    bytes_before: int
    bytes_after: int
    convert_s: float
    total_s: float

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def quantize(
    model: str,
    out: Path,
    plan: Plan | str | Path = "fp8",
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Quantised:
    """Write `model` with the weights that `plan` makes e4m3; `fusedit.load(out)` starts from it.

    Weights lie on the CPU and each is quantised on the GPU where there is one, so that a card with room for one layer
    is enough.

    Raises:
        UsageError: the model, plan or folder cannot be used.
        OutputError: the folder is there already, or cannot be written; nothing is left of it.
    """
    from fusedit.float8 import checkpoint, conversion
    from fusedit.loading import load, quiet_loading
    from fusedit.models._converted import precisions
    from fusedit.served import denoiser_of

    began = time.perf_counter()
    chosen = lossy_plan(plan)
    checkpoint.check_new(out)
    pipe: Any = load(model, dtype=dtype or "bf16", device="cpu")
    module = getattr(pipe, checkpoint.COMPONENT, None)
    served = denoiser_of(module)
    if module is None or served is None:
        raise UnsupportedPipelineError(
            f"{model!r} has no transformer that a file of fusedit.models serves, so it cannot be quantised"
        )
    if conversion.conversion_of(module) is not None:
        raise UnsupportedPipelineError(f"{model!r} is quantised already; give the model that it was made of")
    found = precisions(module, served, chosen)
    wanted = found.wanted
    if not wanted:
        reason = found.blocking or next(iter(found.refused.values()), "it has no linear layers")
        raise PlanError(f"this plan quantises nothing of {model!r} ({reason}); give fp8")
    before = _bytes(module)
    start = time.perf_counter()
    samples = served.typical(module)
    conversion.convert(module, wanted, "drop", device=_device(), progress=progress, undo=False, samples=samples)
    converted = time.perf_counter() - start
    with quiet_loading():
        checkpoint.save(pipe, out)
    kept = sum(isinstance(layer, torch.nn.Linear) for layer in module.modules()) - len(wanted)
    return Quantised(out, len(wanted), kept, before, _bytes(module), converted, time.perf_counter() - began)


def lossy_plan(plan: Plan | str | Path) -> Plan:
    """A plan, of a tier that quantises.

    Raises:
        PlanError: unknown, or of another tier.
    """
    chosen = Plan.of(plan)
    if chosen.base == "exact":
        raise PlanError("plan 'exact' quantises nothing; give fp8 or the path of a plan JSON with base fp8")
    return chosen


def _device() -> torch.device | None:
    """The GPU that quantises, if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def _bytes(module: torch.nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
