"""Conversion: the linear layers of a module made e4m3 in place, and given back bit for bit.

One conversion a module, however many pipelines share it. Where the weights go that it replaces is the caller's choice:
`cpu` keeps them beside the layers, `reload` reads them again from where the model came from and checks that they are
the same, `drop` gives them up. Whatever fails on the way there or back, the module is what it was before.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusedit.cache.checksum import checksums
from fusedit.errors import ArgumentError, DeviceMemoryError, RestoreError
from fusedit.float8 import casting, choice, mark
from fusedit.float8.linear import Float8Linear, quantise_weight
from fusedit.float8.refusals import why_held
from fusedit.float8.rounding import Codes, Rounder
from fusedit.float8.source import Elsewhere, Source
from fusedit.progress import Progress
from fusedit.runtime.install import rebind

ORIGINALS: Final = ("cpu", "reload", "drop")
_CONVERSIONS: weakref.WeakKeyDictionary[nn.Module, Conversion] = weakref.WeakKeyDictionary()
_SUSPENDED: weakref.WeakKeyDictionary[nn.Module, Suspended] = weakref.WeakKeyDictionary()


@dataclass
class Conversion:
    """What was made of a module.

    Attributes:
        wanted: path -> `fp8` or `weights`, of every layer that was converted.
        originals: one of ORIGINALS, or `checkpoint` where the weights were e4m3 when they were loaded.
        source: where the originals are read from again, for `reload`.
        rounded: whether codes were to be rounded for what layers read; of each layer its `choice` says what came of it.
    """

    wanted: Mapping[str, str]
    originals: str
    source: Source | None = None
    rounded: bool = False

    @property
    def restorable(self) -> bool:
        return self.originals in ("cpu", "reload")

    def difference(self, wanted: Mapping[str, str], rounded: bool, originals: str) -> str:
        """The first of `precision`, `rounding` and `originals` that a plan wants otherwise; empty where none is."""
        if dict(self.wanted) != dict(wanted):
            return "precision"
        if self.originals == "checkpoint":
            return ""
        if self.rounded != rounded:
            return "rounding"
        return "" if self.originals == originals else "originals"


@dataclass
class Suspended:
    """A conversion that is undone for a while.

    Attributes:
        made: what is to be made again.
        branches: path -> LoRAs that were fused into the layer, and the weight without them.
        codes: path -> what the weight was in e4m3, on the CPU, and the weight's checksum.
        choices: path -> how these codes were chosen.
        count: how many asked for it and have not taken that back.
    """

    made: Conversion
    branches: dict[str, tuple[Any, torch.Tensor]]
    codes: dict[str, tuple[Codes, int]]
    choices: dict[str, str]
    count: int = 1


def conversion_of(module: nn.Module) -> Conversion | None:
    """The conversion of this module, or None for one whose layers are stock's."""
    made = _CONVERSIONS.get(module)
    if made is None and mark.there(module):  # a copy of a module whose originals are gone
        found = {path: "fp8" if layer.activations else "weights" for path, layer in layers_of(module)}
        if found:
            mark_loaded(module, found)
        else:
            mark.take(module)
        made = _CONVERSIONS.get(module)
    return made


def mark_loaded(module: nn.Module, wanted: Mapping[str, str]) -> None:
    """Say that this module was loaded in e4m3."""
    _remember(module, Conversion(wanted, "checkpoint"))


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Path and layer of every linear layer, whatever LoRA layers stand around it: the path is stock's."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and ".lora_" not in path:
            yield path.replace(".base_layer", ""), layer


