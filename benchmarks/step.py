"""One denoising step: stock, peers, `exact` and `fp8` beside the floors, interleaved in one process, sustained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks import arguments as given
from benchmarks import gpu, kernels, table
from benchmarks.call import call, plain_call
from benchmarks.errors import STEPS as CHECKED
from benchmarks.errors import Truth, truth
from benchmarks.floor import step_of
from benchmarks.plans import COMPILED, PLANS, UNTIMED, Laid, SideBySide, empty_caches
from benchmarks.results import FLOORS, Results, Row
from benchmarks.side import Bursts, Plans, calls, judge
from benchmarks.sustained import Burst, repeated
from benchmarks.workloads import WORKLOADS, Workload

STEPS: Final = 8
WARM: Final = 2
"""The first steps of a call, which also hold what is computed once a run."""


class Shape(Plans):
    """One model at one size and batch: the arguments of a call, and a row for each plan."""

    def __init__(self, workload: Workload, size: given.Size, batch: int, plans: list[str]) -> None:
        super().__init__("step", workload.name, size, batch, plans)
        torch.manual_seed(0)
        self.workload = workload
        self.arguments = workload.arguments(*size, batch)
        self.parts = workload.parts(*size, batch)


def measure(shape: Shape, seconds: float) -> None:
    """Errors, memory, times and energy of every plan."""
    errors: dict[str, float | None] = {}
    try:
        reference = truth(shape.workload, shape.arguments)
    except torch.OutOfMemoryError as error:
        for plan in shape.rows:
            shape.failed(plan, error)
        return
    bursts: Bursts = {}
    with SideBySide(shape.workload) as bench:
        for plan in (plan for plan in PLANS if plan in shape.rows):
            shape.attempt(plan, partial(_look, shape, bench, plan, reference, errors, bursts))
        judge(shape.rows, errors, reference.stock_error)
        for floor in (floor for floor in FLOORS if floor in shape.rows):
            shape.attempt(floor, partial(_lay_floor, shape, floor, bursts))
        shape.time(bursts, seconds, bench)
    shape.hold_against_floor()


def _look(
    shape: Shape, bench: SideBySide, plan: str, reference: Truth, errors: dict[str, float | None], bursts: Bursts
) -> None:
    """Error, seconds to the first step, and memory of one plan."""
    laid, row = bench.lay(plan), shape.rows[plan]
    others, idle = gpu.allocated() - laid.own_bytes(shape.arguments), gpu.idle_in_graphs()
    with laid.context():
        errors[plan], first = reference.check(laid.pipe)
        gpu.free()
        gpu.reset_peaks()
        plain_call(laid.pipe, shape.arguments, CHECKED)
        allocated, reserved = gpu.peaks()
    row.peak_bytes = allocated - others + gpu.idle_in_graphs() - idle
    row.more |= {
        "reserved_bytes": reserved - others,
        "weights_bytes": laid.weights_bytes,
        "transformer_peak_bytes": row.peak_bytes - laid.others_bytes,
        **laid.more,
    }
    if plan != "stock":
        row.more["cold_s" if plan in COMPILED else "first_step_s"] = round(first, 2)
    typer.echo(f"looked at {plan}: error {errors[plan]}, first step after {first:.2f} s")  # a long run can be watched
    if plan not in UNTIMED:
        bursts[plan] = partial(repeated, partial(_steps, laid, shape.arguments))


def _steps(laid: Laid, arguments: dict[str, Any]) -> Burst:
    marks = gpu.Marks()
    marks()
    with laid.context():
        call(laid.pipe, arguments, STEPS, lambda _step, _latents: marks())
    return Burst(marks.gaps()[WARM:], STEPS)


def _lay_floor(shape: Shape, floor: str, bursts: Bursts) -> None:
    row, before = shape.rows[floor], gpu.allocated()
    gpu.reset_peaks()
    step, row.more["attention"] = step_of(shape.parts, fp8=floor == "fp8-floor")
    bursts[floor] = partial(repeated, partial(calls, gpu.capture(step), STEPS, WARM))
    row.peak_bytes = gpu.peaks()[0] - before


def count(shape: Shape) -> None:
    """Launches a step of every plan that was timed; each is laid anew."""
    for row in (row for row in shape.rows.values() if row.error is None and row.plan not in UNTIMED):
        with SideBySide(shape.workload) as bench:
            try:
                if row.plan in FLOORS:
                    row.launches = kernels.of(gpu.capture(step_of(shape.parts, fp8=row.plan == "fp8-floor")[0]))
                else:
                    row.launches = kernels.of_a_step(bench.lay(row.plan), shape.arguments)
            except Exception as error:
                row.more["not_counted"] = table.why(error)


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(WORKLOADS))] = ",".join(WORKLOADS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = "stock,compile,exact",
    size: Annotated[str, typer.Option(help="Comma-separated WIDTHxHEIGHT")] = "1024x1024,512x512",
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes")] = "1,4",
    seconds: Annotated[float, typer.Option(help="How long each plan runs for, at least")] = 6.0,
    launches: Annotated[bool, typer.Option(help="Count kernels too, for which every plan is laid once more")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Plans side by side with the floor. Example: python -m benchmarks step --model flux.1-dev --size 1024x1024"""
    models = given.names(model, tuple(WORKLOADS), "model")
    chosen = given.names(plans, PLANS, "plan")
    shapes = [(pair, number) for pair in given.sizes(size) for number in given.batches(batch)]
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("step")
    results = Results(json_file)
    finished: list[dict[str, Row]] = []

    def first(shape: Shape) -> None:
        measure(shape, seconds)
        finished.append(shape.rows)
        results.add(shape.rows.values())
        table.show(shape.rows.values())

    def second(shape: Shape) -> None:
        shape.rows = finished.pop(0)
        count(shape)
        results.save()
        table.show_launches(shape.rows.values())

    with empty_caches():
        _each(models, shapes, chosen, first)
        if launches:
            kernels.prepare()
            _each(models, shapes, chosen, second)


def _each(
    models: list[str], shapes: list[tuple[given.Size, int]], plans: list[str], action: Callable[[Shape], None]
) -> None:
    for name in models:
        workload = WORKLOADS[name]()
        for size, batch in shapes:
            action(Shape(workload, size, batch, plans))
            gpu.free()
        del workload
        gpu.free()
