"""The storage that a parameter had before it was packed: given back where somebody still holds it.

Two pipelines may share weights by storage (`load_state_dict(assign=True)`), which no parameter shows: a storage's use
count is no sign, a tensor from a safetensors file shows one user more than it has. So the storage is remembered weakly,
which costs no memory, and looked up again when the parameter goes back.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


class _Former:
    """A storage, held weakly: one object for all parameters that had it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.follow(storage)

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Stand for STORAGE from now on. Its address is not given to another one as long as it is held weakly."""
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        _AT[self.weak.cdata] = self

    def like(self, t: torch.Tensor) -> torch.Tensor | None:
        """The storage as a tensor of t's shape, strides and dtype, or None where it is gone or of another size."""
        revive: Any = torch.UntypedStorage._new_with_weak_ptr
        storage = revive(self.weak.cdata)
        if storage is None or storage.device != t.device or storage.nbytes() != t.numel() * t.element_size():
            return None
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


_AT: weakref.WeakValueDictionary[int, _Former] = weakref.WeakValueDictionary()  # by the storage's address
_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter


def remember(t: torch.Tensor) -> None:
    """Remember the storage of T, which it owns alone as far as one can see."""
    storage = t.untyped_storage()
    former = _AT.get(storage._cdata)  # which may have gone on to follow another one: then its address was free again
    _OF[t] = former if former is not None and former.weak.cdata == storage._cdata else _Former(storage)


def forget(t: torch.Tensor) -> None:
    """Give up the former storage of T."""
    _OF.pop(t, None)  # type: ignore[no-untyped-call]


def give_back(t: torch.Tensor) -> None:
    """Move T out of where it was put: into its former storage where that lives with the same bits, else a new one."""
    former: _Former | None = _OF.pop(t, None)  # type: ignore[no-untyped-call]
    old = None if former is None else former.like(t)
    if old is not None and torch.equal(_bits(old), _bits(t.data)):
        t.data = old
        return
    t.data = t.data.clone()
    if former is not None and old is None:  # others that shared the former storage were put elsewhere too: they follow
        former.follow(t.data.untyped_storage())


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its elements, so that NaN equals itself and -0 is not 0."""
    return t.flatten().view(torch.uint8)
