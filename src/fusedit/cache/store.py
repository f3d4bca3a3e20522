"""Store: results of text encoders, bounded in number and bytes, dropped as soon as their encoder is not what it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import RLock
from typing import Any, Final

import torch

from fusedit.cache.watch import State

CAPACITY: Final = 16  # results of each encoder
LIMIT: Final = 256 << 20  # bytes of all together

Path = tuple[tuple[str, int | str], ...]


class Entry:
    """What was read from the output of one run of one encoder, by the way it was read.

    Only that is kept: Qwen3's output holds 36 layers' hidden states and keys and values, of which Z-Image reads one.
    The tensors are private copies, normal ones also where the run was under inference_mode.
    """

    def __init__(self) -> None:
        self.values: dict[Path, torch.Tensor | None] = {}  # None: a tuple or an output that is read further

    def keep(self, path: Path, value: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.values[path] = value.detach().clone()

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in list(self.values.values()) if value is not None)  # another thread may add


class Store:
    """The entries of one pipeline's encoders, least recently used first. Threads may share it."""

    def __init__(self, capacity: int = CAPACITY, limit: int = LIMIT) -> None:
        self.capacity = capacity
        self.limit = limit
        self._entries: OrderedDict[tuple[str, Hashable], Entry] = OrderedDict()
        self._lock = RLock()
        self._known: dict[str, tuple[tuple[Any, ...], Any]] = {}  # encoder -> facts and content its entries belong to

    def facts(self, name: str) -> tuple[Any, ...] | None:
        """The facts of the encoder that its entries belong to."""
        with self._lock:
            return self._known[name][0] if name in self._known else None

    def find(self, name: str, key: Hashable, state: State) -> Entry | None:
        """The entry for these arguments, if the encoder is still what it was when the entry was made."""
        with self._lock:
            facts, content = self._known.get(name, (None, None))
            if facts is not None and facts != state.facts:
                self.drop(name)
            entry = self._entries.get((name, key))
            if entry is None:
                return None
            if state.content() != content:
                self.drop(name)
                return None
            self._entries.move_to_end((name, key))
            return entry

    def add(self, name: str, key: Hashable, state: State) -> Entry:
        """A new, empty entry. Those made in another state of the encoder go."""
        with self._lock:
            known = (state.facts, state.content())
            if self._known.get(name, known) != known:
                self.drop(name)
            self._known[name] = known
            entry = self._entries[name, key] = Entry()
            return entry

    def drop(self, name: str) -> None:
        """Forget everything about one encoder."""
        with self._lock:
            self._known.pop(name, None)
            for place in [place for place in self._entries if place[0] == name]:
                del self._entries[place]

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._entries.clear()

    def trim(self) -> bool:
        """Back within the bounds; True if a single result was larger than all that may be kept."""
        with self._lock:
            sizes = {place: entry.bytes for place, entry in self._entries.items()}
            large = [place for place, size in sizes.items() if size > self.limit]
            for place in [*large, *(place for place, entry in self._entries.items() if not entry.values)]:
                self._entries.pop(place, None)
            for name in {name for name, _ in self._entries}:
                places = [place for place in self._entries if place[0] == name]
                for place in places[: max(0, len(places) - self.capacity)]:
                    del self._entries[place]
            total = sum(sizes[place] for place in self._entries)
            while total > self.limit:
                place, _ = self._entries.popitem(last=False)
                total -= sizes[place]
            return bool(large)

    def __len__(self) -> int:
        """How many results the encoder with the most of them has: with one encoder or two, that many prompts."""
        with self._lock:
            names = [name for name, _ in self._entries]
            return max((names.count(name) for name in set(names)), default=0)

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(entry.bytes for entry in self._entries.values())
