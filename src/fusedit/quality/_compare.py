"""compare(): the same pictures by stock and by the accelerated pipeline, interleaved in one process, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedit.defaults import guidance_note, model_name, request_for
from fusedit.drawing import device_of, rest
from fusedit.environment import environment
from fusedit.errors import ArgumentError, UnsupportedPipelineError
from fusedit.plan import Plan
from fusedit.progress import Progress
from fusedit.quality.bench import Bench
from fusedit.quality.gates import Gates, Verdict, judge
from fusedit.quality.guilty import Guilt, find_guilty
from fusedit.quality.metrics import flip_installed, flip_map, measure
from fusedit.quality.noise import BaselineNoise
from fusedit.quality.reference import compute_dtype, fp32_twin, twin
from fusedit.quality.result import Comparison, Failure, Pair
from fusedit.report import Report
from fusedit.timing import Timing
from fusedit.validation import check_choice, check_prompts, check_seeds

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def compare(
    pipe: DiffusionPipeline,
    prompts: str | Sequence[str],
    plan: Plan | str | Path = "exact",
    seeds: Sequence[int] = (0, 1),
    *,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    negative: str | None = None,
    true_cfg: float | None = None,
    text_tokens: int | None = None,
    reference: str | None = None,
    min_psnr: float | None = None,
    min_ssim: float | None = None,
    gate_on: str = "min",
    flip: bool | None = None,
    strict: bool = True,
    search: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Draw every prompt with every seed twice, by stock and by the plan, and say what it did to time and picture.

    The caller's pipeline is not changed: a twin over the same components is accelerated and restored. If the pipeline
    is accelerated already, its handle stays in force and its counters do not move.

    Args:
        pipe: a diffusers text-to-image pipeline.
        prompts: one or several; the list is never modified and "" is a prompt.
        plan: a tier name, a Plan, or the path of a plan JSON.
        seeds: each makes one picture of each prompt, from one CPU generator of its own.
        height, width: pixels, multiples of 16; None: the model's own.
        steps, guidance: None: the model's own; guidance 0 is a value.
        negative, true_cfg: negative prompt and FLUX's true CFG scale.
        text_tokens: longest prompt in tokens; None: the model's own.
        reference: None or `same`: stock in the same dtype; `fp32` draws stock in fp32 too and adds the yardstick.
        min_psnr, min_ssim: gates in dB and -1 to 1; None: the rule of the plan's tier (fusedit.quality.gates).
        gate_on: `min` judges the worst pair, `median` the middle one.
        flip: True demands FLIP, None takes it where flip-evaluator is installed, False leaves it out.
        strict: as in accelerate().
        search: look for the guilty rewrite when the verdict is red.
        progress: where to show progress; None is silent.

    Returns:
        The comparison. A red verdict is a result, not an exception.

    Raises:
        UsageError: any argument is out of range, or the pipeline or plan is not supported; nothing was drawn.
        NonFiniteError: a weight holds NaN or infinity.
        DeviceMemoryError: the device ran out of memory; the pipeline is usable.
    """
    from fusedit.lora.record import loras
    from fusedit.pipeline import accelerate

    _check_pipe(pipe)
    chosen = Plan.of(plan)
    requests = [
        request_for(
            pipe, prompt, seed, width=width, height=height, steps=steps, guidance=guidance, negative=negative,
            true_cfg=true_cfg,
            text_tokens=text_tokens,
        )
        for prompt in check_prompts(prompts)
        for seed in check_seeds(seeds)
    ]  # fmt: skip
    wanted = check_choice("same" if reference is None else reference, ("same", "fp32"), "reference")
    dtype = compute_dtype(pipe)
    gates = Gates.of(
        dtype,
        min_psnr=min_psnr,
        min_ssim=min_ssim,
        on=gate_on,
        fp32_reference=wanted == "fp32" and dtype != "fp32",
        tier=chosen.base,
    )
    if flip and not flip_installed():
        flip_map(*[torch.zeros(16, 16, 3).numpy()] * 2)  # raises the error that names the extra, before any drawing
    bench = Bench(twin(pipe), requests, progress or Progress())
    bench.fp32 = fp32_twin(pipe) if wanted == "fp32" and dtype != "fp32" else None
    bench.handle = accelerate(bench.pipe, chosen, strict=strict, progress=bench.progress)
    try:
        exact = bench.draw_fp32()
        bench.warm_up()
        pairs = [bench.pair(index, exact.get(index), flip) for index in range(len(requests))]
        report = bench.handle.report()
        verdict = judge(pairs, gates, requests[0].size)
        guilt = _search(bench, chosen, pairs, gates, verdict, report) if search and not verdict.passed else None
    finally:
        bench.handle.restore()
        rest(pipe)
    drawn = requests[0].steps if bench.laps["fused"] else 0
    return Comparison(
        model=model_name(pipe),
        pipeline=type(pipe).__name__,
        plan=chosen.to_dict(),
        device=device_of(pipe).type,
        dtype=dtype,
        size=requests[0].size,
        steps=requests[0].steps,
        guidance=requests[0].guidance,
        negative=negative,
        true_cfg=requests[0].true_cfg,
        reference=wanted,
        stock=Timing.of(bench.laps["stock"], bench.warm["stock"]),
        fused=Timing.of(bench.laps["fused"], bench.warm["fused"]),
        speedup_measured=bench.speedup(),
        pairs=tuple(pairs),
        noise=BaselineNoise.of(bench.twice),
        loras=tuple(loras(pipe)),
        rewritten=report.rewritten,
        refused=report.refused,
        notes=(*report.notes, *_notes(pipe, report, drawn, wanted, dtype, guidance)),
        verdict=verdict,
        guilt=guilt,
        environment=environment(device_of(pipe)),
    )


