"""What a LoRA costs: a step without one and with ones of several ranks on every layer of the blocks, and swapping them.

All on one accelerated pipeline, in turn: each burst loads the LoRA that it is about, in the place of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import torch
import typer

import fusedit
from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.call import call
from benchmarks.compilations import Compilations, compilations
from benchmarks.errors import Truth, truth
from benchmarks.plans import Laid, SideBySide, empty_caches
from benchmarks.results import Results, Row
from benchmarks.sustained import Burst, repeated, sustained
from benchmarks.workloads import WORKLOADS, Workload

PLANS: Final = ("exact", "fp8")
BLOCKS: Final = ("transformer_blocks", "single_transformer_blocks", "layers", "noise_refiner", "context_refiner")
STEPS: Final = 12
WARM: Final = 2
"""The first steps of a call, which compute what serves all of it."""
FIRST: Final = 5
"""Steps after a load in which the LoRA is packed and, where the host is the limit, the step is captured anew."""
NAME: Final = "lora"
State = dict[str, torch.Tensor]


def state(transformer: torch.nn.Module, rank: int) -> State:
    """A LoRA on every linear layer of every block, in memory of the CPU, in diffusers' layout."""
    made: State = {}
    for path, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.partition(".")[0] in BLOCKS:
            down = torch.randn(rank, layer.in_features, device=gpu.DEVICE) * layer.in_features**-0.5
            up = torch.randn(layer.out_features, rank, device=gpu.DEVICE) * 0.02
            for half, matrix in (("A", down), ("B", up)):
                made[f"transformer.{path}.lora_{half}.weight"] = matrix.bfloat16().cpu()
    return made


def variant(rank: int) -> str:
    return f"rank {rank}" if rank else ""


class Swapping:
    """One plan's pipeline and the LoRA that is on it.

    Attributes:
        seconds: (whether another one was there before, rank) -> seconds that each load took.
        settling: rank -> seconds that the first steps after each load took beyond those that followed.
        compiled: rank -> kernels that went through the compiler from the load to the end of a burst, but for the first
            burst of all.
    """

    def __init__(self, laid: Laid, states: Mapping[int, State]) -> None:
        self.laid, self.states = laid, states
        self.seconds: dict[tuple[bool, int], list[float]] = {}
        self.settling: dict[int, list[float]] = {}
        self.compiled: dict[int, int] = {}
        self.layers = self.rank = self._bursts = 0

    def use(self, rank: int) -> bool:
        """The LoRA of this rank and no other; 0: none. Whether that is new."""
        if rank == self.rank:
            return False
        before, pipe = self.rank, self.laid.pipe
        gpu.synchronize()
        began = time.perf_counter()
        if before:
            fusedit.unload_lora(pipe, NAME)
        if rank:
            self.layers = fusedit.load_lora(pipe, self.states[rank], NAME).matched
        gpu.synchronize()
        self.rank = rank
        if rank:
            self.seconds.setdefault((bool(before), rank), []).append(time.perf_counter() - began)
        return True

    def burst(self, rank: int, arguments: dict[str, Any]) -> Burst:
        def some() -> Burst:
            return repeated(lambda: Burst(_steps(self.laid, arguments)[WARM:], STEPS))

        with compilations() as counts:
            if self.use(rank):
                self._settle(rank, _steps(self.laid, arguments))
                some()  # while a LoRA is loaded the card cools, and is faster for a second than it stays
            made = some()
        self._count(rank, counts)
        return made

    def _settle(self, rank: int, gaps: list[float]) -> None:
        """`gaps`: of the first steps with this rank."""
        beyond = sum(gaps[:FIRST]) - FIRST * median(gaps[FIRST:])
        self.settling.setdefault(rank, []).append(beyond / 1e3)

    def _count(self, rank: int, counts: Compilations) -> None:
        if self._bursts:
            self.compiled[rank] = self.compiled.get(rank, 0) + counts.compiled
        self._bursts += 1

    def describe(self, row: Row, rank: int) -> None:
        """Keys of the row of this rank."""
        row.more["kernels_compiled"] = self.compiled.get(rank, 0)
        for key, before in (("load_s", False), ("swap_s", True)):
            if (before, rank) in self.seconds:
                row.more[key] = round(median(self.seconds[before, rank]), 3)
        if rank in self.settling:
            row.more["settle_s"] = round(median(self.settling[rank]), 3)
        if rank:
            row.more |= {"layers": self.layers, "lora_bytes": sum(t.nbytes for t in self.states[rank].values())}


