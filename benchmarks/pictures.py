"""Pictures of the embedded models, whose weights are trained, by each plan against stock: 50 prompts, one seed."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import fusedit
from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.results import Results, Row
from fusedit.quality.gates import Gates

MODELS: Final = ("tiny-flux", "tiny-z-image")
PLANS: Final = ("exact", "fp8")
DTYPES: Final = ("bf16", "fp32")
_THINGS: Final = """
red apple, strawberry, fox, rocket, sunflower, penguin, pizza, guitar, octopus, automobile, cactus, hamburger, owl,
umbrella, snowman, lion, tiger, cat, dog, horse, cow, pig, frog, turtle, fish, bird, tree, leaf, rose, tulip, banana,
grapes, melon, lemon, peach, cherries, carrot, bread, cheese, cake, cookie, balloon, ball, house, train, bus, ship,
bicycle, clock, bell
"""
_STYLES: Final = ("3d style", "flat style", "noto style")
PROMPTS: Final = tuple(
    f"{thing}, {_STYLES[place % len(_STYLES)]}" for place, thing in enumerate(" ".join(_THINGS.split()).split(", "))
)


def measure(model: str, plan: str, dtype: str) -> Row:
    """One model and plan; `correct` says whether the medians keep the rule of the plan's tier."""
    pipe: Any = fusedit.load(model, dtype=dtype, device=gpu.DEVICE)
    made = fusedit.compare(pipe, PROMPTS, plan, (0,), flip=False, search=False, gate_on="median")
    pairs = [pair for pair in made.pairs if pair.psnr_db is not None and pair.ssim is not None]
    psnr, ssim = [pair.psnr_db or 0.0 for pair in pairs], [pair.ssim or 0.0 for pair in pairs]
    gates = Gates.of(dtype, tier=plan, on="median")
    row = Row("pictures", model, str(made.size), 1, plan, dtype)
    if len(pairs) < len(PROMPTS):
        row.error = f"{len(PROMPTS) - len(pairs)} of {len(PROMPTS)} pairs could not be measured"
        return row
    row.correct = made.verdict.passed
    row.more = {
        "pairs": len(pairs),
        "psnr_db": statistics.median(psnr),  # not rounded: the verdict is read from them again
        "psnr_lowest_db": min(psnr),
        "ssim": statistics.median(ssim),
        "ssim_lowest": min(ssim),
        "keep_the_rule": sum(a >= gates.min_psnr and b >= gates.min_ssim for a, b in zip(psnr, ssim, strict=True)),
    }
    return row


def line(row: Row) -> str:
    """For the terminal."""
    label = f"{row.benchmark} {row.model} {row.size} {row.plan} {row.variant}"
    if row.error is not None:
        return f"{label} {row.error}"
    found = row.more
    return (
        f"{label} median {found['psnr_db']:.1f} dB (lowest {found['psnr_lowest_db']:.1f}), SSIM {found['ssim']:.3f} "
        f"(lowest {found['ssim_lowest']:.3f}), {found['keep_the_rule']} of {found['pairs']} keep the rule"
    )


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(MODELS))] = ",".join(MODELS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = ",".join(PLANS),
    dtype: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(DTYPES))] = DTYPES[0],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Pictures of trained models by each plan against stock. Example: python -m benchmarks pictures --plans fp8"""
    models = given.names(model, MODELS, "model")
    chosen = given.names(plans, PLANS, "plan")
    kinds = given.names(dtype, DTYPES, "dtype")
    given.destination(json_file)
    given.need_gpu("pictures")
    results = Results(json_file)
    for name, kind, plan in itertools.product(models, kinds, chosen):
        try:
            row = measure(name, plan, kind)
        except Exception as error:
            row = Row("pictures", name, "", 1, plan, kind, error=table.why(error))
        results.add([row])
        typer.echo(line(row))
        gpu.free()
