"""Counters: per rewrite, how often the fused code ran and how often stock ran in its place, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Counters:
    """Counts of one pipeline. A pipeline call runs in one thread, so plain integers are enough."""

    def __init__(self) -> None:
        self.fused: Counter[str] = Counter()
        self.stock: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.events: Counter[str] = Counter()

    def ran(self, rewrite: str) -> None:
        self.fused[rewrite] += 1

    def fell_back(self, rewrite: str, reason: str) -> None:
        self.stock[rewrite][reason] += 1

    def forget(self, rewrite: str) -> None:
        """Begin at 0 again."""
        self.fused.pop(rewrite, None)
        self.stock.pop(rewrite, None)

    def all_fell_back(self, rewrites: Iterable[str], reason: str) -> None:
        for rewrite in rewrites:
            self.fell_back(rewrite, reason)

    def event(self, what: str) -> None:
        """Something a report should mention with its count, for example a repacking."""
        self.events[what] += 1

    @contextmanager
    def apart(self) -> Iterator[Counters]:
        """What is counted inside the block goes to the Counters that it yields, not here."""
        other = Counters()
        mine = self.fused, self.stock, self.events
        self.fused, self.stock, self.events = other.fused, other.stock, other.events
        try:
            yield other
        finally:
            self.fused, self.stock, self.events = mine

    def add(self, other: Counters) -> None:
        """Count what OTHER has counted once more."""
        self.fused.update(other.fused)
        for rewrite, reasons in other.stock.items():
            self.stock[rewrite].update(reasons)
        self.events.update(other.events)
