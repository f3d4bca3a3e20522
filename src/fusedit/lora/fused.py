"""fuse_lora() on an accelerated transformer: what it changes is kept, so that unfusing gives the very bits back.

Stock unfuses by subtracting what it added, which rounds (bf16: up to 0.016 on weights around 1). Here the weights are
copied to the CPU before they are changed and copied back by `unmerge` of each LoRA layer, which is what every way of
unfusing calls: `unfuse_lora()` of pipeline and model, and a forward with the LoRAs switched off. Fused and then
unloaded, a LoRA stays in the weights, as in stock, and the copies are freed with its layers.

Into float8 codes nothing can be merged: what is smaller than a step of the code is lost. There the low-rank matrices
become a branch of the layer itself (`branches`), which stays when the LoRA layer is taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

from fusedit.errors import LoraError
from fusedit.float8.conversion import suspended
from fusedit.lora.adapters import adapters_in, tuner_layers
from fusedit.lora.making import is_float8
from fusedit.lora.unmerging import Aside, Frozen, Original, copied, put_into

NAME: Final = "fuse_lora"


def install(module: nn.Module) -> None:
    """Stand in front of `fuse_lora` of this module, whose weights are converted already, if they are to be. Each call
    is undone by one `uninstall`; what somebody else put there is left alone."""
    found = module.__dict__.get(NAME)
    if isinstance(found, FuseLora):
        found.users += 1
    elif found is None and callable(getattr(type(module), NAME, None)):
        module.__dict__[NAME] = FuseLora(module)
    for _, layer in tuner_layers(module):
        if layer.merged and is_float8(layer.get_base_layer().weight) and "unmerge" not in layer.__dict__:
            layer.__dict__["unmerge"] = Frozen(layer)


def uninstall(module: nn.Module, *, last: bool = False) -> None:
    """Stock again: what is merged stays so, to be unfused by subtraction; side branches become LoRA layers again.

    Args:
        last: nobody is left who installed it, though some have not uninstalled it.
    """
    found = module.__dict__.get(NAME)
    if not isinstance(found, FuseLora):
        return
    found.users -= 1
    if found.users and not last:
        return
    del module.__dict__[NAME]
    for _, layer in tuner_layers(module):
        undo = layer.__dict__.get("unmerge")
        if isinstance(undo, Aside):
            undo()
        elif isinstance(undo, Original | Frozen):
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
            LoraError: a layer with float8 weights, which this LoRA cannot be a side branch of, or weights that are
                float8 again when a pause ends.
        """
        if suspended(self.module):
            raise LoraError("a LoRA cannot be fused while an fp8 plan is paused; leave the paused() block first")
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
        self.tensors = undo.tensors if isinstance(undo, Original) and not self.merged else copied(layer)
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
            put_into(layer, self.tensors)
        layer.merged_adapters[:] = self.merged
        layer.scaling.update(self.scaling)
        if hasattr(layer, "_caches"):
            layer._caches.clear()
            layer._caches.update(self.caches)
        if self.undo is not None and self.merged:
            self.undo.keep()
        else:
            layer.__dict__.pop("unmerge", None)


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
