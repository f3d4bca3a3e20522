"""What tests of the fp8 tier share: the bits of a transformer, its converted layers, a pipeline loaded from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fusedit.float8.conversion import layers_of
from fusedit.float8.linear import Float8Linear

ORIGINALS = ("cpu", "reload", "drop")
each_originals = pytest.mark.parametrize("originals", ORIGINALS)


class Bits(NamedTuple):
    """Everything that conversion may change, of a transformer and its pipeline's other parts."""

    tensors: dict[str, tuple[torch.Tensor, int]]
    """Name -> its value, and the identity of a parameter."""
    kinds: dict[str, type]
    attributes: dict[str, list[str]]
    config: dict[str, Any]

    def differing(self, other: Bits) -> list[str]:
        """Names of what is not the same in both, be it by one bit."""
        found = list(self.tensors.keys() ^ other.tensors.keys())
        for name in self.tensors.keys() & other.tensors.keys():
            (a, i), (b, j) = self.tensors[name], other.tensors[name]
            if i != j or a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                found.append(name)
        found += [part for part in ("kinds", "attributes", "config") if getattr(self, part) != getattr(other, part)]
        return sorted(found)


def bits(pipe: Any) -> Bits:
    module = pipe.transformer
    tensors = {
        name: (t.detach().clone().contiguous(), id(t) if isinstance(t, torch.nn.Parameter) else 0)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    kinds = {path: type(child) for path, child in module.named_modules()}
    own = {"_diffusers_hook", "peft_config", "_hf_peft_config_loaded"}  # stock's, in the first call and with a LoRA
    attributes = {path: sorted(set(vars(child)) - own) for path, child in module.named_modules()}
    return Bits(tensors, kinds, attributes, dict(module.config))


def converted(pipe: Any) -> dict[str, Float8Linear]:
    """Path -> layer, of those that are e4m3."""
    return dict(layers_of(pipe.transformer))


def from_folder(kind: Any, folder: Path, **changes: Any) -> Any:
    """A tiny pipeline whose transformer was loaded from files in `folder`, as `reload` needs it."""
    pipe = kind.pipe(**changes)
    place = folder / "transformer"
    pipe.transformer.save_pretrained(place)
    pipe.transformer = type(pipe.transformer).from_pretrained(place).eval()
    return pipe
