"""`fusedit generate`: from checked settings to PNG files that say how they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedit.files import check_file, check_replaceable, json_bytes, png_bytes, write_together
from fusedit.plan import Plan
from fusedit.report import Report
from fusedit.validation import (
    Size,
    check_count,
    check_guidance,
    check_prompt,
    check_seed,
    check_steps,
    check_text_tokens,
    dtype_name,
    parse_size,
)

if TYPE_CHECKING:
    from fusedit.lora.option import LoraOption


@dataclass(frozen=True)
class Job:
    """What the command line asked for, checked; None means the model's own default."""

    prompt: str
    model: str
    plan: Plan
    seeds: tuple[int, ...]
    size: Size | None
    steps: int | None
    guidance: float | None
    negative: str | None
    true_cfg: float | None
    text_tokens: int | None
    dtype: str | None
    device: str | None
    loras: tuple[LoraOption, ...]
    files: tuple[Path, ...]

    @classmethod
    def of(
        cls,
        *,
        prompt: str,
        model: str,
        plan: str | Plan,
        seed: int,
        size: str | None,
        steps: int | None,
        guidance: float | None,
        count: int,
        negative: str | None,
        true_cfg: float | None,
        text_tokens: int | None,
        dtype: str | None,
        device: str | None,
        loras: Sequence[str] | None,
        output: Path,
    ) -> Job:
        """Check everything that can be checked before a model is loaded.

        Raises:
            UsageError: any value is out of range, or the output cannot be written.
        """
        from fusedit.lora.option import lora_options

        first, last = check_seed(seed), check_seed(seed + check_count(count) - 1)
        seeds = tuple(range(first, last + 1))
        target = check_file(output, ".png")
        files = [
            target if count == 1 else target.with_name(f"{target.stem}-{number}{target.suffix}") for number in seeds
        ]
        for path in files:
            check_file(path, ".png")
            check_replaceable(check_file(path.with_suffix(".json"), ".json"), {"prompt", "seed", "plan"})
        return cls(
            prompt=check_prompt(prompt),
            model=model,
            plan=Plan.of(plan),
            seeds=seeds,
            size=None if size is None else parse_size(size),
            steps=None if steps is None else check_steps(steps),
            guidance=None if guidance is None else check_guidance(guidance),
            negative=None if negative is None else check_prompt(negative),
            true_cfg=None if true_cfg is None else check_guidance(true_cfg),
            text_tokens=None if text_tokens is None else check_text_tokens(text_tokens),
            dtype=None if dtype is None else dtype_name(dtype),
            device=device,
            loras=lora_options(loras),
            files=tuple(files),
        )


def generate_files(job: Job, *, quiet: bool) -> dict[str, Any]:
    """Draw the pictures one by one, each from its own seed alone, and write each as soon as it is done.

    Returns:
        JSON data: `images` with path, seed, size and times, `report`, `notes` and the settings they share.

    Raises:
        FuseditError: see `load`, `accelerate` and `draw`; pictures finished before stay.
    """
    from fusedit.defaults import guidance_note, model_name, request_for
    from fusedit.drawing import device_of, draw
    from fusedit.environment import environment
    from fusedit.loading import load_for
    from fusedit.lora.record import loras
    from fusedit.pipeline import accelerate
    from fusedit.progress import Progress, progress_on
    from fusedit.quality.reference import compute_dtype

    pipe = load_for(job.model, dtype=job.dtype, device=job.device, loras=job.loras)
    requests = [
        request_for(
            pipe,
            job.prompt,
            seed,
            width=job.size.width if job.size else None,
            height=job.size.height if job.size else None,
            steps=job.steps,
            guidance=job.guidance,
            negative=job.negative,
            true_cfg=job.true_cfg,
            text_tokens=job.text_tokens,
        )
        for seed in job.seeds
    ]
    with Progress() if quiet else progress_on() as progress:
        handle = accelerate(pipe, job.plan, progress=progress)
    shared = {
        "model": model_name(pipe),
        "pipeline": type(pipe).__name__,
        "prompt": job.prompt,
        "negative": job.negative,
        "true_cfg": job.true_cfg,
        "text_tokens": requests[0].text_tokens,
        "loras": loras(pipe),
        "steps": requests[0].steps,
        "guidance": requests[0].guidance,
        "dtype": compute_dtype(pipe),
        "device": device_of(pipe).type,
        "plan": handle.plan.to_dict(),
        "environment": environment(device_of(pipe)),
    }
    images = []
    before = handle.report()
    with Progress() if quiet else progress_on() as progress:
        progress.begin("drawing", len(requests))
        for request, path in zip(requests, job.files, strict=True):
            progress.picture(f"seed {request.seed}")
            drawing = draw(pipe, request, on_step=progress.step)
            progress.finish_picture()
            report = handle.report()
            image = {
                "path": str(path),
                "seed": request.seed,
                "size": str(drawing.size),
                "total_s": drawing.lap.total_s,
                "peak_bytes": drawing.lap.peak_bytes,
            }
            settings = {**shared, **image, "path": path.name, "report": counted_since(before, report)}
            write_together({path: png_bytes(drawing.pixels, settings), path.with_suffix(".json"): json_bytes(settings)})
            images.append(image)
            before = report
    notes = [note for note in (guidance_note(pipe, job.guidance), *handle.report().notes) if note]
    notes += [f"warning: {site.site} never ran fused" for site in handle.report().never_ran(requests[0].steps)]
    return {**shared, "images": images, "report": handle.report().to_dict(), "notes": notes}


def counted_since(before: Report, after: Report) -> dict[str, Any]:
    """The report with only what was counted between two reports of one handle, so that each picture has its own."""
    data = after.to_dict()
    earlier = {site.site: site for site in before.rewritten}
    for site in data["rewritten"]:
        past = earlier[site["site"]]
        site["fused"] -= past.fused
        site["stock"] -= past.stock
        site["reasons"] = dict(Counter(site["reasons"]) - Counter(past.reasons))
    caches = {cache.name: cache for cache in before.caches}  # a cache that nobody asked yet is in no report
    for cache in data["caches"]:
        if cache["name"] in caches:
            was = caches[cache["name"]]
            cache["hits"] -= was.hits
            cache["misses"] -= was.misses
            cache["reasons"] = dict(Counter(cache["reasons"]) - Counter(was.reasons))
    return data
