"""One denoising step, stock and fused interleaved in one process, sustained; and its error against fp32."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import fusedit
from benchmarks.environment import environment, joules
from benchmarks.errors import step_errors
from benchmarks.workloads import WORKLOADS, Workload

STEPS = 8  # of which the first two (which also hold what is computed once a run) warm up
WARM = 2


def _run(workload: Workload, arguments: dict[str, Any], seed: int = 0) -> tuple[list[float], torch.Tensor]:
    """One pipeline call: milliseconds of each step after the warm ones, and the latents."""
    marks = [torch.cuda.Event(enable_timing=True)]

    def mark(_pipe: Any, _i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
        return kwargs

    marks[0].record()
    latents = workload.pipe(
        **arguments,
        num_inference_steps=STEPS,
        output_type="latent",
        generator=torch.Generator().manual_seed(seed),
        callback_on_step_end=mark,
    ).images
    torch.cuda.synchronize()
    steps = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return steps[WARM:], latents


def _launches(workload: Workload, arguments: dict[str, Any]) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        _run(workload, arguments)
    kernels = [e for e in trace.events() if e.device_type.name == "CUDA" and not e.name.startswith("Mem")]
    return round(len(kernels) / STEPS, 1)


def measure(name: str, size: tuple[int, int], batch: int, seconds: float) -> list[dict[str, Any]]:
    """Rows for stock and exact of one model and size."""
    workload = WORKLOADS[name]()
    workload.pipe.set_progress_bar_config(disable=True)
    arguments = workload.arguments(*size, batch)
    handle = fusedit.accelerate(workload.pipe, "exact")
    started = time.perf_counter()
    _run(workload, arguments)
    first = time.perf_counter() - started
    ours, stocks = step_errors(workload, handle, arguments)
    correct = ours <= 1.05 * stocks
    rows: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {"stock": [], "exact": []}
    energy: dict[str, list[float]] = {"stock": [], "exact": []}
    switch = {"stock": handle.paused, "exact": contextlib.nullcontext}
    for plan in times:
        with switch[plan]():
            _run(workload, arguments)
            torch.cuda.reset_peak_memory_stats()
            _run(workload, arguments)
            rows[plan] = {"peak_bytes": torch.cuda.max_memory_allocated(), "launches": _launches(workload, arguments)}
    began = time.perf_counter()
    while time.perf_counter() - began < 2 * seconds or len(times["exact"]) < 3 * (STEPS - WARM):
        for plan in times:
            with switch[plan]():
                before = joules()
                steps, _ = _run(workload, arguments)
                after = joules()
            times[plan] += steps
            if before is not None and after is not None:
                energy[plan].append((after - before) / STEPS)
    for plan, values in times.items():
        late = values[len(values) // 2 :]  # the card is power-limited: the later half is the sustained figure
        low, high = statistics.quantiles(late, n=20)[0], statistics.quantiles(late, n=20)[-1]
        rows[plan] |= {
            "benchmark": "step",
            "model": name,
            "size": f"{size[0]}x{size[1]}",
            "batch": batch,
            "plan": plan,
            "ms": round(statistics.median(late), 3),
            "spread": [round(low, 3), round(high, 3)],
            "joules": round(statistics.median(energy[plan]), 2) if energy[plan] else None,
            "rel_error": ours if plan == "exact" else stocks,
            "stock_rel_error": stocks,
            "correct": correct if plan == "exact" else True,
            "speedup": None,
        }
    rows["exact"]["first_run_s"] = round(first, 2)
    if correct:
        rows["exact"]["speedup"] = round(rows["stock"]["ms"] / rows["exact"]["ms"], 3)
    rows["exact"]["report"] = handle.report().to_dict()
    handle.restore()
    return list(rows.values())


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(WORKLOADS))] = ",".join(WORKLOADS),
    size: Annotated[str, typer.Option(help="Comma-separated WIDTHxHEIGHT")] = "1024x1024",
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes")] = "1",
    seconds: Annotated[float, typer.Option(help="How long each column runs")] = 6.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Stock and exact side by side. Example: python -m benchmarks step --model flux.1-dev --size 1024x1024"""
    if not torch.cuda.is_available():
        raise typer.BadParameter("the step benchmark needs a CUDA GPU; none is visible")
    rows = []
    for name in model.split(","):
        if name not in WORKLOADS:
            raise typer.BadParameter(f"unknown model {name!r}; known: {', '.join(WORKLOADS)}")
        for shape in size.split(","):
            width, _, height = shape.partition("x")
            for count in batch.split(","):
                rows += measure(name, (int(width), int(height)), int(count), seconds)
                gc.collect()  # the last pipeline, before the next one measures its memory
                torch.cuda.empty_cache()
                for row in rows[-2:]:
                    ratio = f"{row['speedup']:.2f}x" if row["speedup"] else ""
                    typer.echo(
                        f"{row['model']} {row['size']} batch {row['batch']} {row['plan']:6} {row['ms']:8.2f} ms "
                        f"{row['spread']} {row['launches']} launches {row['joules']} J "
                        f"{row['peak_bytes'] / 2**30:.2f} GiB error {row['rel_error']:.2e} {ratio}"
                    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
