"""Rows as text on a terminal. A ratio stands beside a green check only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import typer

from benchmarks.results import Row


def why(error: BaseException) -> str:
    """One line that says why a row has no measurement."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def show(rows: Iterable[Row]) -> None:
    """One line a row; ratios against the `stock` row among them."""
    rows = list(rows)
    stock = next((row for row in rows if row.plan == "stock"), None)
    for row in rows:
        typer.echo(line(row, stock))


def line(row: Row, stock: Row | None) -> str:
    label = f"{row.benchmark} {row.model} {row.size} batch {row.batch} {f'{row.plan} {row.variant}'.strip():13}"
    if row.error is not None or (row.ms is None and row.rel_error is None):
        return f"{label} {row.error or 'not measured'}"
    parts = ["not timed" if row.ms is None else f"{row.ms:9.2f} ms"]
    if row.spread is not None:
        parts.append(f"({row.spread[0]:.2f} to {row.spread[1]:.2f})")
    if row.of_floor is not None:
        parts.append(f"{row.of_floor:.3f} of floor")
    if row.joules is not None:
        parts.append(f"{row.joules:.1f} J")
    if row.peak_bytes is not None:
        parts.append(f"{row.peak_bytes / 2**30:.2f} GiB")
    if row.rel_error is not None:
        parts.append(f"error {row.rel_error:.2e}")
    if row.correct is False:
        peer = row.peer_rel_error is not None
        limit = row.peer_rel_error if peer else row.stock_rel_error
        parts.append(f"RED: {'the peer' if peer else 'stock'}'s error is {limit:.2e}")
    ratio = row.faster_than(stock)
    if ratio is not None and row is not stock:
        parts.append(f"{ratio:.2f}x")
    return " ".join([label, *parts])


def show_launches(rows: Iterable[Row]) -> None:
    for row in rows:
        if row.launches is not None:
            place = f"{row.model} {row.size} batch {row.batch} {row.plan} {row.variant}".strip()
            typer.echo(f"launches {place}: {row.launches:g}")
