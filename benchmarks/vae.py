"""The VAE alone, decode and encode: stock, its peers and `exact` beside the floor, interleaved, sustained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from benchmarks import arguments as given
from benchmarks import gpu, kernels, table
from benchmarks.plans import Laid, SideBySide, empty_caches
from benchmarks.results import Results, Row
from benchmarks.side import Bursts, Plans, calls
from benchmarks.sustained import repeated
from benchmarks.vae_floor import ATTENTION, Part, parts_of, step_of
from benchmarks.vae_plans import PARTS, PLANS, Truth, VaeSideBySide, inputs, run, truth, workload
from benchmarks.workloads import Workload

RUNS: Final = 8
WARM: Final = 2
"""The first runs after the GPU has waited, which do not count."""
FIRST: Final = 3
"""Runs before memory is measured or kernels are counted: what a plan captures or keeps is there then."""
SHAPES: Final = (((1024, 1024), 1), ((512, 512), 1), ((2048, 2048), 1), ((1024, 1024), 4))
"""What is measured where neither --size nor --batch is given."""


class Shape(Plans):
    """Decode or encode at one size and batch: a row for each plan. Holds no tensor between its two turns."""

    def __init__(self, workload: Workload, what: str, size: given.Size, batch: int, plans: list[str]) -> None:
        super().__init__(f"vae-{what}", workload.name, size, batch, plans)
        self.workload, self.what, self.size, self.batch = workload, what, size, batch

    def inputs(self) -> torch.Tensor:
        return inputs(self.workload.pipe.vae, self.what, *self.size, self.batch)

    def floor(self, x: torch.Tensor) -> list[Part]:
        """Ask for it while the pipeline is stock."""
        return parts_of(getattr(self.workload.pipe.vae, PARTS[self.what]), tuple(x.shape))


def measure(shape: Shape, seconds: float) -> None:
    """Errors, memory, times and energy of every plan."""
    x = shape.inputs()
    parts = shape.floor(x)
    reference = truth(shape.workload.pipe.vae, shape.what, x)
    gpu.free()
    bursts: Bursts = {}
    with VaeSideBySide(shape.workload, shape.what) as bench:
        for plan in (plan for plan in PLANS if plan in shape.rows):
            shape.attempt(plan, partial(_look, shape, bench, plan, x, reference, bursts))
        shape.attempt("floor", partial(_lay_floor, shape, parts, bursts))
        shape.time(bursts, seconds, bench)
    shape.hold_against_floor()


def _look(shape: Shape, bench: SideBySide, plan: str, x: torch.Tensor, reference: Truth, bursts: Bursts) -> None:
    """Error, seconds to the first result, and memory of one plan."""
    laid, row = bench.lay(plan), shape.rows[plan]
    others, idle = gpu.allocated() - laid.own_bytes({"x": x}), gpu.idle_in_graphs()
    once = partial(_once, laid, shape.what, x)
    gpu.synchronize()
    began = time.perf_counter()
    once()
    gpu.synchronize()
    first = time.perf_counter() - began
    for _ in range(FIRST - 2):
        once()
    row.judge(reference.error(once()), reference.stock_error)
    gpu.free()
    gpu.reset_peaks()
    once()
    allocated, reserved = gpu.peaks()
    row.peak_bytes = allocated - others + gpu.idle_in_graphs() - idle
    row.more["reserved_bytes"] = reserved - others
    if reference.why:
        row.more["unchecked"] = reference.why
    if plan != "stock":
        row.more["cold_s" if plan == "compile" else "first_step_s"] = round(first, 2)
    bursts[plan] = partial(repeated, partial(calls, once, RUNS, WARM))


def _once(laid: Laid, what: str, x: torch.Tensor) -> torch.Tensor:
    with laid.context():
        return run(laid.pipe.vae, what, x)


def _lay_floor(shape: Shape, parts: list[Part], bursts: Bursts) -> None:
    row, before = shape.rows["floor"], gpu.allocated()
    gpu.reset_peaks()
    bursts["floor"] = partial(repeated, partial(calls, gpu.capture(step_of(parts)), RUNS, WARM))
    row.peak_bytes = gpu.peaks()[0] - before
    row.more |= {"attention": ATTENTION, "flops": sum(part.flops for part in parts)}


def count(shape: Shape) -> None:
    """Launches of every plan that was measured; each is laid anew."""
    x = shape.inputs()
    for row in (row for row in shape.rows.values() if row.error is None):
        with VaeSideBySide(shape.workload, shape.what) as bench:
            try:
                if row.plan == "floor":
                    row.launches = kernels.of(gpu.capture(step_of(shape.floor(x))))
                else:
                    row.launches = _launches(partial(_once, bench.lay(row.plan), shape.what, x))
            except Exception as error:
                row.more["not_counted"] = table.why(error)


def _launches(once: Callable[[], object]) -> float:
    for _ in range(FIRST):
        once()

    def again() -> None:
        once()

    return kernels.of(again)


def shapes(size: str | None, batch: str | None) -> list[tuple[given.Size, int]]:
    """Every size with every batch; where one is not given, the sizes of SHAPES or batch 1; where neither is, SHAPES."""
    if size is None and batch is None:
        return list(SHAPES)
    sizes = list(dict.fromkeys(pair for pair, _ in SHAPES)) if size is None else given.sizes(size)
    batches = [1] if batch is None else given.batches(batch)
    return [(pair, number) for pair in sizes for number in batches]


def main(
    what: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PARTS))] = ",".join(PARTS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = "stock,compile,exact",
    size: Annotated[
        str | None,
        typer.Option(help="Comma-separated WIDTHxHEIGHT; default: 1024x1024, 512x512, 2048x2048, 1024x1024 by four"),
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Comma-separated batch sizes, each at every size")] = None,
    seconds: Annotated[float, typer.Option(help="How long each plan runs for, at least")] = 6.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """FLUX's VAE, plans beside the floor. Example: python -m benchmarks vae --what decode --size 1024x1024"""
    halves = given.names(what, tuple(PARTS), "--what")
    chosen = given.names(plans, PLANS, "plan")
    pairs = shapes(size, batch)
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("vae")
    results = Results(json_file)
    pipeline = workload()
    measured = [Shape(pipeline, half, pair, number, chosen) for half in halves for pair, number in pairs]
    with empty_caches():
        for shape in measured:
            measure(shape, seconds)
            _keep(results, shape.rows.values())
        kernels.prepare()  # what is timed after a count is timed wrong, so counts come last
        for shape in measured:
            count(shape)
            results.save()
            table.show_launches(shape.rows.values())
            gpu.free()


def _keep(results: Results, rows: Iterable[Row]) -> None:
    results.add(rows)
    table.show(rows)
    gpu.free()
