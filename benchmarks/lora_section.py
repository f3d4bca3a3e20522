"""The section of the page on LoRAs: what one costs a step, and what swapping takes."""

from __future__ import annotations

from typing import Final

from benchmarks.cells import NONE, check, errors, number, run_of, section, with_spread
from benchmarks.newest import Entry, Newest
from benchmarks.results import Row

MOST: Final = 1.05
"""What one adapter of RANK may cost, as a part of the step without one."""
RANK: Final = "rank 32"
TEXT: Final = f"""\
One adapter on every linear layer of every block, modulation included, loaded into the accelerated pipeline in the place
of the one before. **of the step**: ms over those of the same plan without a LoRA, in turn with it; {RANK} may take
{MOST - 1:.0%} more. **load**, **swap**: seconds from tensors in memory of the CPU to the end of `load_lora()`, without
another LoRA and in the place of one. **settle**: what the first five steps after that took beyond later ones.
**copies**: what is kept of it besides the adapter itself. **compiled**: kernels that went through the compiler from a
load to the end of its steps. **error**: relative L2 of one step against stock in fp32 with the same LoRA, and after the
slash that of stock in bf16; one rank is checked.
"""


def lora(newest: Newest, entries: list[Entry]) -> str:
    heads = ["model", "size", "plan", "LoRA", "ms", "of the step", "verdict", "load s", "swap s"]
    heads += ["settle s", "copies MiB", "compiled", "error", "check", "run"]
    return section("LoRA", TEXT, heads, [_row(newest, entry, _without(entry, entries)) for entry in entries])


def _without(entry: Entry, entries: list[Entry]) -> Row | None:
    """The same plan of the same run without a LoRA."""
    row = entry.row
    wanted = (row.model, row.size, row.batch, row.plan, "")
    same = (e.row for e in entries if e.run is entry.run)
    return next((r for r in same if (r.model, r.size, r.batch, r.plan, r.variant) == wanted), None)


def share(row: Row, without: Row | None) -> float | None:
    """Of the step without a LoRA; None beside a red check."""
    if not row.variant or without is None or not row.ms or not without.ms or row.correct is False:
        return None
    return row.ms / without.ms


def _row(newest: Newest, entry: Entry, without: Row | None) -> list[str]:
    row, more = entry.row, entry.row.more
    cells = [row.model, row.size, row.plan, row.variant or "none"]
    if row.error is not None:
        return [*cells, row.error, *[NONE] * 9, run_of(newest, entry)]
    part = share(row, without)
    verdict = NONE if row.variant != RANK or part is None else "green" if part <= MOST else "**red**"
    copies = more.get("copies_bytes")
    return [
        *cells,
        with_spread(row.ms, row.spread),
        number(part, 3),
        verdict,
        number(more.get("load_s"), 2),
        number(more.get("swap_s"), 2),
        number(more.get("settle_s"), 2),
        NONE if copies is None else f"{copies / 2**20:.0f}",
        number(more.get("kernels_compiled"), 0),
        errors(row.rel_error, row.stock_rel_error),
        NONE if row.rel_error is None else check(row.correct),
        run_of(newest, entry),
    ]
