"""Weights of convolutions laid channels_last, in place: beside such pictures cuDNN would reorder them in each call.

The parameters stay what they are, objects, values and shapes; only their strides differ, which `.to()` and edits in
place keep. What lies channels_last already, since its owner wanted that or since a single tap or channel lies either
way, is no concern of this file, neither on the way there nor back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedit.runtime.branches import from_peft
from fusedit.runtime.counters import Counters
from fusedit.runtime.homes import HOMES, MOVING, Home, lies_channels_last, sole_owner, storage_of, unpack

LAID: Final = "convolution weights laid channels_last"
LEFT: Final = "calls with convolution weights that were left as they lie"

# Module -> the weights of it that were laid, held weakly: by the time they go back their layers may have been replaced.
_LAID: Final[WeakKeyDictionary[nn.Module, Any]] = WeakKeyDictionary()


def on_gpu(x: torch.Tensor) -> bool:
    """Whether x lies where the library wants weights to lie as pictures do, and passes over memory are worth saving."""
    return x.is_cuda


def lay(
    module: nn.Module, device: torch.device, dtype: torch.dtype, counters: Counters, *, offloaded: bool = False
) -> None:
    """Lay the weights of all convolutions in `module` channels_last, where that has not been done and is allowed.

    Runs before every call: where nothing is to do it compares strides. A layer that a LoRA layer wraps is left alone.

    Args:
        module: whose plain convolutions read channels_last pictures, all of them.
        device: of the pictures; weights elsewhere are left alone.
        dtype: that is computed in; weights of another one are converted in each call, so they are left alone too.
        counters: where what was laid is counted, and each call that had to leave some, with the reason.
        offloaded: says that weights move between calls, so nothing is laid.
    """
    if all(map(lies_channels_last, _weights(module))):
        return
    with MOVING, torch.inference_mode(False):  # else the parameters would become inference tensors for good
        todo = {id(w): w for w in _weights(module) if w.dtype == dtype and w.device == device}
        found = [w for w in todo.values() if not lies_channels_last(w)]
        for reason in _lay(module, found, counters, offloaded):
            counters.event(f"{LEFT}: {reason}")


def put_back(module: nn.Module) -> None:
    """Let the weights that `lay` has laid lie as they did before, but for those that somebody else relaid since.

    Not while a graph is being captured: it would hold the copies, and compute them when it is replayed.
    """
    if module not in _LAID or _capturing(_LAID.get(module, ())):
        return
    with MOVING:
        weights = list(_LAID.get(module, ()))
        held = [w.data for w in weights]
        unpack(weights)
        _settle(held)
        _LAID.pop(module, None)


def _lay(module: nn.Module, weights: list[torch.Tensor], counters: Counters, offloaded: bool) -> Iterable[str]:
    """Lay these; why some could not be, if so."""
    if offloaded and weights:
        return ("weights move between calls (offload)",)
    if _capturing(weights):
        return ("the caller is capturing a graph",)
    places = Counter(p.data_ptr() for p in module.parameters())
    made: dict[torch.Tensor, torch.Tensor] = {}
    reasons: dict[str, None] = {}  # a set in order
    for w in weights:
        copy = _copied(w, shared=places[w.data_ptr()] > 1)
        if isinstance(copy, str):
            reasons[copy] = None
        else:
            made[w] = copy
    _settle(made.values())
    for w, copy in made.items():
        w.data = copy
        HOMES[w] = Home(storage_of(w), relaid=True)
        _LAID.setdefault(module, WeakIdKeyDictionary())[w] = True
        counters.event(LAID)
    return reasons


def _copied(w: torch.Tensor, *, shared: bool) -> torch.Tensor | str:
    """The weight in channels_last, or why it cannot be had."""
    if w.is_inference():
        return "weights loaded under inference_mode"
    if shared or not sole_owner(w) or _held_by_others(w):
        return "a weight shares its storage with another tensor"
    try:
        return w.detach().contiguous(memory_format=torch.channels_last)
    except torch.OutOfMemoryError:
        return "out of memory"


def _held_by_others(w: torch.Tensor) -> bool:
    """Whether another tensor has the storage, say of a `state_dict()` that somebody keeps: its edits have to reach the
    weight. What safetensors has just read shows one user too many, on a CPU, where nothing is laid."""
    return _users(w) > _users(torch.empty(1))


def _users(t: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(t.untyped_storage()._cdata))


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Of all convolutions but those inside a LoRA layer."""
    found, stack = [], [module]
    while stack:
        for child in stack.pop().__dict__["_modules"].values():
            if type(child) is nn.Conv2d:
                found.append(child.__dict__["_parameters"]["weight"])
            elif child is not None and child.__dict__["_modules"] and not from_peft(child):
                stack.append(child)
    return found


def _capturing(weights: Iterable[torch.Tensor]) -> bool:
    return any(w.is_cuda for w in weights) and torch.cuda.is_current_stream_capturing()


def _settle(copies: Iterable[torch.Tensor]) -> None:
    """Wait until copies are made, before another stream may read them or take the memory of what was copied."""
    for device in {copy.device for copy in copies if copy.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
