"""The section of the page on the fp8 tier: memory and readiness of the plans, and what the tier had to reach."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.cells import NONE, check, number, run_of, section, table
from benchmarks.newest import Entry, Newest
from benchmarks.results import FP8
from benchmarks.targets import DEVICE, SIZE, TARGETS, Target, first_step

PEER: Final = "torchao-fp8"
AGAIN: Final = """\
    python -m benchmarks step --plans stock,exact,fp8,torchao-fp8 --size 1024x1024 --batch 1 --json FILE
    python -m benchmarks cold-start --plans fp8 --json FILE
"""
MEMORY: Final = """\
Of the transformer alone, from the runs of the step above. **weights**: as they lie on the GPU. **peak**: the most that
it needs in a step. **converted**: seconds that the conversion of its weights took on the GPU. **first step**: seconds
to its end in a running process, compilation included.
"""
REACHED: Final = """\
On {device} at {size}, batch 1. Figures of a row are from one run, but for the peer's first step, which is from the run
of its steps. **red**: the required figure is missed; `aim met`: the aim too. The error must not exceed the peer's,
and where it does, or was not checked, no other figure of the step is green.
"""


def fp8(newest: Newest, device: str) -> list[str]:
    """Nothing where no run holds a plan in fp8."""
    lossy = newest.of(device, "step", *FP8)
    if not lossy:
        return []
    parts = [_memory(newest, device, lossy)]
    if DEVICE in device:
        heads = ["what", "model", "stock", "peer", "floor", "required", "aim", "fp8", "verdict", "run"]
        text = REACHED.format(device=device, size=SIZE)
        parts.append(f"### What it had to reach\n\n{text}\n{table(heads, [_row(newest, device, t) for t in TARGETS])}")
    return parts


def _memory(newest: Newest, device: str, lossy: list[Entry]) -> str:
    runs = {(id(e.run), e.row.model, e.row.size, e.row.batch) for e in lossy}
    rows = []
    for entry in newest.of(device, "step"):
        row, more = entry.row, entry.row.more
        if (id(entry.run), row.model, row.size, row.batch) not in runs or "weights_bytes" not in more:
            continue
        sizes = [number(more.get(key, 0) / 2**30, 2) for key in ("weights_bytes", "transformer_peak_bytes")]
        seconds = [number(more.get("lay_s"), 2), number(first_step(row), 2)]
        rows.append([row.model, row.size, str(row.batch), row.plan, *sizes, *seconds, run_of(newest, entry)])
    heads = ["model", "size", "batch", "plan", "weights GiB", "peak GiB", "converted s", "first step s", "run"]
    return section("fp8", MEMORY, heads, rows)


def _row(newest: Newest, device: str, target: Target) -> list[str]:
    found = next((e for e in newest.of(device, target.benchmark, "fp8") if _is(e, target)), None)
    step = next((e for e in newest.of(device, "step", "fp8") if _is(e, target, step=True)), None)
    value = None if found is None or found.row.error is not None else target.of(found.row)
    beside = {plan: _figure(newest, found, plan, target) for plan in ("stock", PEER, "torchao-fp8-eager", "fp8-floor")}
    peer = beside[PEER]
    if peer is None:  # its first step is in the run of its steps; its error is known without compilation
        peer = beside["torchao-fp8-eager"] if target.required is None else _figure(newest, step, PEER, target)
    required = "the peer's" if target.required is None else f"<= {target.required:g}"
    return [
        target.what,
        target.model,
        _number(beside["stock"], target.digits),
        _number(peer, target.digits),
        _number(beside["fp8-floor"], target.digits),
        required,
        NONE if target.aim is None else f"<= {target.aim:g}",
        _number(value, target.digits),
        _verdict(found, target, value, peer),
        NONE if found is None else run_of(newest, found),
    ]


def _verdict(entry: Entry | None, target: Target, value: Any, peer: Any) -> str:
    if entry is not None and value is not None and target.needs_check and not entry.row.correct:
        return check(entry.row.correct)
    return target.verdict(value, peer)


def _is(entry: Entry, target: Target, *, step: bool = False) -> bool:
    row = entry.row
    variant = "" if step else target.variant
    return (row.model, row.size, row.batch, row.variant) == (target.model, SIZE, 1, variant)


def _figure(newest: Newest, entry: Entry | None, plan: str, target: Target) -> Any:
    row = None if entry is None else newest.beside(entry, plan)
    return None if row is None or row.error is not None else target.of(row)


def _number(value: Any, digits: int) -> str:
    """Errors that are not finite are words in the files."""
    return value if isinstance(value, str) else number(value, digits)
