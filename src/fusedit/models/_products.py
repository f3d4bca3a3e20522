"""The products of the models: a layer's or a packed group's, on dense activations or on rows in e4m3, with LoRA.

Layers are read as they are at each call. What LoRA adds is added behind the product of the layers it wraps, so that
they stay packed; a layer that has to be called itself (see `fusedit.runtime.branches`) is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusedit.float8.linear import Float8Linear
from fusedit.float8.products import quantise, scaled
from fusedit.float8.rows import Activation, Rows
from fusedit.runtime.branches import Branch, Split, split
from fusedit.runtime.linear import PackedLinear, Whole
from fusedit.runtime.product import multiply, rows

Tensor = torch.Tensor


def takes_rows(layers: Iterable[Any]) -> bool:
    """Whether all of these layers read activations in e4m3 and nothing else, so that a norm should give them rows."""
    return all(type(layer) is Float8Linear and layer.activations and not layer.branches for layer in layers)


def linear(layer: Any, x: Activation, out: Tensor | None = None) -> Tensor:
    """`layer(x)` for whatever the layer is, x [B, S, K] -> [B, S, N], optionally into `out` with dense columns.

    Rows are given only to layers of which `takes_rows` was true.
    """
    found = split(layer)
    if found is None:
        return _into(layer(x), out)
    base: Any = found.base
    if type(base) is Float8Linear and not base.branches and (base.activations or isinstance(x, Rows)):
        y = _float8(base, x, out)
    elif type(base) is torch.nn.Linear:
        assert isinstance(x, Tensor)
        y = multiply(x, base.weight, base.bias, out)
    else:
        y = _into(base(x), out)
    return add(y, x, found.branches)


def packed(group: PackedLinear, x: Activation, out: Tensor, *, offloaded: bool = False) -> Tensor:
    """All layers of the group on x [B, S, K], into `out` [B, S, N1 + N2 + ...]."""
    parts = group.parts()
    whole = group.whole(parts, offloaded=offloaded)
    if whole is None:
        return separate(group.layers(), x, out)
    return add_to_columns(times(x, whole, out), x, parts)


def times(x: Activation, whole: Whole, out: Tensor) -> Tensor:
    """x through a packed weight, into `out`."""
    if whole.scale is None:
        assert isinstance(x, Tensor)
        return multiply(x, whole.weight, whole.bias, out)
    return scaled(x if isinstance(x, Rows) else quantise(x), whole.weight, whole.scale, whole.bias, out.dtype, out)


def separate(layers: Sequence[Any], x: Activation, out: Tensor) -> Tensor:
    """The same layer by layer, whatever they are."""
    for layer, part in zip(layers, torch.split(out, [len(layer.weight) for layer in layers], dim=-1), strict=True):
        linear(layer, x, out=part)
    return out


def add_to_columns(y: Tensor, x: Activation, parts: Sequence[Split | None]) -> Tensor:
    """What LoRA adds to each part of a packed product y [B, S, N1 + N2 + ...]."""
    found = [part for part in parts if part is not None]
    if any(part.branches for part in found):
        columns = torch.split(y, [len(part.base.weight) for part in found], dim=-1)  # type: ignore[arg-type]
        for part, own in zip(found, columns, strict=True):
            add(own, x, part.branches)
    return y


def add(y: Tensor, x: Activation, branches: Sequence[Branch]) -> Tensor:
    """y + scale * x down^T up^T for each branch, in place."""
    for down, up, scale in branches:
        dense = x.dense(down.dtype) if isinstance(x, Rows) else x.to(down.dtype)
        t = multiply(dense, down, None)
        matrix = rows(y)
        if matrix is not None and y.dtype is t.dtype:
            matrix.addmm_(t.view(-1, t.shape[-1]), up.t(), alpha=scale)
        else:
            y += multiply(t, up, None).mul_(scale)
    return y


def _float8(layer: Float8Linear, x: Activation, out: Tensor | None) -> Tensor:
    dtype = layer.compute_dtype if isinstance(x, Rows) else x.dtype
    return scaled(x if isinstance(x, Rows) else quantise(x), layer.weight, layer.weight_scale, layer.bias, dtype, out)


def _into(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)
