"""Which rows the page shows: of each device, benchmark, model, size, batch and plan the newest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.results import FLOORS, Row, Run


@dataclass(frozen=True)
class Entry:
    """A row and the run it is from."""

    row: Row
    run: Run

    @property
    def device(self) -> str:
        return str(self.run.environment["device"])


class Newest:
    """The entries that count, in the order of the models, sizes and plans in the files."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._entries: dict[tuple[object, ...], Entry] = {}
        for run in runs:  # oldest first
            for row in run.rows:
                self._entries[(run.environment["device"], *row.key)] = Entry(row, run)

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(entry.device for entry in self._entries.values()))

    @property
    def runs(self) -> list[Run]:
        """Those that something is left of."""
        return list({id(entry.run): entry.run for entry in self._entries.values()}.values())

    def of(self, device: str, benchmark: str, *plans: str) -> list[Entry]:
        """Of all plans where none is named."""
        found = [e for e in self._entries.values() if e.device == device and e.row.benchmark == benchmark]
        return [e for e in found if e.row.plan in plans] if plans else found

    def benchmarks(self, device: str) -> list[str]:
        return list(dict.fromkeys(e.row.benchmark for e in self._entries.values() if e.device == device))

    def beside(self, entry: Entry, plan: str) -> Row | None:
        """The row of another plan of the same run; rows of two runs are never compared."""
        key = replace(entry.row, plan=plan).key
        other = self._entries.get((entry.device, *key))
        return other.row if other is not None and other.run is entry.run else None

    def ratio(self, entry: Entry, plan: str = "stock") -> float | None:
        return None if entry.row.plan in (plan, *FLOORS) else entry.row.faster_than(self.beside(entry, plan))


def grouped(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries of one model, size and batch together."""
    groups: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.row.model, entry.row.size, entry.row.batch), []).append(entry)
    return list(groups.values())
