"""check(): which layers of a LoRA this very module has, and why the others do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fusedit.errors import LoraError
from fusedit.lora.keys import split
from fusedit.lora.layers import LoraFile, LoraLayer
from fusedit.lora.paths import submodule

if TYPE_CHECKING:
    from torch import Tensor, nn

_FAMILIES: Final = {"FluxTransformer2DModel": "flux", "ZImageTransformer2DModel": "z-image"}
_WIDENED: Final = "x_embedder"
"""The one layer that may get more inputs: those of a control image. Elsewhere more inputs do not fit."""
_SHOWN: Final = 3
"""How many missing paths a sentence lists; `missing` has all."""


@dataclass(frozen=True)
class Match:
    """How a LoRA fits one module.

    Attributes:
        paths: the layers and parameters that fit, by module path.
        missing: (path or key, reason) of what does not fit.
        wider: path -> inputs, for layers that fit once the module's layer has so many inputs (a control LoRA's
            x_embedder); they are listed in `missing` too.
    """

    paths: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    wider: Mapping[str, int]

    @property
    def matched(self) -> int:
        return len(self.paths)

    @property
    def total(self) -> int:
        return len(self.paths) + len(self.missing)

    def sentence(self) -> str:
        """`matched 494 of 494 modules`, and what did not match."""
        told = f"matched {self.matched} of {self.total} modules"
        if not self.missing:
            return told
        listed = "; ".join(f"{path}: {reason}" for path, reason in self.missing[:_SHOWN])
        more = len(self.missing) - _SHOWN
        return f"{told}, not {listed}" + (f"; and {more} more" if more > 0 else "")


def check(file: LoraFile, module: nn.Module, part: str = "transformer") -> Match:
    """Compare a LoRA with the module that it is to be loaded into. Changes nothing.

    Args:
        part: `transformer`, `text_encoder` or `text_encoder_2`: which of the file's layers are meant.

    Raises:
        LoraError: the LoRA is of another family than the module.
    """
    if part != "transformer":
        return _match(file.text.get(part, {}), {}, (), module)
    family = _FAMILIES.get(type(module).__name__)
    if family is not None and file.family is not None and family != file.family:
        raise LoraError(
            f"the LoRA is for {file.family} and the transformer is {type(module).__name__}; load one made for {family}"
        )
    return _match(file.layers, file.extra, file.unmatched, module)


def _match(
    layers: Mapping[str, LoraLayer], extra: Mapping[str, Tensor], unmatched: tuple[str, ...], module: nn.Module
) -> Match:
    """All modules that the file names: those with a layer, those with parameters in `extra`, and unknown names."""
    found: dict[str, str | None] = {}
    wider: dict[str, int] = {}
    for path, layer in layers.items():
        shape, inputs = _shape(path, module), layer.down.shape[1]
        found[path] = _misfit(shape, layer, module)
        if path == _WIDENED and shape is not None and layer.up.shape[0] == shape[0] and inputs > shape[1]:
            wider[path] = inputs
    for name, value in extra.items():
        path = name.removesuffix(".diff").rpartition(".")[0]
        reason = _wrong_parameter(name.removesuffix(".diff"), value, module)
        found[path] = found.get(path) or reason
    for key in unmatched:
        found.setdefault(split(key).name, "no layer of FLUX or Z-Image has this name")
    return Match(
        tuple(path for path, reason in found.items() if reason is None),
        tuple((path, reason) for path, reason in found.items() if reason is not None),
        wider,
    )


def _misfit(shape: tuple[int, int] | None, layer: LoraLayer, module: nn.Module) -> str | None:
    """Why the layer cannot be applied to one of this shape; None: it can."""
    if shape is None:
        return f"{type(module).__name__} has no linear layer of this name"
    outputs, inputs = layer.up.shape[0], layer.down.shape[1]
    if (outputs, inputs) != shape:
        return f"the LoRA changes {outputs} x {inputs} weights, the layer has {shape[0]} x {shape[1]}"
    return None


def _shape(path: str, module: nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs) of the linear layer at a path, also below an adapter that wraps it; None: there is none."""
    try:
        found: Any = submodule(module, path)
    except AttributeError:
        return None
    found = getattr(found, "base_layer", found)
    if not (hasattr(found, "out_features") and hasattr(found, "in_features")):
        return None
    return int(found.out_features), int(found.in_features)


def _wrong_parameter(name: str, value: Tensor, module: nn.Module) -> str | None:
    """Why a value cannot be given or added to this parameter; None: it can."""
    path, _, last = name.rpartition(".")
    try:
        found: Any = submodule(module, path)
    except AttributeError:
        return f"{type(module).__name__} has no module of this name"
    found = getattr(found, "base_layer", found)
    held = getattr(found, last, None)
    if held is None and last == "bias" and hasattr(found, "out_features"):
        shape: tuple[int, ...] = (found.out_features,)  # a bias that was left out counts as zero
    elif held is None:
        return f"the module has no {last}"
    else:
        shape = tuple(held.shape)
    if tuple(value.shape) != shape:
        return f"the LoRA has a {last} of shape {tuple(value.shape)}, the module one of {shape}"
    return None
