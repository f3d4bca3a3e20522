"""Progress of a long run: bars by rich on a terminal, now and then a line elsewhere, silent by default."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final, Self

QUIET: Final = 5.0
"""Seconds between two lines in a file or pipe, and before the first: what is over by then says nothing."""


class Progress:
    """Says nothing. The base of the others, and what library calls use unless told otherwise."""

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


class LineProgress(Progress):
    """Lines in a log, few of them: what is being done, how much of it is, and since when.

    Args:
        stream: where they go.
        clock: seconds.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.began = self.said = clock()
        self.title, self.done, self.total = "", 0, 0

    def begin(self, title: str, total: int) -> None:
        self.title, self.done, self.total = title, 0, total
        self._say()

    def step(self, done: int, total: int) -> None:
        self._say(f", step {done} of {total}")

    def finish_picture(self) -> None:
        self.done += 1
        self._say()

    def _say(self, more: str = "") -> None:
        now = self.clock()
        if now - self.said < QUIET:
            return
        self.said = now
        with suppress(OSError, ValueError):  # a log that is full or closed is no reason to end a run
            self.stream.write(f"fusedit: {self.title}, {self.done} of {self.total}{more} ({now - self.began:.0f} s)\n")
            self.stream.flush()


def progress_on(stream: IO[str] | None = None) -> Progress:
    """Bars if a person watches the stream (default: standard error), else lines."""
    stream = sys.stderr if stream is None else stream
    if stream is None:  # standard error is closed
        return Progress()
    return RichProgress(stream) if stream.isatty() else LineProgress(stream)
