"""Whether the LoRAs of an e4m3 transformer do what their matrices say: every layer asked once, after each change.

A new version of a library, or a mistake here, can make a LoRA over quantised weights draw noise without an error. So
whenever other LoRAs are active than before, or the same ones at another scale, each layer that has one is looked at: as
a call of it computes it, and as `runtime/terms.py` has packed it for the fused products. `probing.py` says what must
hold, `probes.py` asks.

Two calls and five or six launches a layer, and two reads of all weights; the host waits once, for all numbers together.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fusedit.errors import LoraError
from fusedit.float8.linear import Float8Linear
from fusedit.lora.probes import Probe, Probes, found
from fusedit.lora.probing import Found
from fusedit.runtime.branches import Split, from_peft, hooked, split_for_packing
from fusedit.runtime.inspect_module import offload_hook
from fusedit.runtime.terms import Terms

_ON_CPU: Final = 1 << 28
"""Weights on a CPU below LoRAs up to which loading waits for the check. With more it is left to the first call, which
may be on a GPU by then: products of codes are slow on a CPU."""
_FINITE: Final = "looked at for NaN and infinity alone (DoRA or a bias: more than two matrices)"
_APART: Final = "LoRAs are not verified: weights and matrices are not on one device (offload)"


class Adapted(NamedTuple):
    """A layer that LoRAs belong to: one of peft's, or an e4m3 one with side branches; `base` is what it wraps."""

    path: str
    layer: Any
    base: Any


class Stamp(NamedTuple):
    """Which LoRAs are active, where, and how strongly.

    Attributes:
        facts: equal as long as nothing changed.
        matrices: whose identities are among the facts; while they live, no other has them.
    """

    facts: Hashable
    matrices: tuple[weakref.ref[Tensor], ...]

    def same(self, other: Stamp) -> bool:
        return self.facts == other.facts and all(ref() is not None for ref in self.matrices)


@dataclass
class _Verified:
    """What was found under this stamp: layers and shares of terms that were compared, and how far the worst was off."""

    stamp: Stamp
    layers: int
    skipped: Counter[str]
    packed: int = 0
    worst: float = 0.0

    def words(self) -> list[str]:
        told = [f"{count} layers {why}" for why, count in self.skipped.items()]
        if self.layers:
            packed = f", {self.packed} of them packed for fused products too" if self.packed else ""
            words = f"LoRAs verified on {self.layers} layers{packed}"
            told.insert(0, f"{words}, largest deviation {self.worst:.2g} of what rounding may do")
        return ["; ".join(told)] if told else []


_VERIFIED: Final[weakref.WeakKeyDictionary[nn.Module, _Verified]] = weakref.WeakKeyDictionary()
_SKIPPED: Final[weakref.WeakKeyDictionary[nn.Module, str]] = weakref.WeakKeyDictionary()


def verify_loaded(module: nn.Module) -> None:
    """When LoRAs were just loaded or switched here: at once, where that is quick; else the first call does it.

    Raises:
        LoraError: a layer does something else.
    """
    layers = adapted(module)
    if _held_back(module, layers):
        return
    verify(module, layers, stamp_of(layers), None, None)


def verify(
    module: nn.Module, layers: Sequence[Adapted], stamp: Stamp, terms: Terms | None, device: torch.device | None
) -> bool:
    """Look at every layer, unless that was done under this stamp, and at the terms that a call used.

    Args:
        layers, stamp: what is there at the moment.
        terms: of the model that was called, or None.
        device: where it was called, or None.

    Returns:
        Whether that could be done; else `notes` says why not.

    Raises:
        LoraError: a layer does something else.
    """
    _SKIPPED.pop(module, None)
    before = _VERIFIED.get(module)
    known = before is not None and before.stamp.same(stamp)
    if not any(isinstance(each.base, Float8Linear) for each in layers):
        return True  # nothing quantised, as without a plan or while it is paused
    parts = [split_for_packing(each.layer) for each in layers]
    devices = {t.device for each in zip(layers, parts, strict=True) for t in _tensors(*each)}
    devices |= set() if device is None else {device}
    if len(devices) > 1 or torch.device("meta") in devices:
        _SKIPPED[module] = _APART
        return False
    skipped: Counter[str] = Counter()
    try:
        with torch.no_grad(), torch.autocast(next(iter(devices)).type, enabled=False):
            probes = Probes(next(iter(devices)))
            if not known:
                _ask_layers(probes, layers, parts, skipped)
            count = len(probes.asked)
            if terms is not None:
                _ask_packed(probes, layers, terms)
            results = found(probes) if probes.asked else []
    except torch.OutOfMemoryError:
        _SKIPPED[module] = "LoRAs are not verified: out of memory"
        return False
    for probe, result in zip(probes.asked, results, strict=True):
        _judge(probe, result)
    if before is None or not known:
        before = _VERIFIED[module] = _Verified(stamp, count - skipped[_FINITE], +skipped)
    before.packed = max(before.packed, len({probe.path for probe in probes.asked[count:]}))
    before.worst = max(before.worst, *(result.added for result in results), 0.0)
    return True


def adapted(module: nn.Module) -> list[Adapted]:
    """Every layer of the module that LoRAs belong to, active or not."""
    made, stack = [], [("", module)]
    while stack:
        path, child = stack.pop()
        space = child.__dict__
        inner = space["_modules"]
        base = inner.get("base_layer") if from_peft(child) else child
        if base is not child and base is not None:
            made.append(Adapted(path, child, base))
        elif isinstance(child, Float8Linear) and child.branches:
            made.append(Adapted(path, child, child))
        else:
            prefix = f"{path}." if path else ""
            stack += [(prefix + key, below) for key, below in reversed(inner.items()) if below is not None]
    return made


