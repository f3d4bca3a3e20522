"""What stands as `unmerge` on a LoRA layer that is merged: how the layer becomes again what it was.

peft's own takes away what was added, which rounds. Every way of unfusing calls `unmerge`: that of the pipeline, of the
model, and a forward with the LoRAs switched off. In copies and pickles peft's stands there again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fusedit.cache.checksum import checksums
from fusedit.errors import LoraError


class Original:
    """Stands as `unmerge` on one LoRA layer whose base layer was merged into: the weights of before, on the CPU."""

    __slots__ = ("__weakref__", "_layer", "_merged", "tensors")

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)  # or the copies would wait for a collection of cycles once it is unloaded
        self.tensors = copied(layer)
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
        self._merged = checksums(list(weights_of(layer).values()))

    def merge(self, adapter_names: list[str]) -> None:
        layer: Any = self._layer()
        layer.merge(adapter_names=adapter_names)

    def __call__(self) -> None:
        self.restore()

    def restore(self) -> bool:
        """Unmerge; whether that gave the original bits."""
        layer: Any = self._layer()
        del layer.__dict__["unmerge"]
        if self._merged != checksums(list(weights_of(layer).values())):
            warnings.warn(
                "weights were edited or converted while a LoRA was fused into them, so it is subtracted again, "
                "which rounds; unfuse before that",
                stacklevel=2,
            )
            layer.unmerge()
            return False
        put_into(layer, self.tensors)
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
            base.branches = {**base.branches, key: [(down, up, float(layer.scaling[name]))]}
            self.keys.append(key)
            layer.merged_adapters.append(name)

    def keep(self) -> None:
        self._layer().__dict__["unmerge"] = self

    def __call__(self) -> None:
        self.restore()

    def restore(self) -> bool:
        """Unmerge; the weights were never touched.

        Raises:
            LoraError: they are stock's for a while, with the branches merged.
        """
        layer: Any = self._layer()
        base = layer.get_base_layer()
        if not hasattr(base, "branches"):
            raise LoraError("a LoRA cannot be unfused while an fp8 plan is paused; leave the paused() block first")
        base.branches = {key: branch for key, branch in base.branches.items() if key not in self.keys}
        self.keys.clear()
        layer.merged_adapters.clear()
        layer.__dict__.pop("unmerge", None)
        return True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        layer: Any = self._layer()
        base = layer.get_base_layer()
        if getattr(base, "original", None) is not None or getattr(base, "elsewhere", None) is not None:
            return getattr, (layer, "unmerge")  # in a copy the base is stock's, with this merged into its weight
        return Aside, (layer, tuple(self.keys))


class Frozen:
    """Stands as `unmerge` on one LoRA layer that was merged before its base layer became float8: it cannot be undone
    there, and stock would fail halfway through the layers."""

    __slots__ = ("__weakref__", "_layer")

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self) -> None:
        layer: Any = self._layer()
        raise LoraError(
            f"LoRA {', '.join(map(repr, layer.merged_adapters))} was fused before the weights became float8; unfuse it "
            "after handle.restore(), or load it unfused"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._layer(), "unmerge")


def weights_of(layer: Any) -> dict[str, torch.Tensor]:
    """What merging may change."""
    base = layer.get_base_layer()
    return {name: t.detach() for name in ("weight", "bias") if (t := getattr(base, name, None)) is not None}


def copied(layer: Any) -> dict[str, torch.Tensor]:
    return {name: t.to("cpu", copy=True) for name, t in weights_of(layer).items()}


def put_into(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    """In place: the weights may lie packed with others."""
    with torch.no_grad():
        for name, t in weights_of(layer).items():
            t.copy_(tensors[name])
