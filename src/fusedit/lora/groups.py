"""The keys of a file, gathered by layer, and their tensors checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fusedit.errors import LoraError
from fusedit.lora.keys import split
from fusedit.lora.names import flatten

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Group:
    """What a file says about one layer under one name.

    Attributes:
        name: as the file has it, without prefix.
        scopes: what its prefixes said, see `keys.Key`.
        keys: role -> key.
        parts: role -> tensor.
    """

    name: str
    scopes: frozenset[str]
    keys: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)


def gather(tensors: Mapping[str, Tensor]) -> tuple[list[Group], list[str]]:
    """All groups in the file's order, and the keys whose end is not known.

    Raises:
        LoraError: a tensor holds NaN or infinity or is of a dtype that no weight has, an alpha is not one number, or
            two keys say the same thing of one layer.
    """
    groups: dict[tuple[frozenset[str], str], Group] = {}
    unknown = []
    for key, tensor in tensors.items():
        scopes, name, role = split(key)
        if role is None:
            unknown.append(key)
            continue
        group = groups.setdefault((scopes, flatten(name)), Group(name, scopes))
        if role in group.parts:
            raise LoraError(
                f"keys {group.keys[role]!r} and {key!r} are the same part of one layer; the file holds two LoRAs, so "
                "save them one by one"
            )
        group.keys[role] = key
        group.parts[role] = _number(key, tensor) if role == "alpha" else _floats(key, tensor)
    return list(groups.values()), unknown


def _floats(key: str, tensor: Tensor) -> Tensor:
    if tensor.dtype in _FLOAT8:
        tensor = tensor.to(torch.bfloat16)  # holds every value of both
    if tensor.dtype not in _FLOATS:
        raise LoraError(f"key {key!r} holds {_dtype(tensor)}; give a LoRA in fp32, bf16, fp16 or fp8")
    if tensor.numel():
        ends = torch.stack(torch.aminmax(tensor))  # a tenth of isfinite's time
        if not bool(ends.float().isfinite().all()):  # as fp32, which no model's dtype exceeds
            held = "numbers beyond fp32" if bool(ends.isfinite().all()) else "NaN or infinity"
            raise LoraError(f"key {key!r} holds {held}; the training diverged or the file is damaged")
    return tensor


def _number(key: str, tensor: Tensor) -> Tensor:
    if tensor.numel() != 1 or tensor.dtype.is_complex:
        raise LoraError(f"key {key!r} is no single number but {_dtype(tensor)} of shape {tuple(tensor.shape)}")
    value = tensor.to(torch.float64).reshape(())
    if not bool(torch.isfinite(value)):
        raise LoraError(f"key {key!r} holds {value.item()}; an alpha is a finite number")
    return value


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
