"""`fusedit quantize`: a checkpoint with e4m3 weights, from a model that is loaded and converted layer by layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedit.errors import PlanError, UnsupportedPipelineError
from fusedit.plan import Plan
from fusedit.progress import Progress

if TYPE_CHECKING:
    from fusedit.calibration import Calibration


@dataclass(frozen=True)
class Quantised:
    """What was written.

    Attributes:
        path: the folder.
        layers: how many linear layers are e4m3.
        kept: how many stay in the model's dtype.
        bytes_before, bytes_after: of the transformer's weights.
        rounding: how the codes were chosen, in words.
        convert_s, total_s: seconds for the conversion alone (looking at what layers read included), and for everything.
    """

    path: Path
    layers: int
    kept: int
    bytes_before: int
    bytes_after: int
    rounding: str
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
    from fusedit.float8 import checkpoint, choice, conversion
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
    device = _device()
    seen = _calibrated(pipe, module, served, wanted, chosen.without(*found.refused), progress, device)
    conversion.convert(
        module,
        wanted,
        "drop",
        device=device,
        progress=progress,
        undo=False,
        samples=seen.samples,
        choices=seen.choices,
        rounded=served.rounds(chosen),
    )
    rounding = "; ".join(choice.sentences(conversion.choices_of(module)))
    converted = time.perf_counter() - start
    with quiet_loading():
        checkpoint.save(pipe, out)
    kept = sum(isinstance(layer, torch.nn.Linear) for layer in module.modules()) - len(wanted)
    total = time.perf_counter() - began
    return Quantised(out, len(wanted), kept, before, _bytes(module), rounding, converted, total)


def _calibrated(
    pipe: Any,
    module: Any,
    model: Any,
    wanted: Mapping[str, str],
    plan: Plan,
    progress: Progress | None,
    device: torch.device | None,
) -> Calibration:
    """What layers read in pictures that are drawn on the GPU where there is one with room for the model."""
    from fusedit.calibration import calibrate

    if device is None:
        return calibrate(pipe, module, model, wanted, plan, progress)
    size, free = _bytes(module), torch.cuda.mem_get_info(device)[0]
    if size * 1.1 > free:
        needed = f"drawing pictures needs the whole model on the GPU ({size / 2**30:.1f} GiB, {free / 2**30:.1f} free)"
        return calibrate(pipe, module, model, wanted, plan, refused=needed)
    pipe.enable_model_cpu_offload(device=device)
    try:
        return calibrate(pipe, module, model, wanted, plan, progress)
    finally:
        pipe.remove_all_hooks()
        pipe.to("cpu")


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
