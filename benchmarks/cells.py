"""What a table of the page is made of: its cells, and the section around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.newest import Entry, Newest

Table = Sequence[Sequence[str]]
NONE: Final = "–"


def section(title: str, text: str, heads: Sequence[str], rows: Table) -> str:
    return "\n".join([f"## {title}", "", *([text] if text else []), table(heads, rows)])


def table(heads: Sequence[str], rows: Table) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (heads, ["---"] * len(heads), *rows))


def number(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else NONE


def with_spread(ms: float | None, spread: Sequence[float] | None) -> str:
    if ms is None:
        return NONE
    return f"{ms:.1f}" if spread is None else f"{ms:.1f} ({spread[0]:.1f} to {spread[1]:.1f})"


def ratio(newest: Newest, entry: Entry, plan: str = "stock") -> str:
    ratio = newest.ratio(entry, plan)
    return NONE if ratio is None else f"{ratio:.2f}x"


def errors(error: Any, *others: Any) -> str:
    """Errors that are not finite are words in the files; of those behind the first, what is missing is left out."""
    if error is None:
        return NONE
    found = [error, *(other for other in others if other is not None)]
    return " / ".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in found)


def check(correct: bool | None) -> str:
    return "not checked" if correct is None else "green" if correct else "**red**"


def run_of(newest: Newest, entry: Entry) -> str:
    return str(newest.runs.index(entry.run) + 1)
