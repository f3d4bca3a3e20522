"""Launches a block: what one block more of a kind adds to a step, at the real width and few layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import torch
import typer

from benchmarks import arguments as given
from benchmarks import gpu, kernels, table
from benchmarks.plans import PLANS, SideBySide, empty_caches
from benchmarks.results import Results, Row
from benchmarks.workloads import Workload, flux_1_dev, z_image_turbo


class Depths(NamedTuple):
    """A model with one block of each kind, and how to add one more."""

    make: Callable[..., Workload]
    one: dict[str, int]
    more: dict[str, dict[str, int]]
    """Kind of block -> the config values that change."""


DEPTHS: Final[dict[str, Depths]] = {
    "flux.1-dev": Depths(
        flux_1_dev,
        {"num_layers": 1, "num_single_layers": 1},
        {"double": {"num_layers": 2}, "single": {"num_single_layers": 2}},
    ),
    "z-image-turbo": Depths(z_image_turbo, {"n_layers": 1}, {"layer": {"n_layers": 2}}),
}


def measure(name: str, size: given.Size, plans: list[str]) -> list[Row]:
    """A row for each plan and kind of block."""
    depths = DEPTHS[name]
    few = _counts(depths.make(**depths.one), size, plans)
    rows = []
    for kind, change in depths.more.items():
        many = _counts(depths.make(**{**depths.one, **change}), size, plans)
        for plan in plans:
            row = Row("launches", name, f"{size[0]}x{size[1]}", 1, plan, kind)
            if isinstance(few[plan], str) or isinstance(many[plan], str):
                row.error = str(few[plan] if isinstance(few[plan], str) else many[plan])
            else:
                row.launches = float(many[plan]) - float(few[plan])
            rows.append(row)
    return rows


def _counts(workload: Workload, size: given.Size, plans: list[str]) -> dict[str, float | str]:
    """Launches a step of each plan, or why there is no count."""
    torch.manual_seed(0)
    call_arguments = workload.arguments(*size, 1)
    counts: dict[str, float | str] = {}
    for plan in plans:
        try:
            with SideBySide(workload) as bench:
                counts[plan] = kernels.of_a_step(bench.lay(plan), call_arguments)
        except Exception as error:
            counts[plan] = table.why(error)
    return counts


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(DEPTHS))] = ",".join(DEPTHS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = "stock,compile,exact",
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT; launches hardly depend on it")] = "512x512",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Kernel launches of one block of each kind. Example: python -m benchmarks launches --model z-image-turbo"""
    models = given.names(model, tuple(DEPTHS), "model")
    chosen = given.names(plans, PLANS, "plan")
    pairs = given.sizes(size)
    given.destination(json_file)
    given.need_gpu("launches")
    results = Results(json_file)
    with empty_caches():
        kernels.prepare()
        for name in models:
            for pair in pairs:
                rows = measure(name, pair, chosen)
                results.add(rows)
                table.show_launches(rows)
                gpu.free()
