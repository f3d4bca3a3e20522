"""Conversion: the linear layers of a module made e4m3 in place, and given back bit for bit.

One conversion a module, however many pipelines share it. Where the weights go that it replaces is the caller's choice:
`cpu` keeps them beside the layers, `reload` reads them again from where the model came from and checks that they are
the same, `drop` gives them up.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from fusedit.cache.checksum import checksums
from fusedit.errors import ArgumentError, RestoreError
from fusedit.float8 import mark
from fusedit.float8.linear import Float8Linear, quantise_weight
from fusedit.float8.source import Source
from fusedit.progress import Progress
from fusedit.runtime.inspect_module import offload_hook

ORIGINALS: Final = ("cpu", "reload", "drop")
CAPABILITY: Final = (8, 9)
"""The first compute capability with products of e4m3."""
_CONVERSIONS: weakref.WeakKeyDictionary[nn.Module, Conversion] = weakref.WeakKeyDictionary()


@dataclass
class Conversion:
    """What was made of a module.

    Attributes:
        wanted: path -> `fp8` or `weights`, of every layer that was converted.
        originals: one of ORIGINALS, or `checkpoint` where the weights were e4m3 when they were loaded.
        source: where the originals are read from again, for `reload`.
        sums: of each original weight, to tell whether it came back the same.
    """

    wanted: Mapping[str, str]
    originals: str
    source: Source | None = None
    sums: dict[str, int] = field(default_factory=dict)

    @property
    def restorable(self) -> bool:
        return self.originals in ("cpu", "reload")


def conversion_of(module: nn.Module) -> Conversion | None:
    """The conversion of this module, or None for one whose layers are stock's."""
    return _CONVERSIONS.get(module)


def mark_loaded(module: nn.Module, wanted: Mapping[str, str]) -> None:
    """Say that this module was loaded in e4m3."""
    _CONVERSIONS[module] = Conversion(wanted, "checkpoint")
    mark.put(module, wanted)


def device_refusal(capability: tuple[int, int] | None) -> str | None:
    """Why a GPU of this compute capability has no products in e4m3, or None; on a CPU (None) they are emulated."""
    if capability is None or capability >= CAPABILITY:
        return None
    return (
        f"compute capability {capability[0]}.{capability[1]} has no products in e4m3 (they need 8.9: Ada, Hopper and "
        "newer); the weights stay in the model's dtype and the exact rewrites run"
    )


def refusal(module: nn.Module) -> str | None:
    """Why the layers of this module cannot be converted where they are, or None."""
    parameter = next(module.parameters())
    capability = torch.cuda.get_device_capability(parameter.device) if parameter.is_cuda else None
    reason = device_refusal(capability)
    if reason is not None:
        return reason
    if torch.version.hip is not None and parameter.is_cuda:
        return "products in e4m3 are not supported on ROCm; the weights stay in the model's dtype"
    if parameter.dtype == torch.float64:
        return "float64 weights are not converted"
    if any(p.is_meta for p in module.parameters()):
        return "weights are moved layer by layer (sequential offload); accelerate the pipeline before enabling it"
    if any(p.is_inference() for p in module.parameters()):
        return "weights loaded under inference_mode cannot be converted"
    if offload_hook(module) and _streamed(module):
        return "group offload with streams holds copies of the weights; accelerate the pipeline before enabling it"
    return None


def _streamed(module: nn.Module) -> bool:
    for child in module.modules():
        registry: Any = child.__dict__.get("_diffusers_hook")
        for hook in getattr(registry, "hooks", {}).values():
            if getattr(getattr(hook, "group", None), "cpu_param_dict", None):
                return True
    return False


