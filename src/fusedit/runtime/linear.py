"""Products with the stock modules' weights: plain, into a slice of a larger buffer, and several packed into one.

A packed group is one storage of which the stock parameters are views, so packing costs no memory. `.to()`, deepcopy,
`load_state_dict(assign=True)` and LoRA merging break the views; each call compares addresses and packs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedit.runtime import former
from fusedit.runtime.counters import Counters
from fusedit.runtime.homes import HOMES, MOVING, Home, is_home, sole_owner, storage_of, unpack
from fusedit.runtime.product import multiply


def linear(layer: Any, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`layer(x)` for a plain nn.Linear or whatever replaced it (a LoRA layer), optionally into `out`.

    x is [B, S, K], out [B, S, N] with contiguous columns; a slice of a larger buffer is written without a copy.
    """
    if type(layer) is not nn.Linear:
        y = layer(x)
        return y if out is None else out.copy_(y)
    return multiply(x, layer.weight, layer.bias, out)


class Part:
    """Attribute access to a submodule of a block as it is at the moment, for one that may be replaced."""

    def __init__(self, block: Any, name: str) -> None:
        self._block, self._name = block, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._block, self._name), name)


class PackedLinear:
    """Linear layers that read the same input, run as one product.

    Args:
        parent: whose attributes the layers are; read at each call, since LoRA replaces them.
        names: attribute names, in the order of the packed output.
        rewrite: the rewrite it counts under.
        counters: where it counts.
        enabled: False runs separate products.
    """

    def __init__(
        self, parent: Any, names: Sequence[str], rewrite: str, counters: Counters, *, enabled: bool = True
    ) -> None:
        self.parent, self.names, self.rewrite, self.counters, self.enabled = parent, names, rewrite, counters, enabled
        # Places and storage sizes of parts that were seen adjacent. No tensor is kept: it would hold the packed
        # storage alive on the GPU after the parameters have moved away.
        self._packed: tuple[Any, ...] | None = None
        # The parameters seen in it, held weakly: by the time they are unpacked their layers may have been replaced.
        self._seen: Final = WeakIdKeyDictionary()

    def layers(self) -> list[Any]:
        return [getattr(self.parent, name) for name in self.names]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, offloaded: bool = False) -> torch.Tensor:
        """x [B, S, K] -> [B, S, N1 + N2 + ...]; `offloaded` says that weights move between calls, so never repack."""
        whole = self.whole(offloaded=offloaded)
        return self.separate(x, out) if whole is None else multiply(x, *whole, out)

    def whole(self, *, offloaded: bool = False) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The packed weight and bias, or None where the layers have to run one by one. Counts which it was."""
        layers = self.layers()
        reason = self._why_separate(layers, offloaded) if self.enabled else "off"
        if reason is None:
            self.counters.ran(self.rewrite)
            bias = None if layers[0].bias is None else _whole([layer.bias for layer in layers])
            return _whole([layer.weight for layer in layers]), bias
        if self.enabled:
            self.counters.fell_back(self.rewrite, reason)
        return None

    def separate(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same result layer by layer, whatever the layers are."""
        layers = self.layers()
        widths = [len(layer.weight) for layer in layers]
        y = x.new_empty((*x.shape[:-1], sum(widths))) if out is None else out
        for layer, part in zip(layers, torch.split(y, widths, dim=-1), strict=True):
            part.copy_(linear(layer, x))
        return y

    def _why_separate(self, layers: list[Any], offloaded: bool) -> str | None:
        for name, layer in zip(self.names, layers, strict=True):
            if type(layer) is not nn.Linear:
                return f"{name} is a {type(layer).__module__.partition('.')[0]} {type(layer).__name__} layer"
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        if self._packed is not None and self._packed == _stamp(weights, biases):
            return None
        if len({bias is None for bias in biases}) > 1:
            return "some layers have a bias and some have none"
        if len({(w.dtype, w.device, w.shape[1:]) for w in weights}) > 1:
            return "layers differ in dtype, device or input width"
        for name, weight, bias in zip(self.names, weights, biases, strict=True):
            like = (weight.dtype, weight.device, weight.shape[:1])
            if bias is not None and (bias.dtype, bias.device, bias.shape) != like:
                return f"the bias of {name} differs from its weight in dtype, device or width"
        with MOVING:
            return self._pack_together(weights, biases, offloaded)

    def _pack_together(
        self, weights: list[torch.Tensor], biases: list[torch.Tensor | None], offloaded: bool
    ) -> str | None:
        """Give the parts one storage, unless they have one already; why that is not possible, if so."""
        groups = [weights] + ([[b for b in biases if b is not None]] if biases[0] is not None else [])
        if not all(map(_adjacent, groups)):
            if offloaded:
                return "weights move between calls (offload), so they are not packed"
            parts = [t for group in groups for t in group]
            if any(t.is_inference() for t in parts):
                return "weights loaded under inference_mode cannot be packed"
            if any(t.device.type == "cpu" and t.is_shared() for t in parts):  # type: ignore[no-untyped-call]
                return "weights lie in memory shared between processes"
            if len({t.data_ptr() for t in parts}) < len(parts):
                return "two of the layers share a weight"
            if not all(sole_owner(t) or is_home(t) for t in parts):
                return "a weight shares its storage with another tensor"
            try:
                with torch.inference_mode(False):  # else the parameters would become inference tensors for good
                    packed = [_pack(group) for group in groups]
            except torch.OutOfMemoryError:
                return "out of memory while packing"
            for tensor in parts:
                if not is_home(tensor):
                    former.remember(tensor)
            for group, whole in zip(groups, packed, strict=True):
                for tensor, part in zip(group, torch.split(whole, [t.shape[0] for t in group]), strict=True):
                    tensor.data = part
                    HOMES[tensor] = Home(storage_of(whole))
            self.counters.event("weight groups packed")
        self._packed = _stamp(weights, biases)
        self._seen.update((tensor, True) for group in groups for tensor in group)
        return None

    def unpack(self) -> None:
        """Give each parameter its former or an own storage again; what was never packed keeps the one it came with."""
        self._packed = None
        unpack((*self._seen, *self._within_reach()))
        self._seen.clear()

    def _within_reach(self) -> Iterator[torch.Tensor]:
        """The parameters of the layers as they are now, of those that are there: another group may have packed them."""
        for name in self.names:
            with suppress(AttributeError):
                layer = _base(getattr(self.parent, name))
                yield from () if layer is None else layer.parameters(recurse=False)


def _base(layer: Any) -> nn.Linear | None:
    base = getattr(layer, "base_layer", layer)
    return base if isinstance(base, nn.Linear) else None


def _stamp(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Equal stamps mean the same parts at the same places in a storage of the same size: still adjacent."""
    parts = [t for t in (*weights, *biases) if t is not None]
    heads = [t for t in (weights[0], biases[0]) if t is not None]
    return *((t.data_ptr(), t.shape, t.stride()) for t in parts), *(t.untyped_storage().nbytes() for t in heads)


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors lie one behind the other in one storage."""
    return all(
        a.is_contiguous()
        and b.is_contiguous()
        and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in pairwise(tensors)
    )


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach() for t in tensors])


def _whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The packed tensor that adjacent parts are views of."""
    first = tensors[0].detach()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())