def layers_of(module: nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    """Those of them that are e4m3 now."""
    return ((path, layer) for path, layer in linear_layers(module) if isinstance(layer, Float8Linear))


def convert(
    module: nn.Module,
    wanted: Mapping[str, str],
    originals: str,
    *,
    device: torch.device | None = None,
    progress: Progress | None = None,
    undo: bool = True,
    samples: Mapping[str, torch.Tensor] | None = None,
    known: Mapping[str, Codes] | None = None,
    choices: Mapping[str, str] | None = None,
    rounded: bool = False,
) -> Conversion:
    """Make the layers of `wanted` e4m3, in place; all of them or, where anything fails, none.

    Args:
        module: none of these layers is converted yet.
        wanted: path -> `fp8` (activations too) or `weights`.
        originals: one of ORIGINALS.
        device: where weights are quantised; None: where they lie.
        progress: told of every layer.
        samples: path -> [n, K] of what a layer reads, where that is known; see float8/rounding.py.
        known: path -> codes of this very weight, made before.
        choices: path -> how that chooses its codes, see float8/choice.py.
        rounded: whether the plan asked for codes that are rounded for what layers read.
        undo: False lets go of each weight at once under `drop` and `reload`, so that a failure leaves a module that is
            of no use; else all weights are held, on a GPU with no room for that on the CPU, until the last is done.

    Raises:
        ArgumentError: `reload`, and the module does not say where it was loaded from.
        DeviceMemoryError: there is no room; nothing was changed.
    """
    source = Source.of(module) if originals == "reload" else None
    layers = _stock_layers(module, wanted)
    roomy = undo and originals != "cpu" and _room_for(list(layers.values()), 1)
    progress = progress or Progress()
    progress.begin("quantising", len(layers))
    held: dict[str, torch.Tensor] = {}
    failure = None
    try:
        with torch.no_grad(), torch.inference_mode(False):
            if layers:
                largest = max(layers.values(), key=lambda layer: layer.weight.numel()).weight
                quantise_weight(largest if device is None else largest.to(device))  # room for all the others
            rounder = Rounder(samples or {}, layers, device, known, choices)
            for path, layer in layers.items():
                progress.picture(path)
                weight = layer.weight.data
                elsewhere = None if source is None else Elsewhere.of(source, path, weight)
                if undo and originals != "cpu":
                    held[path] = weight if roomy else weight.to("cpu")
                keep = originals == "cpu"
                codes = rounder.codes(path)
                made = Float8Linear.convert(
                    layer, activations=wanted[path] == "fp8", keep=keep, device=device, codes=codes
                )
                made.elsewhere = elsewhere
                made.choice = rounder.choice(path)
                progress.finish_picture()
    except BaseException as error:
        _take_back(layers, held)
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        failure = str(error).split(". ")[0]
    if failure is not None:  # out here, where no traceback holds tensors
        raise DeviceMemoryError(
            f"the weights of {type(module).__name__} cannot be converted ({failure}); nothing was changed, free some "
            "memory or call pipe.enable_model_cpu_offload() first"
        )
    conversion = Conversion(dict(wanted), originals, source, rounded)
    _remember(module, conversion)
    return conversion


def _remember(module: nn.Module, made: Conversion) -> None:
    _CONVERSIONS[module] = made
    mark.put(module, made.wanted)
    casting.refuse(module)


def _stock_layers(module: nn.Module, wanted: Mapping[str, str]) -> dict[str, nn.Linear]:
    """Those of the wanted layers that are stock's, by stock's path."""
    return {path: layer for path, layer in linear_layers(module) if type(layer) is nn.Linear and path in wanted}


def _room_for(layers: Sequence[nn.Linear], itemsize: int) -> bool:
    """Whether so many bytes for each weight of all layers fit beside them for a moment."""
    if not layers or not layers[0].weight.is_cuda:
        return True
    device = layers[0].weight.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached > 1.2 * itemsize * sum(layer.weight.numel() for layer in layers)


def _take_back(layers: Mapping[str, nn.Linear], held: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad(), torch.inference_mode(False):
        for path, layer in layers.items():
            if isinstance(layer, Float8Linear):
                weight = held.get(path, layer.original)
                if weight is not None:
                    layer.revert(weight)


def why_not_restorable(module: nn.Module) -> str | None:
    """Why the originals of this module cannot be given back, or None."""
    made = conversion_of(module)
    if made is None or made.restorable:
        return None
    if made.originals == "checkpoint":
        return "its weights were e4m3 when they were loaded; load the unquantised model for them"
    return "its originals were dropped (originals='drop'); load the model again for them"


def check_restorable(module: nn.Module) -> None:
    """Prove that `restore` would succeed, but for want of memory.

    Raises:
        RestoreError: the originals are gone, have changed in their files, or the weights are held by an offload hook.
    """
    if conversion_of(module) is None:
        return
    reason = why_not_restorable(module) or why_held(module)
    if reason is not None:
        raise RestoreError(
            f"the weights of {type(module).__name__} cannot be given back: {reason}; nothing was changed"
        )
    for _, layer in layers_of(module):
        if layer.original is None and layer.elsewhere is not None:
            layer.elsewhere()


def restore(module: nn.Module) -> None:
    """Give every converted layer its original weight again, in the compute dtype; all of them or none.

    Raises:
        RestoreError: see `check_restorable`.
        DeviceMemoryError: there is no room for them.
    """
    _SUSPENDED.pop(module, None)
    made = conversion_of(module)
    if made is None:
        return
    check_restorable(module)
    done: list[Callable[[], None]] = []
    failure = None
    layers = [layer for _, layer in layers_of(module)]
    roomy = _room_for(layers, 4)
    try:
        with torch.no_grad(), torch.inference_mode(False):
            for layer in layers:
                first = layer.first()
                # Codes that were loaded into the layer after its conversion have no other original.
                weight = layer.dequantised(layer.compute_dtype) if first is None else first
                again = _again(layer, roomy)
                layer.revert(weight)
                done.append(again)
    except BaseException as error:
        for again in reversed(done):
            again()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        failure = str(error).split(". ")[0]
    if failure is not None:
        raise DeviceMemoryError(
            f"there is no room for the original weights of {type(module).__name__} ({failure}); nothing was changed, "
            "call pipe.to('cpu') before restore()"
        )
    del _CONVERSIONS[module]
    mark.take(module)
    casting.allow(module)


def _again(layer: Float8Linear, roomy: bool) -> Callable[[], None]:
    """What makes a layer, which is to be reverted now, what it is."""
    own = {name: getattr(layer, name) for name in ("original", "elsewhere", "branches", "choice")}
    activations, dtype, scale = layer.activations, layer.compute_dtype, layer.weight_scale
    codes = layer.weight.data if roomy else layer.weight.data.to("cpu")

    def again() -> None:
        layer.weight.data = codes.to(layer.weight.device)
        layer.__class__ = Float8Linear
        rebind(layer, nn.Linear)
        layer.become(scale, dtype, activations)
        layer.__dict__.update(own)

    return again


def suspend(module: nn.Module) -> None:
    """Stock's weights until `resume` was called as often.

    Raises:
        RestoreError: see `check_restorable`.
        DeviceMemoryError: there is no room for them.
    """
    waiting, made = _SUSPENDED.get(module), conversion_of(module)
    if waiting is not None:
        waiting.count += 1
    elif made is not None:
        check_restorable(module)
        branches, codes, choices = {}, {}, {}
        for path, layer in layers_of(module):
            choices[path] = layer.choice
            first = layer.first() if layer.branches else None
            if first is not None:
                branches[path] = (layer.branches, first)
            with torch.inference_mode(False):  # what is made in that mode cannot be written later
                codes[path] = layer.weight.data.to("cpu", copy=True), layer.weight_scale.to("cpu", copy=True)
        restore(module)
        stock = _stock_layers(module, made.wanted)
        sums = _sums({path: branches[path][1] if path in branches else stock[path].weight for path in stock})
        _SUSPENDED[module] = Suspended(made, branches, {path: (codes[path], sums[path]) for path in stock}, choices)


def resume(module: nn.Module) -> None:
    """Take one `suspend` back; the last one converts again what the layers hold by now. Nothing, if it was restored.

    Raises:
        DeviceMemoryError: there is no room for that; the weights are stock's.
    """
    waiting = _SUSPENDED.get(module)
    if waiting is None:
        return
    waiting.count -= 1
    if waiting.count:
        return
    del _SUSPENDED[module]
    layers = _stock_layers(module, waiting.made.wanted)
    for path, (_, weight) in waiting.branches.items():
        if path in layers:
            layers[path].weight.data = weight.to(layers[path].weight)
    sums = _sums({path: layer.weight for path, layer in layers.items() if path in waiting.codes})
    known = {path: waiting.codes[path][0] for path, seen in sums.items() if seen == waiting.codes[path][1]}
    changed = choice.nearest("their weights were changed in a pause")
    # Without a choice nearest codes were asked for, and all have these.
    choices = {path: words if path in known else words and changed for path, words in waiting.choices.items()}
    made = waiting.made
    convert(module, made.wanted, made.originals, known=known, choices=choices, rounded=made.rounded)
    for path, layer in layers_of(module):
        if path in waiting.branches:
            layer.branches = waiting.branches[path][0]


def _sums(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Path -> checksum of each weight."""
    return {path: checksums([weight.detach()])[0] for path, weight in weights.items()}


def suspended(module: nn.Module) -> Conversion | None:
    """What will be made again of a module that has stock's weights for a while only, or None."""
    waiting = _SUSPENDED.get(module)
    return None if waiting is None else waiting.made


def copied_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a copy of this module gets: without the mark where its layers are stock's."""
    made = conversion_of(module)
    if made is None or not all(layer.original is not None or layer.elsewhere for _, layer in layers_of(module)):
        return state
    return mark.without(state)


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
    return [words, where, *choice.sentences(choices_of(module))]


def choices_of(module: nn.Module) -> list[str]:
    """How the codes of its converted layers were chosen, by the layer."""
    return [layer.choice for _, layer in layers_of(module)]


def check_originals(value: object) -> str:
    """`value`, which must be one of ORIGINALS."""
    if value not in ORIGINALS:
        raise ArgumentError(f"originals is {value!r}; give one of {', '.join(ORIGINALS)}")
    return str(value)
