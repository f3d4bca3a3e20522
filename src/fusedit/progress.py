"""Progress of a long run: silent by default and in a pipe, bars by rich on a terminal."""

from __future__ import annotations

import sys
from typing import IO, Any, Self


class Progress:
    """Says nothing. The base of the one with bars, and what library calls use unless told otherwise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, title: str, total: int) -> None:
        """Start a bar of `total` pictures under this title; the bar before it stays where it is."""

    def picture(self, what: str) -> None:
        """Say which picture is being drawn now."""

    def step(self, done: int, total: int) -> None:
        """`done` of `total` denoising steps of the current picture are done."""

    def finish_picture(self) -> None:
        """The current picture is done."""


class RichProgress(Progress):
    """Bars on a terminal: pictures done, steps of the current one, time left."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars: Any = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            refresh_per_second=4,  # more would take time from a two-core machine that is being measured
        )
        self.task: Any = None
        self.title = ""
        self.done = 0.0

    def __enter__(self) -> Self:
        self.bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.__exit__(*error)

    def begin(self, title: str, total: int) -> None:
        self.title = title
        self.done = 0
        self.task = self.bars.add_task(title, total=total)

    def picture(self, what: str) -> None:
        self.bars.update(self.task, description=f"{self.title}: {what}")

    def step(self, done: int, total: int) -> None:
        self.bars.update(self.task, completed=self.done + done / (total + 1))  # the rest is decoding

    def finish_picture(self) -> None:
        self.done += 1
        self.bars.update(self.task, completed=self.done, description=self.title)


def progress_on(stream: IO[str] | None = None) -> Progress:
    """Bars if a person watches the stream (default: standard error), else silence."""
    stream = sys.stderr if stream is None else stream
    return RichProgress(stream) if stream.isatty() else Progress()
