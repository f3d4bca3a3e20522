"""The section of the page on pictures of the embedded models."""

from __future__ import annotations

from typing import Final

from benchmarks.cells import NONE, check, number, run_of, section
from benchmarks.newest import Entry, Newest

TEXT: Final = """\
The embedded models, whose weights are trained: 50 prompts, seed 0, each picture against stock's of the same dtype.
**keep the rule**: pictures that reach what the plan's tier promises (`exact` 45 dB in bf16, 80 in fp32, and SSIM 0.98;
`fp8` 30 dB and 0.95). **medians**: whether the medians do.
"""


def pictures(newest: Newest, entries: list[Entry]) -> str:
    heads = [
        "model",
        "size",
        "dtype",
        "plan",
        "PSNR, dB",
        "lowest",
        "SSIM",
        "lowest",
        "keep the rule",
        "medians",
        "run",
    ]
    return section("Pictures of the embedded models", TEXT, heads, [_row(newest, entry) for entry in entries])


def _row(newest: Newest, entry: Entry) -> list[str]:
    row, more = entry.row, entry.row.more
    cells = [row.model, row.size, row.variant, row.plan]
    if row.error is not None:
        return [*cells, row.error, *[NONE] * 5, run_of(newest, entry)]
    return [
        *cells,
        number(more.get("psnr_db"), 1),
        number(more.get("psnr_lowest_db"), 1),
        number(more.get("ssim"), 3),
        number(more.get("ssim_lowest"), 3),
        f"{more.get('keep_the_rule')} of {more.get('pairs')}",
        check(row.correct),
        run_of(newest, entry),
    ]