def stamp_of(layers: Sequence[Adapted]) -> Stamp:
    """Moving weights changes no stamp, nor does scaling for one call: that is undone but for the last bit."""
    facts: list[Hashable] = []
    matrices: list[weakref.ref[Tensor]] = []
    for path, layer, base in layers:
        space = layer.__dict__
        if layer is not base and not space.get("_disable_adapters"):
            scaling, parts = space.get("scaling", {}), space["_modules"]
            own = [(name, format(scaling.get(name, 0.0), ".7g")) for name in layer.active_adapters]
            halves = [
                half._parameters.get("weight")
                for kind in ("lora_A", "lora_B")
                for name, _ in own
                if (half := getattr(parts.get(kind), "_modules", {}).get(name)) is not None
            ]
            seen = [t for t in halves if t is not None]
            matrices += map(weakref.ref, seen)
            versions = tuple((id(t), -1 if t.is_inference() else t._version) for t in seen)
            facts.append((path, id(layer), tuple(own), tuple(layer.merged_adapters), versions))
        branches = base.__dict__.get("branches")
        if branches:
            pairs = ((key, len(down), scale) for key, own in branches.items() for down, _, scale in own)
            facts.append((path, id(branches), tuple(pairs)))
    return Stamp(tuple(facts), tuple(matrices))


def notes(module: nn.Module) -> list[str]:
    """What a report should say: that the check ran and what it found, or why it did not."""
    layers = adapted(module)
    if not any(isinstance(each.base, Float8Linear) for each in layers):
        return []
    skipped, verified = _SKIPPED.get(module), _VERIFIED.get(module)
    if skipped is not None:
        return [skipped]
    if verified is not None and verified.stamp.same(stamp_of(layers)):
        return verified.words()
    return ["LoRAs are verified in the next call"]


# -- inside ----------------------------------------------------------------------------------------------------------


def _held_back(module: nn.Module, layers: Sequence[Adapted]) -> bool:
    if offload_hook(module):
        return True
    return sum(int(p.numel()) for each in layers for p in each.base.parameters() if p.is_cpu) > _ON_CPU


def _tensors(each: Adapted, parts: Split | None) -> Iterator[Tensor]:
    yield each.base.weight
    for branch in () if parts is None else parts.branches:
        yield branch.down
        yield branch.up


def _ask_layers(
    probes: Probes, layers: Sequence[Adapted], parts: Sequence[Split | None], skipped: Counter[str]
) -> None:
    for (path, layer, base), part in zip(layers, parts, strict=True):
        names = _names(layer, base)
        if not names:
            continue
        plain = part is not None and part.base is base
        reason = _not_linear(base) or ("" if plain and not hooked(base.__dict__) else _why_not(layer, base))
        if reason:
            skipped[f"not looked at ({reason})"] += 1
        elif part is None or not plain:
            skipped[_FINITE] += 1
            probes.finite(path, names, layer, base)
        else:
            probes.layer(path, names, layer, base, part.branches)


def _names(layer: Any, base: Any) -> list[str]:
    """The LoRAs that add something to this layer beside its weights."""
    active: list[str] = []
    if layer is not base and not layer.disable_adapters and not layer.merged:
        scaling = layer.__dict__.get("scaling", {})
        active = [name for name in layer.active_adapters if scaling.get(name, 0) != 0]
    return [*active, *(base.__dict__.get("branches") or ())]


def _not_linear(base: Any) -> str:
    """Why nothing is known of a layer of this kind, or nothing."""
    if isinstance(base, Float8Linear) or (isinstance(base, nn.Linear) and base.weight.dtype.itemsize > 1):
        return ""
    return f"a {type(base).__name__} of {str(base.weight.dtype).removeprefix('torch.')}"


def _why_not(layer: Any, base: Any) -> str:
    """Why a layer cannot be called here, or nothing; one that splits into pairs, with no hook on its base, can."""
    if layer is not base:
        kind = type(layer)
        if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
            return f"a {kind.__name__} layer of peft"
        if layer.disable_adapters and layer.merged:
            return "it is to be unfused"  # which a call of it would do
    if any(hooked(part.__dict__) for part in layer.modules()):
        return "a hook"
    if any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in layer.modules()):
        return "dropout in training"  # and random numbers that are not ours to draw
    return ""


def _ask_packed(probes: Probes, layers: Sequence[Adapted], terms: Terms) -> None:
    paths = {id(each.base): each for each in layers}
    for piece in terms.pieces():
        each = paths.get(id(piece.base))
        if each is not None:
            probes.packed(f"{each.path} (packed)", _names(each.layer, each.base), piece)


def _judge(probe: Probe, result: Found) -> None:
    if result.right:
        return
    if not result.finite:
        what = "gives NaN or infinity"
    elif result.added > 1:
        what = (
            f"adds something else than its matrices say, off by {result.share:.0%} of that and by {result.added:.3g} "
            "times what rounding explains"
        )
    elif result.below > 1:
        what = f"stands over a product with e4m3 weights that is itself wrong, by {result.below:.3g} times what may be"
    else:
        what = f"stands over e4m3 weights that are not those from before, by {result.weights:.3g} times what may be"
    names = ", ".join(map(repr, probe.names))
    here = ", ".join(f"{name} {version(name)}" for name in ("peft", "diffusers", "torch"))
    raise LoraError(
        f"LoRA {names} at layer {probe.path} {what}; take it out, and try other versions of what computes it ({here})"
    )
