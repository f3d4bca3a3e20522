"""fuse_lora() on an accelerated transformer: what it changes is kept, so that unfusing gives the very bits back.

Stock unfuses by subtracting what it added, which rounds (bf16: up to 0.016 on weights around 1). Here the weights are
copied to the CPU before they are changed and copied back by `unmerge` of each LoRA layer, which is what every way of
unfusing calls: `unfuse_lora()` of pipeline and model, and a forward with the LoRAs switched off. Fused and then
unloaded, a LoRA stays in the weights, as in stock, and the copies are freed with its layers.

Into float8 codes nothing can be merged: what is smaller than a step of the code is lost. There the low-rank matrices
become a branch of the layer itself (`branches`), which stays when the LoRA layer is taken away.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from fusedit.cache.checksum import checksums
from fusedit.errors import LoraError
from fusedit.lora.adapters import adapters_in, tuner_layers
from fusedit.lora.making import is_float8

NAME: Final = "fuse_lora"


def install(module: nn.Module) -> None:
    """Stand in front of `fuse_lora` of this module. Each call is undone by one `uninstall`; others are left alone."""
    found = module.__dict__.get(NAME)
    if isinstance(found, FuseLora):
        found.users += 1
    elif found is None and callable(getattr(type(module), NAME, None)):
        module.__dict__[NAME] = FuseLora(module)


def uninstall(module: nn.Module) -> None:
    """Stock again: what is merged stays so, to be unfused by subtraction; side branches become LoRA layers again."""
    found = module.__dict__.get(NAME)
    if not isinstance(found, FuseLora):
        return
    found.users -= 1
    if found.users:
        return
    del module.__dict__[NAME]
    for _, layer in tuner_layers(module):
        undo = layer.__dict__.get("unmerge")
        if isinstance(undo, Aside):
            undo()
        elif isinstance(undo, Original):
            del layer.__dict__["unmerge"]


def kept_bytes(module: nn.Module) -> int:
    """CPU memory that holds original weights of fused layers."""
    originals = (layer.__dict__.get("unmerge") for _, layer in tuner_layers(module))
    return sum(original.nbytes for original in originals if isinstance(original, Original))


def restorable(layer: Any) -> bool:
    """Whether unmerging this merged LoRA layer gives the original bits back."""
    return isinstance(layer.__dict__.get("unmerge"), Original | Aside)


def unfuse(layer: Any, name: str) -> None:
    """Take one merged adapter of a `restorable` layer out of it; those merged beside it are merged again."""
    undo = layer.__dict__["unmerge"]
    others = [other for other in layer.merged_adapters if other != name]
    exact = undo.restore()
    if others:
        undo.merge(adapter_names=others)
        if exact:
            undo.keep()


class FuseLora:
    """Stands where `fuse_lora` of one module stood, with stock's arguments. Copies and pickles get the stock one."""

    __slots__ = ("module", "users")
    __name__ = NAME

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users = 1

    def __call__(
        self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Merge the LoRAs as stock does; a failure leaves weights and scales as they were.

        Raises:
            LoraError: a layer with float8 weights, which this LoRA cannot be a side branch of.
        """
        changes = list(self._changes(adapter_names))
        try:
            for change in changes:
                change.begin()
            stock: Any = type(self.module)
            stock.fuse_lora(self.module, lora_scale, safe_fusing=safe_fusing, adapter_names=adapter_names)
        except BaseException:
            for change in changes:
                change.take_back()
            raise
        for change in changes:
            change.done()

    def _changes(self, adapter_names: list[str] | None) -> Iterator[_Change]:
        for path, layer in tuner_layers(self.module):
            wanted = layer.active_adapters if adapter_names is None else adapter_names
            here = adapters_in(layer)
            new = [name for name in wanted if name in here and name not in layer.merged_adapters]
            if not new:
                continue
            if is_float8(layer.get_base_layer().weight):
                _check_aside(path, layer, new)
                yield _Change(layer, Aside.of(layer))
            else:
                yield _Change(layer, Original.of(layer))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, NAME)  # in a copy, whose attributes are not there yet, the class's


class _Change:
    """What one fuse_lora() does to one LoRA layer, and all that it takes to undo that."""

    def __init__(self, layer: Any, undo: Original | Aside | None) -> None:
        self.layer = layer
        self.undo = undo
        self.merged = list(layer.merged_adapters)
        self.scaling = dict(layer.scaling)
        self.caches = dict(getattr(layer, "_caches", {}))
        # A fresh Original holds the weights of this moment; beside adapters that were merged before they are others.
        self.tensors = undo.tensors if isinstance(undo, Original) and not self.merged else _copied(layer)
        self.branches = getattr(layer.get_base_layer(), "branches", None)
        self.keys = list(undo.keys) if isinstance(undo, Aside) else []

    def begin(self) -> None:
        if isinstance(self.undo, Aside):
            self.layer.__dict__["merge"] = self.undo.merge

    def done(self) -> None:
        self.layer.__dict__.pop("merge", None)
        if self.undo is not None and self.layer.merged:
            self.undo.keep()

    def take_back(self) -> None:
        layer = self.layer
        layer.__dict__.pop("merge", None)
        if isinstance(self.undo, Aside):
            layer.get_base_layer().branches = self.branches
            self.undo.keys[:] = self.keys
        else:
            _put(layer, self.tensors)
        layer.merged_adapters[:] = self.merged
        layer.scaling.update(self.scaling)
        if hasattr(layer, "_caches"):
            layer._caches.clear()
            layer._caches.update(self.caches)
        if self.undo is not None and self.merged:
            self.undo.keep()
        else:
            layer.__dict__.pop("unmerge", None)


class Original:
    """Stands as `unmerge` on one LoRA layer whose base layer was merged into: the weights of before, on the CPU."""

    __slots__ = ("__weakref__", "_layer", "_merged", "tensors")

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)  # or the copies would wait for a collection of cycles once it is unloaded
        self.tensors = _copied(layer)
        self._merged: tuple[int, ...] = ()

    @classmethod
    def of(cls, layer: Any) -> Original | None:
        """That of this layer, made if nothing is merged yet; None where its original weights are gone."""
        found = layer.__dict__.get("unmerge")
        if isinstance(found, Original):
            return found
        return None if layer.merged else cls(layer)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def keep(self) -> None:
        """The layer holds merged weights from now on, and these are the ones."""
        layer: Any = self._layer()
        layer.__dict__["unmerge"] = self
        self._merged = checksums(list(_weights(layer).values()))

    def merge(self, adapter_names: list[str]) -> None:
        layer: Any = self._layer()
        layer.merge(adapter_names=adapter_names)

    def __call__(self) -> None:
        self.restore()

    def restore(self) -> bool:
        """Unmerge; whether that gave the original bits."""
        layer: Any = self._layer()
        del layer.__dict__["unmerge"]
        if self._merged != checksums(list(_weights(layer).values())):
            warnings.warn(
                "weights were edited or converted while a LoRA was fused into them, so it is subtracted again, "
                "which rounds; unfuse before that",
                stacklevel=2,
            )
            layer.unmerge()
            return False
        _put(layer, self.tensors)
        for name in layer.merged_adapters:
            getattr(layer, "_caches", {}).pop(f"{name}-weight_norm", None)  # DoRA's; peft's own unmerge takes it out
        layer.merged_adapters.clear()
        return True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._layer(), "unmerge")  # in a copy, whose attributes are not there yet, the class's


class Aside:
    """Stands as `unmerge` on one LoRA layer over float8 weights: its adapters are branches of the base layer."""

    __slots__ = ("__weakref__", "_layer", "keys")

    def __init__(self, layer: Any, keys: tuple[str, ...] = ()) -> None:
        self._layer = weakref.ref(layer)
        self.keys = list(keys)

    @classmethod
    def of(cls, layer: Any) -> Aside:
        found = layer.__dict__.get("unmerge")
        return found if isinstance(found, Aside) else cls(layer)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:  # noqa: ARG002
        """What peft's `merge` does, beside the weights instead of into them."""
        layer: Any = self._layer()
        base = layer.get_base_layer()
        for name in layer.active_adapters if adapter_names is None else adapter_names:
            if name not in layer.lora_A or name in layer.merged_adapters:
                continue
            key, n = name, 2
            while key in base.branches:  # of one that was fused and unloaded before
                key, n = f"{name} {n}", n + 1
            down, up = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
            # Another dict, not the same one changed: what is kept between steps knows attributes by identity.
            base.branches = {**base.branches, key: (down, up, float(layer.scaling[name]))}
            self.keys.append(key)
            layer.merged_adapters.append(name)

    def keep(self) -> None:
        self._layer().__dict__["unmerge"] = self

    def __call__(self) -> None:
        self.restore()

    def restore(self) -> bool:
        """Unmerge; the weights were never touched."""
        layer: Any = self._layer()
        base = layer.get_base_layer()
        base.branches = {key: branch for key, branch in base.branches.items() if key not in self.keys}
        self.keys.clear()
        layer.merged_adapters.clear()
        layer.__dict__.pop("unmerge", None)
        return True

    def __reduce__(self) -> tuple[type[Aside], tuple[Any, tuple[str, ...]]]:
        return Aside, (self._layer(), tuple(self.keys))


def _weights(layer: Any) -> dict[str, torch.Tensor]:
    """What merging may change."""
    base = layer.get_base_layer()
    return {name: t.detach() for name in ("weight", "bias") if (t := getattr(base, name, None)) is not None}


def _copied(layer: Any) -> dict[str, torch.Tensor]:
    return {name: t.to("cpu", copy=True) for name, t in _weights(layer).items()}


def _put(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    """In place: the weights may lie packed with others."""
    with torch.no_grad():
        for name, t in _weights(layer).items():
            t.copy_(tensors[name])


def _check_aside(path: str, layer: Any, names: list[str]) -> None:
    """Refuse what cannot be a branch, before anything has changed."""
    if not isinstance(getattr(layer.get_base_layer(), "branches", None), dict):
        raise LoraError(
            f"{path} has float8 weights, into which no LoRA can be merged; leave it unfused, which has the same effect"
        )
    if not isinstance(layer, _lora_linear()):
        raise LoraError(f"{path} has float8 weights and a {type(layer).__name__} adapter; leave it unfused")
    for name in names:
        if name in layer.lora_variant or layer.lora_bias.get(name):
            raise LoraError(
                f"LoRA {name!r} changes {path} by more than two matrices (DoRA or a bias), which cannot be a side "
                "branch of float8 weights; leave it unfused"
            )


def _lora_linear() -> Any:
    from peft.tuners.lora import Linear

    return Linear