def _steps(laid: Laid, arguments: dict[str, Any]) -> list[float]:
    marks = gpu.Marks()
    marks()
    with laid.context():
        call(laid.pipe, arguments, STEPS, lambda _step, _latents: marks())
    return marks.gaps()


def reference(workload: Workload, arguments: dict[str, Any], lora: State) -> Truth:
    """Stock with this LoRA, and its last step in fp32."""
    fusedit.load_lora(workload.pipe, lora, NAME)
    try:
        return truth(workload, arguments)
    finally:
        fusedit.unload_lora(workload.pipe, NAME)


def measure(workload: Workload, size: given.Size, plans: list[str], ranks: list[int], seconds: float) -> list[Row]:
    """A row for each plan and rank, and for each plan without a LoRA; the first rank is checked against stock."""
    torch.manual_seed(0)
    arguments = workload.arguments(*size, 1)
    states = {rank: state(workload.pipe.transformer, rank) for rank in ranks}
    expected = reference(workload, arguments, states[ranks[0]])
    rows: list[Row] = []
    with SideBySide(workload) as bench:
        for plan in plans:
            own = {r: Row("lora", workload.name, f"{size[0]}x{size[1]}", 1, plan, variant(r)) for r in (0, *ranks)}
            rows += own.values()
            try:
                _one(bench, plan, own, states, expected, arguments, seconds)
            except Exception as error:
                for row in own.values():
                    row.error = row.error or table.why(error)
            gpu.free()
    return rows


def _one(
    bench: SideBySide,
    plan: str,
    rows: dict[int, Row],
    states: Mapping[int, State],
    expected: Truth,
    arguments: dict[str, Any],
    seconds: float,
) -> None:
    swapping = Swapping(bench.lay(plan), states)
    first = next(iter(states))
    bursts = {str(rank): partial(swapping.burst, rank, arguments) for rank in rows}

    def failed(name: str, error: Exception) -> None:
        rows[int(name)].error = table.why(error)

    for name, figures in sustained(bursts, seconds, failed).items():
        row = rows[int(name)]
        row.ms, row.spread, _ = figures  # the energy would be that of loading, too
    for rank, row in rows.items():
        if row.error is not None:
            continue
        swapping.use(rank)
        with swapping.laid.context():
            if rank == first:
                row.judge(expected.check(swapping.laid.pipe)[0], expected.stock_error)
            else:
                call(swapping.laid.pipe, arguments, 1, lambda _step, _latents: None)
        kept = next((c for c in bench.handles[plan].report().caches if c.name == "LoRA terms"), None)
        if rank and kept is not None:
            row.more |= {"copies_bytes": kept.bytes, "not_inside": dict(kept.reasons)}
    swapping.use(first)  # in the place of another one, where there are several
    swapping.use(0)
    for rank, row in rows.items():
        swapping.describe(row, rank)


def _rank(text: str) -> list[int]:
    return [given.count(int(part) if part.strip().isdecimal() else 0, "ranks") for part in text.split(",")]


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(WORKLOADS))] = ",".join(WORKLOADS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = ",".join(PLANS),
    ranks: Annotated[str, typer.Option(help="Comma-separated; the first is checked against stock")] = "32,16,128",
    size: Annotated[str, typer.Option(help="Comma-separated WIDTHxHEIGHT")] = "1024x1024",
    seconds: Annotated[float, typer.Option(help="How long each rank runs for, at least")] = 4.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """A step with LoRAs and without. Example: python -m benchmarks lora --model flux.1-dev --ranks 32"""
    models = given.names(model, tuple(WORKLOADS), "model")
    chosen = given.names(plans, PLANS, "plan")
    wanted = list(dict.fromkeys(_rank(ranks)))
    sizes = given.sizes(size)
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("lora")
    results = Results(json_file)
    with empty_caches():
        for name in models:
            workload = WORKLOADS[name]()
            for pair in sizes:
                rows = measure(workload, pair, chosen, wanted, seconds)
                results.add(rows)
                table.show(rows)
                gpu.free()
            del workload
            gpu.free()
