"""Weights of linear layers that read the same input, packed into one.

A packed group is one storage of which the stock parameters are views, so packing costs no memory. `.to()`, deepcopy,
`load_state_dict(assign=True)` and LoRA merging break the views; each call compares addresses and packs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedit.runtime import former
from fusedit.runtime.branches import Split, split_for_packing
from fusedit.runtime.counters import Counters
from fusedit.runtime.homes import HOMES, MOVING, Home, is_home, sole_owner, storage_of, unpack


class Whole(NamedTuple):
    """A packed weight [N, K] with its bias [N], and the scale [N] of its codes where it is e4m3."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None


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

    def parts(self) -> list[Split | None]:
        """The layers as they are at the moment, each with what LoRA adds to it."""
        return [split_for_packing(layer) for layer in self.layers()]

    def whole(self, parts: Sequence[Split | None], *, offloaded: bool = False) -> Whole | None:
        """The packed weights of these parts, or None where the layers have to run one by one; counts which it was.

        Args:
            offloaded: weights move between calls, so that they are never packed.
        """
        reason = self._why_separate(parts, offloaded) if self.enabled else "off"
        if reason is None:
            self.counters.ran(self.rewrite)
            return Whole(*(None if group is None else _whole(group) for group in _groups(parts)))  # type: ignore[arg-type]
        if self.enabled:
            self.counters.fell_back(self.rewrite, reason)
        return None

    def _why_separate(self, parts: Sequence[Split | None], offloaded: bool) -> str | None:
        for name, found in zip(self.names, parts, strict=True):
            layer: Any = getattr(self.parent, name) if found is None else found.base
            if found is None or (type(layer) is not nn.Linear and scale_of(layer) is None):
                return f"{name} is a {type(layer).__module__.partition('.')[0]} {type(layer).__name__} layer"
        weights, biases, scales = _columns(parts)
        if self._packed is not None and self._packed == _stamp(weights, biases, scales):
            return None
        if len({bias is None for bias in biases}) > 1:
            return "some layers have a bias and some have none"
        if len({(w.dtype, w.device, w.shape[1:]) for w in weights}) > 1 or len({s is None for s in scales}) > 1:
            return "layers differ in dtype, device or input width"
        for name, weight, bias, scale in zip(self.names, weights, biases, scales, strict=True):
            dtype = weight.dtype if scale is None else biases[0].dtype if biases[0] is not None else None
            if bias is not None and (bias.dtype, bias.device, bias.shape) != (dtype, weight.device, weight.shape[:1]):
                return f"the bias of {name} differs from its weight in dtype, device or width"
        with MOVING:
            return self._pack_together(weights, biases, scales, offloaded)

    def _pack_together(
        self,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        scales: list[torch.Tensor | None],
        offloaded: bool,
    ) -> str | None:
        """Give the parts one storage, unless they have one already; why that is not possible, if so."""
        groups = [weights, *([t for t in group if t is not None] for group in (biases, scales) if group[0] is not None)]
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
        self._packed = _stamp(weights, biases, scales)
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
                if layer is not None:
                    yield from layer.parameters(recurse=False)
                    yield from layer.buffers(recurse=False)


def _base(layer: Any) -> nn.Linear | None:
    base = getattr(layer, "base_layer", layer)
    return base if isinstance(base, nn.Linear) else None


def scale_of(layer: nn.Module) -> torch.Tensor | None:
    """The scale of a layer whose weight is e4m3, else None."""
    return layer._buffers.get("weight_scale")


def converted(layers: Iterable[Any]) -> bool:
    """Whether any of these layers, or of those that LoRA layers among them wrap, has an e4m3 weight."""
    return any(scale_of(getattr(layer, "base_layer", layer)) is not None for layer in layers)


def _columns(parts: Sequence[Split | None]) -> tuple[list[Any], list[Any], list[Any]]:
    """Weights, biases and scales of the wrapped layers."""
    layers: list[Any] = [found.base for found in parts if found is not None]
    return [x.weight for x in layers], [x.bias for x in layers], [scale_of(x) for x in layers]


def _groups(parts: Sequence[Split | None]) -> Iterator[list[torch.Tensor] | None]:
    for group in _columns(parts):
        yield None if group[0] is None else group


def _stamp(*groups: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Equal stamps mean the same parts at the same places in a storage of the same size: still adjacent."""
    parts = [t for group in groups for t in group if t is not None]
    heads = [group[0] for group in groups if group[0] is not None]
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