def layers_of(module: nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    """Path and layer of every layer that is e4m3 now; paths are stock's, whatever LoRA layers stand around them."""
    for path, layer in module.named_modules():
        if isinstance(layer, Float8Linear):
            yield path.replace(".base_layer", ""), layer


def convert(
    module: nn.Module,
    wanted: Mapping[str, str],
    originals: str,
    *,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Make the layers of `wanted` e4m3, in place.

    Args:
        wanted: path -> `fp8` (activations too) or `weights`.
        originals: one of ORIGINALS.
        device: where weights are quantised; None: where they lie.
        progress: told of every layer.

    Raises:
        ArgumentError: `reload`, and the module does not say where it was loaded from.
        DeviceMemoryError: there is no room for the temporaries of the largest layer; nothing was changed.
    """
    source = Source.of(module) if originals == "reload" else None
    layers: dict[str, nn.Linear] = {}
    for path, layer in module.named_modules():
        plain = path.replace(".base_layer", "")
        if type(layer) is nn.Linear and plain in wanted and ".lora_" not in path:
            layers[plain] = layer
    if layers:
        largest = max(layers.values(), key=lambda layer: layer.weight.numel()).weight
        quantise_weight(largest if device is None else largest.to(device))  # room for all the others
    made = Conversion(dict(wanted), originals, source)
    progress = progress or Progress()
    progress.begin("quantising", len(layers))
    with torch.no_grad(), torch.inference_mode(False):
        if source is not None:
            made.sums = {path: checksums([layer.weight])[0] for path, layer in layers.items()}
        for path, layer in layers.items():
            progress.picture(path)
            Float8Linear.convert(layer, activations=wanted[path] == "fp8", keep=originals == "cpu", device=device)
            progress.finish_picture()
    _CONVERSIONS[module] = made
    mark.put(module, made.wanted)
    return made


def why_not_restorable(module: nn.Module) -> str | None:
    """Why the originals of this module cannot be given back, or None."""
    made = conversion_of(module)
    if made is None or made.restorable:
        return None
    if made.originals == "checkpoint":
        return "its weights were e4m3 when they were loaded; load the unquantised model for them"
    return "its originals were dropped (originals='drop'); load the model again for them"


def restore(module: nn.Module) -> None:
    """Give every converted layer its original weight again.

    Raises:
        RestoreError: the originals are gone, or what was read again is not the same; nothing was changed.
    """
    made = conversion_of(module)
    if made is None:
        return
    reason = why_not_restorable(module)
    if reason is not None:
        raise RestoreError(f"the weights of {type(module).__name__} cannot be given back: {reason}")
    layers = dict(layers_of(module))
    weights = {path: layer.original for path, layer in layers.items()}
    if made.source is not None:
        lost = {path: made.source.weight(path) for path, weight in weights.items() if weight is None}
        _check(type(module).__name__, made, lost)
        weights |= lost
    with torch.no_grad(), torch.inference_mode(False):
        for path, layer in layers.items():
            weight = weights[path]
            # Codes that were loaded into the layer after its conversion have no other original.
            layer.revert(layer.dequantised(layer.compute_dtype) if weight is None else weight)
    del _CONVERSIONS[module]
    mark.take(module)


def _check(name: str, made: Conversion, weights: Mapping[str, torch.Tensor | None]) -> None:
    for path, weight in weights.items():
        if weight is None or checksums([weight])[0] != made.sums[path]:
            raise RestoreError(
                f"the weights of {name} cannot be given back: {path}.weight of {made.source} is not what was "
                "converted; put the former files there again"
            )


def summary(module: nn.Module) -> list[str]:
    """What a report should say of the conversion."""
    made = conversion_of(module)
    if made is None:
        return []
    count = Counter(made.wanted.values())
    size = sum(layer.weight.numel() for _, layer in layers_of(module))
    words = f"{count['fp8']} linear layers in e4m3, {count['weights']} more with e4m3 weights alone: {size:,} weights"
    kept = sum(o.nbytes for _, layer in layers_of(module) if (o := layer.original) is not None)
    where = {
        "cpu": f"the originals lie on the CPU ({kept / 2**30:.2f} GiB), restore() gives them back bit for bit",
        "reload": f"restore() reads the originals again from {made.source}",
    }.get(made.originals, f"restore() will raise: {why_not_restorable(module)}")
    return [words, where]


def check_originals(value: object) -> str:
    """`value`, which must be one of ORIGINALS."""
    if value not in ORIGINALS:
        raise ArgumentError(f"originals is {value!r}; give one of {', '.join(ORIGINALS)}")
    return str(value)
