"""The products of the models: a layer's or a packed group's, on dense activations or on rows in e4m3, with LoRA.

Layers are read as they are at each call. What LoRA adds goes into the product of the layers it wraps as a low-rank term
(see `fusedit.runtime.terms`), or is added behind it; a layer that has to be called itself (see
`fusedit.runtime.branches`) is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusedit import ops
from fusedit.float8.linear import Float8Linear
from fusedit.float8.products import quantise, scaled
from fusedit.float8.rows import Activation, Rows
from fusedit.runtime.branches import Branch, Split, split, split_for_packing
from fusedit.runtime.linear import PackedLinear, Whole
from fusedit.runtime.product import multiply, rows
from fusedit.runtime.terms import Term, Terms

Tensor = torch.Tensor
Low = tuple[Tensor, Tensor, int]
"""t, up and part, as the ops on products take them."""


def takes_rows(layers: Iterable[Any], terms: Terms) -> bool:
    """Whether all of these layers read activations in e4m3 and nothing else, so that a norm should give them rows."""
    parts = []
    for layer in layers:
        part = split_for_packing(layer)
        if part is None or type(part.base) is not Float8Linear or not part.base.activations:
            return False
        parts.append(part)
    return not any(part.branches for part in parts) or not terms.refusal(parts)


def linear(layer: Any, x: Activation, out: Tensor | None = None, terms: Terms | None = None) -> Tensor:
    """`layer(x)` for whatever the layer is, x [B, S, K] -> [B, S, N], optionally into `out` with dense columns.

    Rows are given only to layers of which `takes_rows` was true. Without `terms`, what LoRA adds is added behind.
    """
    found = split_for_packing(layer)
    if found is None:
        return _into(layer(x), out)
    base: Any = found.base
    codes = type(base) is Float8Linear and (base.activations or isinstance(x, Rows))
    if not codes and type(base) is not torch.nn.Linear:  # which adds itself what was fused into it
        return add(_into(base(x), out), x, _own(layer))
    dtype = base.compute_dtype if isinstance(x, Rows) else x.dtype
    read = quantise(x) if codes and isinstance(x, Tensor) else x
    term = None if terms is None else terms.of([layer], [found], dtype)
    low = None if term is None else low_of(read, term)
    if isinstance(read, Rows):
        y = scaled(read, base.weight, base.weight_scale, base.bias, dtype, out, low)
    else:
        y = dense(read, base.weight, base.bias, out, low)
    return y if low is not None else add(y, x, found.branches)


def packed(
    group: PackedLinear, x: Activation, out: Tensor, *, offloaded: bool = False, terms: Terms | None = None
) -> Tensor:
    """All layers of the group on x [B, S, K], into `out` [B, S, N1 + N2 + ...]."""
    parts = group.parts()
    whole = group.whole(parts, offloaded=offloaded)
    if whole is None:
        return separate(group.layers(), x, out, terms)
    term = None if terms is None else terms.of(group.layers(), parts, out.dtype)
    return times(x, whole, out, parts, term)


def times(x: Activation, whole: Whole, out: Tensor, parts: Sequence[Split | None], term: Term | None) -> Tensor:
    """x through a packed weight, into `out`, and what LoRA adds to each part: as a term, or behind it."""
    read = quantise(x) if whole.scale is not None and isinstance(x, Tensor) else x
    low = None if term is None else low_of(read, term)
    if isinstance(read, Rows):
        assert whole.scale is not None
        y = scaled(read, whole.weight, whole.scale, whole.bias, out.dtype, out, low)
    else:
        y = dense(read, whole.weight, whole.bias, out, low)
    return y if low is not None else add_to_columns(y, x, parts)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, low: Low | None) -> Tensor:
    """x [B, S, K] through weight [N, K], with a low-rank term where there is one."""
    if low is None:
        return multiply(x, weight, bias, out)
    made: Tensor = ops.linear_low_rank.direct(x, weight, bias, *low, out=out)
    return made


def low_of(x: Activation, term: Term) -> Low:
    """The first half of a low-rank term; of rows without their scales, which the product applies."""
    if isinstance(x, Rows):
        dtype = str(term.up.dtype).removeprefix("torch.")
        return ops.scaled_low_rank.direct(x.codes, term.down, term.scale, dtype), term.up, term.part
    return ops.low_rank.direct(x, term.down, term.scale), term.up, term.part


def separate(layers: Sequence[Any], x: Activation, out: Tensor, terms: Terms | None = None) -> Tensor:
    """The same layer by layer, whatever they are."""
    for layer, part in zip(layers, torch.split(out, [len(layer.weight) for layer in layers], dim=-1), strict=True):
        linear(layer, x, part, terms)
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
        given = x.dense(down.dtype) if isinstance(x, Rows) else x.to(down.dtype)
        t = multiply(given, down, None)
        matrix = rows(y)
        if matrix is not None and y.dtype is t.dtype:
            matrix.addmm_(t.view(-1, t.shape[-1]), up.t(), alpha=scale)
        else:
            y += multiply(t, up, None).mul_(scale)
    return y


def _own(layer: Any) -> Sequence[Branch]:
    found = split(layer)
    return () if found is None else found.branches


def _into(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)
