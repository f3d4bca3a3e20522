"""`fusedit compare` and what it shares with the demo: load, compare, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedit.plan import Plan
from fusedit.quality import gates
from fusedit.quality.output import check_output, write_comparisons
from fusedit.quality.result import Comparison
from fusedit.validation import Size, check_choice, check_prompts, check_seeds, dtype_name


def run_compare(
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    loras: Sequence[str] | None,
    out: Path | None,
    quiet: bool,
    prompts: Sequence[str],
    plan: str,
    seeds: Sequence[int],
    size: Size | None,
    reference: str,
    min_psnr: float | None,
    min_ssim: float | None,
    gate_on: str,
    **settings: Any,
) -> Comparison:
    """Check everything that needs no model, load it, compare, and write below `out` if there is one.

    Raises:
        FuseditError: see `fusedit.load` and `fusedit.compare`; nothing was written.
    """
    check_prompts(prompts)
    check_seeds(seeds)
    check_choice(reference, ("same", "fp32"), "reference")
    gates.Gates.of("fp32", min_psnr=min_psnr, min_ssim=min_ssim, on=gate_on)
    chosen = Plan.of(plan)
    if dtype is not None:
        dtype_name(dtype)
    if out is not None:
        check_output(out)
    from fusedit.lora.option import lora_options

    chosen_loras = lora_options(loras)

    from fusedit.loading import load_for
    from fusedit.progress import Progress, progress_on
    from fusedit.quality._compare import compare

    pipe = load_for(model, dtype=dtype, device=device, loras=chosen_loras)
    with Progress() if quiet else progress_on() as progress:
        result = compare(
            pipe,
            prompts,
            chosen,
            seeds,
            width=size.width if size else None,
            height=size.height if size else None,
            reference=reference,
            min_psnr=min_psnr,
            min_ssim=min_ssim,
            gate_on=gate_on,
            progress=progress,
            **settings,
        )
    if out is not None:
        write_comparisons(out, [result], result.to_dict(), f"{result.model}: stock and accelerated")
    return result