def _search(
    bench: Bench, plan: Plan, pairs: Sequence[Pair], gates: Gates, verdict: Verdict, report: Report
) -> Guilt | None:
    """Find the guilty rewrite with the worst pair that stock draws well, or say that stock shows it too."""
    from fusedit.pipeline import accelerate

    stock_failed = [failure for pair in pairs for failure in pair.failures if failure.arm == "stock"]
    candidates = [index for index, pair in enumerate(pairs) if pair.stock is not None]
    if not candidates:
        first, pair = stock_failed[0], pairs[0]
        return Guilt((), f"stock shows it too: {first.message}", pair.prompt, pair.seed, first.step, ())
    names = [site.site for site in report.rewritten]
    worst = min(candidates, key=lambda index: _badness(pairs[index]))
    pair = pairs[worst]
    failure = next((failure for failure in pair.failures if failure.arm == "fused"), None)
    if not names or pair.stock is None:
        return None
    stock_pixels = pair.stock
    bench.progress.begin("looking for the guilty rewrite", len(names))

    def good_without(off: tuple[str, ...]) -> bool:
        # A try that leaves precision and rounding alone finds the weights converted already. The others convert anew,
        # and look anew at what layers read where they round: two tries of a search of some forty. Keeping what was read
        # would save their small pictures, and cost 6 GB of CPU memory for FLUX.1-dev in every comparison.
        bench.handle = accelerate(bench.pipe, plan.without(*off), strict=False)
        drawn = bench.attempt("fused", worst, f"without {', '.join(off)[:48]}")
        if isinstance(drawn, Failure) or drawn.pixels.shape != stock_pixels.shape:
            return False
        if failure is not None:
            return True
        again = measure(stock_pixels, drawn.pixels, flip=False)
        return again.psnr_db >= gates.min_psnr and again.ssim >= gates.min_ssim

    return find_guilty(
        names,
        good_without,
        prompt=pair.prompt,
        seed=pair.seed,
        step=None if failure is None else failure.step,
        symptom=failure.message.partition(";")[0] if failure is not None else verdict.reasons[0],
    )


def _badness(pair: Pair) -> float:
    """Pairs in the order in which they deserve a look: not drawn by fused first, then by PSNR."""
    return float("-inf") if pair.psnr_db is None else pair.psnr_db


def _notes(pipe: Any, report: Report, steps: int, reference: str, dtype: str, guidance: float | None) -> list[str]:
    """What a reader of the comparison should know. STEPS is 0 where the fused pipeline drew nothing."""
    notes = []
    never = report.never_ran(steps) if steps else ()
    for site in never:
        why = "; ".join(site.reasons) or "the model never reached it"
        notes.append(f"warning: {site.site} never ran fused: {why}")
    if steps and len(never) == len(report.rewritten):
        notes.append("warning: no rewrite ran, so this compares stock with stock")
    if reference == "fp32" and dtype == "fp32":
        notes.append("the pipeline is in fp32 already, so stock is the fp32 reference")
    for cache in report.caches:
        if cache.name == "prompts" and cache.hits:
            times = f"{cache.hits} of {cache.hits + cache.misses} times"
            notes.append(f"fused took its prompt from the cache {times}, stock encodes it every time")
    note = guidance_note(pipe, guidance)
    return [*notes, note] if note else notes


def _check_pipe(pipe: Any) -> None:
    from diffusers import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline):
        raise UnsupportedPipelineError(
            f"compare() takes a diffusers pipeline, not a {type(pipe).__name__}; load one with fusedit.load(...)"
        )
    if getattr(pipe, "transformer", None) is None:
        raise ArgumentError(f"this {type(pipe).__name__} has no transformer loaded; load the whole pipeline")
