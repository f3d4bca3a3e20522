"""Comparisons as a table on a terminal, and as plain text in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from fusedit.quality import words

if TYPE_CHECKING:
    from rich.console import Console

    from fusedit.quality.result import Comparison


def worst(values: Sequence[float | None], pick: Callable[[list[float]], float] = min) -> float | None:
    """The worst of the values that were measured, None if none was."""
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def summary(result: Comparison) -> list[tuple[str, str, str]]:
    """Rows of (what, stock, fused) for one comparison. A speedup appears only beside a green verdict."""
    pairs = result.pairs
    return [
        ("per step", words.milliseconds(result.stock.step_ms), words.milliseconds(result.fused.step_ms)),
        ("per picture", words.seconds(result.stock.total_s), words.seconds(result.fused.total_s)),
        ("peak memory", words.size_in_bytes(result.stock.peak_bytes), words.size_in_bytes(result.fused.peak_bytes)),
        ("ratio, steps", "", words.ratio(result.speedup_step)),
        ("ratio, whole call", "", words.ratio(result.speedup)),
        ("lowest PSNR", words.decibels(result.noise.psnr_db_min), words.decibels(worst([p.psnr_db for p in pairs]))),
        ("lowest SSIM", "", words.similarity(worst([pair.ssim for pair in pairs]))),
        (
            "largest difference",
            words.small(result.noise.max_abs_diff),
            words.small(worst([pair.max_abs_diff for pair in pairs], max)),
        ),
        ("sites rewritten / refused", "", f"{len(result.rewritten)} / {len(result.refused)}"),
    ]


def verdict_line(result: Comparison) -> str:
    """The verdict in one line, with the reasons when it is red."""
    if result.verdict.passed:
        return "passed: " + "; ".join(check.sentence for check in result.verdict.checks)
    return "FAILED: " + "; ".join(result.verdict.reasons)


def print_table(results: Sequence[Comparison], console: Console) -> None:
    """One table for all comparisons, a column pair for each, then the verdicts and the warnings."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="stock and accelerated, same prompts and seeds, interleaved", title_justify="left")
    table.add_column("", no_wrap=True)
    for result in results:
        for arm in ("stock", "fused"):
            table.add_column(Text(f"{result.model}\n{arm}"), justify="right", no_wrap=True)
    columns = [summary(result) for result in results]
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *[cell for _, stock, fused in row for cell in (stock, fused)])
    console.print(table)
    for result in results:
        style = "green" if result.verdict.passed else "bold red"
        console.print(Text(f"{result.model}: {verdict_line(result)}", style=style))
        if result.guilt is not None:
            console.print(Text(f"{result.model}: {result.guilt.sentence}", style=style))
        for note in result.notes:
            if note.startswith("warning"):
                console.print(Text(f"{result.model}: {note}", style="yellow"))


def as_text(results: Sequence[Comparison]) -> str:
    """The same as plain text."""
    from rich.console import Console

    out = StringIO()
    print_table(results, Console(file=out, width=120, force_terminal=False, color_system=None))
    return out.getvalue().rstrip()
