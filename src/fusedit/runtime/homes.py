"""Where parameters were put, packed or with other strides, and their way back into a storage of their own.

Kept here and not by whoever put them there: two pipelines may share a module, and the one that moved its weights may be
gone when the other gives them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from typing import Any, Final, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusedit.runtime import former

MOVING: Final = RLock()
"""Held while storages are given and taken: pipelines that share a module may be called from two threads, and one that
is collected may let go of its modules right inside."""


class Home(NamedTuple):
    """Where a parameter was put.

    Attributes:
        place: address and size of the storage.
        relaid: whether it lies channels_last there, and lay contiguous before.
    """

    place: tuple[int, int]
    relaid: bool = False


HOMES: Final = WeakIdKeyDictionary()
"""Parameter -> its Home."""


def storage_of(t: torch.Tensor) -> tuple[int, int]:
    """Address and size of the storage that t lies in."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def is_home(t: torch.Tensor) -> bool:
    """Whether t still lies where it was put."""
    return t in HOMES and bool(HOMES[t].place == storage_of(t))


def sole_owner(t: torch.Tensor) -> bool:
    """Whether t, contiguous, is all that its storage holds."""
    return (
        t.is_contiguous() and t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    )


def lies_channels_last(t: torch.Tensor) -> bool:
    """Also true where a size of 1 leaves no difference between that and contiguous."""
    return t.is_contiguous(memory_format=torch.channels_last)


def unpack(parameters: Iterable[torch.Tensor]) -> None:
    """Give those that lie where they were put their former or an own storage again, with the strides they had."""
    with MOVING, torch.inference_mode(False):
        for t in parameters:
            home: Any = HOMES.get(t)  # type: ignore[no-untyped-call]
            if home is not None:
                _go_back(t, home)
                del HOMES[t]  # not before: where memory does not suffice, it can be tried again


def _go_back(t: torch.Tensor, home: Home) -> None:
    moved = home.place != storage_of(t)
    if moved:  # by `.to()`, which keeps strides: stock would share nothing any more either
        former.forget(t)
    if home.relaid and lies_channels_last(t):
        t.data = t.data.contiguous()
    elif not home.relaid and not moved:
        former.give_back(t)
    else:
        former.forget(t)
