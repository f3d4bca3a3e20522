"""Each op on the models' own shapes, against plain torch and against what the card can do at most."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import typer

from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.results import Results, Row
from benchmarks.sustained import spread_of
from fusedit import ops
from fusedit.ops._cases import Case
from fusedit.ops._op import Op
from fusedit.ops._verify import Error, as_list, double, error

Tensor = torch.Tensor
REPLAY_S: Final = 1e-3
"""A captured graph of calls should last about this long, so that starting it does not count."""
MOST_CALLS: Final = 200
MOST_SETS: Final = 100


class Ceilings(NamedTuple):
    """What the card can do a second: bytes read and written by a copy, operations of a large bf16 product."""

    bytes: float
    flops: float


class Timed(NamedTuple):
    """A function that makes so many calls."""

    run: Callable[[], Any]
    calls: int


def ceilings(seconds: float, copied: int = 2**31, side: int = 8192) -> Ceilings:
    source = torch.randn(copied // 4, device=gpu.DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=gpu.DEVICE) for _ in range(2))
    made = torch.empty_like(a)
    # A kernel that reads and writes: inside a graph `copy_` goes to the copy engine, at 2.7 TB/s of an H200's 4.2.
    times = in_turn(
        {
            "copy": Timed(lambda: torch.neg(source, out=target), 1),
            "product": Timed(lambda: torch.mm(a, b, out=made), 1),
        },
        seconds,
    )
    copy, product = (1e-3 * statistics.median(times[name]) for name in ("copy", "product"))
    return Ceilings(2 * source.nbytes / copy, 2 * side**3 / product)


def in_turn(runs: dict[str, Timed], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a call, the runs in turn and the first half of them left out.

    Each is one CUDA graph, so that the host's time does not count, unless it makes the host wait.
    """
    replays: dict[str, Callable[[], Any]] = {}
    for name, timed in runs.items():
        timed.run()
        replays[name] = timed.run if gpu.waits(timed.run) else gpu.capture(timed.run)
    times: dict[str, list[float]] = {name: [] for name in runs}
    began, rounds = time.perf_counter(), 0
    while rounds < 10 or time.perf_counter() - began < seconds * len(runs):
        rounds += 1
        for name, replay in replays.items():
            marks = gpu.Marks()
            marks()
            replay()
            marks()
            times[name] += [gap / runs[name].calls for gap in marks.gaps()]
    return {name: values[len(values) // 2 :] for name, values in times.items()}


@torch.no_grad()
def measure(op: Op[..., Any], case: Case, limits: Ceilings, seconds: float) -> list[Row]:
    """A row for plain torch and one for the op."""
    batch = next((arg.shape[0] for arg in case.args if hasattr(arg, "shape")), 1)
    plain, fused = (Row("ops", op.name, case.name, batch, plan) for plan in ("plain", "fused"))
    try:
        args, kwargs = case.build(torch.bfloat16, gpu.DEVICE)
        cost = op.cost(*args, **kwargs)
        truths = as_list(op.reference(*map(double, args), **kwargs))
        errors = {}
        for row, run in ((plain, op.plain), (fused, op)):
            made = as_list(run(*args, **kwargs))
            errors[row.plan] = [error(y, truth) for y, truth in zip(made, truths, strict=True)]
        del truths, made
        gpu.free()
        at_best = max(cost.bytes / limits.bytes, cost.flops / limits.flops)
        sets = _sets(case)
        calls = max(len(sets), min(MOST_CALLS, math.ceil(REPLAY_S / at_best)))
        runs = {"plain": _timed(op.unchecked, sets, calls), "fused": _timed(op, sets, calls)}
        times = in_turn(runs, seconds)
    except Exception as failure:
        plain.error = fused.error = table.why(failure)
        return [plain, fused]
    green = all(ours.within(theirs) for ours, theirs in zip(errors["fused"], errors["plain"], strict=True))
    plain.correct, fused.correct = True, green
    for row in (plain, fused):
        row.rel_error, row.stock_rel_error = (_worst(errors[plan]).relative_l2 for plan in (row.plan, "plain"))
        row.more["largest_error"] = _worst(errors[row.plan]).largest
        _fill(row, times[row.plan], cost, limits)
    return [plain, fused]


def _fill(row: Row, times: list[float], cost: Any, limits: Ceilings) -> None:
    low, high = spread_of(times)
    row.ms, row.spread = round(statistics.median(times), 5), (round(low, 5), round(high, 5))
    by_bytes = cost.bytes / limits.bytes >= cost.flops / limits.flops  # limited by what takes longer at the ceiling
    rate = (cost.bytes if by_bytes else cost.flops) / (1e-3 * row.ms)
    row.more |= {
        "bytes": cost.bytes,
        "flops": cost.flops,
        "tb_s" if by_bytes else "tflop_s": round(rate / 1e12, 3),
        "percent_of_ceiling": round(100 * rate / (limits.bytes if by_bytes else limits.flops), 1),
    }


def _sets(case: Case) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments several times over, so that none is in the cache any more when its turn comes again."""
    first, _ = case.build(torch.bfloat16, gpu.DEVICE)
    each = max(1, gpu.bytes_of(_tensors(first)))
    number = min(MOST_SETS, max(2, math.ceil(4 * gpu.l2_bytes() / each)))
    return [case.build(torch.bfloat16, gpu.DEVICE, seed) for seed in range(number)]


def _timed(run: Callable[..., Any], sets: list[tuple[tuple[Any, ...], dict[str, Any]]], calls: int) -> Timed:
    turns = list(itertools.islice(itertools.cycle(sets), calls))
    return Timed(lambda: [run(*args, **kwargs) for args, kwargs in turns], calls)


def _worst(errors: list[Error]) -> Error:
    return Error(max(e.largest for e in errors), max(e.relative_l2 for e in errors))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def main(
    op: Annotated[str, typer.Option(help="Comma-separated names of ops, or all")] = "all",
    seconds: Annotated[float, typer.Option(help="How long each op, and plain torch, run for")] = 0.3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Bandwidth or arithmetic of each op. Example: python -m benchmarks ops --op swiglu,attention"""
    known = ops.registry()
    chosen = list(known) if op == "all" else given.names(op, tuple(known), "op")
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("ops")
    results = Results(json_file)
    limits = ceilings(1.0)
    gpu.free()
    ceiling = {"tb_s": round(limits.bytes / 1e12, 3), "tflop_s": round(limits.flops / 1e12, 1)}
    results.add([Row("ceiling", "copy and 8192^3 product", "", 1, "plain", more=ceiling)])
    typer.echo(f"ceilings: copy {ceiling['tb_s']} TB/s, product {ceiling['tflop_s']} TFLOP/s")
    for name in chosen:
        for case in (case for case in known[name].cases if "real" in case.tags):
            rows = measure(known[name], case, limits, seconds)
            results.add(rows)
            show(rows)
            gpu.free()


def show(rows: list[Row]) -> None:
    for row in rows:
        label = f"{row.model:28} {row.size:18} {row.plan:6}"
        if row.error is not None or row.ms is None:
            typer.echo(f"{label} {row.error}")
            continue
        rate = f"{row.more['tb_s']:g} TB/s" if "tb_s" in row.more else f"{row.more['tflop_s']:g} TFLOP/s"
        parts = [f"{label} {row.ms:9.4f} ms {rate}"]
        parts.append(f"{row.more['percent_of_ceiling']:.0f} % of the ceiling" if row.correct else "RED")
        ratio = row.faster_than(rows[0])
        if ratio is not None and row is not rows[0]:
            parts.append(f"{ratio:.2f}x")
        typer.echo(", ".join(parts))
