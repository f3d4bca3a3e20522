"""A whole picture: text encoders, denoising and VAE, with each plan in turn in one process."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import typer

from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.encoders import with_text
from benchmarks.energy import joules
from benchmarks.errors import truth
from benchmarks.plans import PLANS, UNTIMED, Laid, SideBySide, empty_caches, what_ran
from benchmarks.results import Results, Row
from benchmarks.side import judge
from benchmarks.sustained import spread_of
from benchmarks.workloads import WORKLOADS, Workload

STAGES: Final = ("text", "denoise", "vae")


class Picture(NamedTuple):
    """Seconds of each of STAGES, and joules of all."""

    seconds: tuple[float, ...]
    joules: float | None


@contextlib.contextmanager
def _in_place_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute on this instance for a while; what stood there before comes back."""
    space = vars(owner)
    before = {name: space[name]} if name in space else {}
    space[name] = value
    try:
        yield
    finally:
        del space[name]
        space.update(before)


@contextlib.contextmanager
def _boundaries(pipe: Any) -> Iterator[list[float]]:
    """When the prompt was encoded and when decoding began, with the GPU's work done."""
    times: list[float] = []
    encode, decode = pipe.encode_prompt, pipe.vae.decode

    def now() -> None:
        gpu.synchronize()
        times.append(time.perf_counter())

    def encoded(*args: Any, **kwargs: Any) -> Any:
        made = encode(*args, **kwargs)
        now()
        return made

    def decoded(*args: Any, **kwargs: Any) -> Any:
        now()
        return decode(*args, **kwargs)

    with _in_place_of(pipe, "encode_prompt", encoded), _in_place_of(pipe.vae, "decode", decoded):
        yield times


def draw(laid: Laid, call_arguments: dict[str, Any], seed: int) -> Picture:
    before, began = joules(), time.perf_counter()
    with _boundaries(laid.pipe) as times, laid.context():
        laid.pipe(**call_arguments, generator=torch.Generator().manual_seed(seed))
    gpu.synchronize()
    ended, after = time.perf_counter(), joules()
    encoded, decoding = times
    used = None if before is None or after is None else after - before
    return Picture((encoded - began, decoding - encoded, ended - decoding), used)


def measure(workload: Workload, size: given.Size, plans: list[str], pictures: int) -> list[Row]:
    """A row for each plan."""
    rows = {plan: Row("image", workload.name, f"{size[0]}x{size[1]}", 1, plan) for plan in plans}
    torch.manual_seed(0)
    checked = workload.arguments(*size, 1)
    try:
        reference = truth(workload, checked)
        workload, prompt = with_text(workload)
    except torch.OutOfMemoryError as error:
        for row in rows.values():
            row.error = table.why(error)
        return list(rows.values())
    call_arguments = {
        "width": size[0],
        "height": size[1],
        "num_inference_steps": workload.steps,
        "guidance_scale": checked["guidance_scale"],
    }
    drawn: dict[str, list[Picture]] = {plan: [] for plan in plans}
    laid: dict[str, Laid] = {}
    errors: dict[str, float | None] = {}

    def attempt(plan: str, seed: int) -> None:
        try:
            if plan not in laid:
                laid[plan] = bench.lay(plan)
                with laid[plan].context():
                    errors[plan], _ = reference.check(laid[plan].pipe)
            if plan not in UNTIMED:
                drawn[plan].append(draw(laid[plan], {**call_arguments, "prompt": prompt(seed)}, seed))
        except Exception as error:
            rows[plan].error = table.why(error)
            gpu.free()

    with SideBySide(workload) as bench:
        for seed in range(pictures + 1):  # the first picture of each warms up
            for plan in PLANS:
                if plan in rows and rows[plan].error is None:
                    attempt(plan, seed)
        for plan, row in rows.items():
            if row.error is None and plan not in UNTIMED:
                _fill(row, drawn[plan][1:], workload.steps)
        judge(rows, errors, reference.stock_error)
        for plan, handle in bench.handles.items():
            rows[plan].more |= what_ran(handle)
        laid.clear()
    return list(rows.values())


def _fill(row: Row, pictures: list[Picture], steps: int) -> None:
    totals = [1e3 * sum(picture.seconds) for picture in pictures]
    low, high = spread_of(totals)
    row.ms, row.spread = round(statistics.median(totals), 1), (round(low, 1), round(high, 1))
    used = [picture.joules for picture in pictures if picture.joules is not None]
    row.joules = round(statistics.fmean(used), 1) if used else None
    row.more |= {
        f"{stage}_s": round(statistics.median(seconds), 4)
        for stage, seconds in zip(STAGES, zip(*(p.seconds for p in pictures), strict=True), strict=True)
    }
    row.more |= {"steps": steps, "pictures": len(pictures), "checked": "one step of the transformer, not the picture"}


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(WORKLOADS))] = ",".join(WORKLOADS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = "stock,compile,exact",
    size: Annotated[str, typer.Option(help="Comma-separated WIDTHxHEIGHT")] = "1024x1024",
    pictures: Annotated[int, typer.Option(help="Pictures of each plan, besides the first")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Whole pictures, random weights. Example: python -m benchmarks image --model z-image-turbo --pictures 5"""
    models = given.names(model, tuple(WORKLOADS), "model")
    chosen = given.names(plans, PLANS, "plan")
    pairs = given.sizes(size)
    given.count(pictures, "pictures")
    given.destination(json_file)
    given.need_gpu("image")
    results = Results(json_file)
    with empty_caches():
        for name in models:
            for pair in pairs:
                rows = measure(WORKLOADS[name](), pair, chosen, pictures)
                results.add(rows)
                table.show(rows)
                gpu.free()
