"""Terms: what LoRA adds to layers that read the same input, as the ops on low-rank terms take it.

The small matrices of all layers and adapters lie one below the other (`down`), the large ones in the columns of the
packed product (`up`), and scales in a vector of their own, so that another scale copies nothing else. These are copies,
but where one layer has one adapter; what makes them stale is looked for once a call, before anything is computed: other
matrices, their addresses, versions and scales, those of the codes they are divided by, and in another run of the
pipeline their content, since a write through `.data` shows nowhere else. Buffers are filled again in place, where CUDA
graphs read them.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from fusedit import ops
from fusedit.cache.checksum import checksums
from fusedit.ops._fp8 import E4M3
from fusedit.report import CacheReport
from fusedit.runtime.branches import Branch, Split, split_for_packing
from fusedit.runtime.hoist import RunCache
from fusedit.runtime.linear import scale_of

Tensor = torch.Tensor
Form = Literal["parts", "joint", "beside"]
MOST_RANKS: Final = 256
"""Of one layer: beyond, a term is no longer small beside the product, and two products of the library serve."""
LIFT: Final = 2.0**64
"""Times which matrices are rounded to codes: rows below 2^-91 count as zeros there, and with B as large as A is small
they may be all of a LoRA. fp16 has nothing as small."""
ALIGN: Final = 8
"""Ranks are padded to 16 bytes of half precision."""


class Term(NamedTuple):
    """t = x down^T * scale, then t up^T is added: see ops/_low_rank.py.

    Attributes:
        down: [P R, K]; of layers in e4m3 codes.
        up: [N, R]; of layers in e4m3 divided by the scale of their codes.
        scale: fp32 [P R]; of codes with the scale of each row.
        part: columns of each of P layers, 0 where P is 1.
    """

    down: Tensor
    up: Tensor
    scale: Tensor
    part: int


class Piece(NamedTuple):
    """One layer's share of a term, for comparing it with what it was made of.

    Attributes:
        base: the layer that is wrapped.
        pairs: what it was made of, with the scales of that moment.
        down, up, scale: rows of the term's down and scale, and columns of up, that this layer's outputs read.
        codes: the scale [N] that the product multiplies what they add by, or None.
    """

    base: nn.Module
    pairs: tuple[Branch, ...]
    down: Tensor
    up: Tensor
    scale: Tensor
    codes: Tensor | None


class _Layout(NamedTuple):
    """Where each layer's matrices lie: in `rows` of down and `columns` of up from there on, `outputs` of the product
    too; `ranks` of its adapters."""

    form: Form
    P: int
    R: int
    part: int
    rows: list[int]
    columns: list[int]
    outputs: list[int]
    ranks: list[list[int]]


@dataclass
class _Kept:
    """One group's term, and what it was made of.

    Attributes:
        steps: fp32 [P R], the scale of each row of down where that is codes.
        sources: the matrices under other names, so that no other memory gets their addresses.
    """

    layers: tuple[weakref.ref[nn.Module], ...]
    form: Form
    layout: _Layout
    term: Term
    steps: Tensor | None
    stamp: Hashable
    scales: tuple[float, ...]
    sources: list[Tensor]
    copies: bool
    sums: tuple[int, ...] | None = None
    """Checksums of the sources, once there were any."""

    def now(self) -> tuple[list[nn.Module | None], list[Split | None]]:
        """Its layers, those that are still there, and what they are made of at the moment."""
        layers = [ref() for ref in self.layers]
        return layers, [None if layer is None else split_for_packing(layer) for layer in layers]

    def is_of(self, parts: Sequence[Split | None]) -> bool:
        """Whether it was made of these, whatever their scales; then nothing can refuse them that did not before."""
        if None in parts or _stamp(parts) != self.stamp:
            return False
        device = self.term.up.device
        return all(_weight(part).device == device for part in parts if part is not None)


class Terms:
    """The terms of one model.

    Args:
        cache: the model's RunCache, which knows the run.
    """

    def __init__(self, cache: RunCache) -> None:
        self.cache = cache
        self.generation = 0
        """Another number whenever terms lie elsewhere: what a CUDA graph depends on."""
        self.changes = 0
        """Another number whenever a term was made of other matrices, or is gone."""
        self.hits = self.misses = 0
        self.reasons: Counter[str] = Counter()
        self._offloaded = False
        self._run: Any = None
        self._settled: Hashable = None
        self._kept: dict[Hashable, _Kept] = {}

    def refresh(self, look: int | None = None, *, offloaded: bool = False) -> int:
        """Before each forward, whose LoRA scales are set: see to it that nothing kept is stale; -> `generation`.

        Args:
            look: the content of a `Look` at the model in this call: where it is that of the call before, nothing is
                looked at here, but content when another run begins. None: all is looked at.
            offloaded: weights move between calls, so that nothing is kept.
        """
        self._offloaded = offloaded
        run = self.cache.run
        goes_on = run is not None and self._run is not None and self._run.goes_on(run)
        self._run = run
        unread = set() if goes_on else {key for key, kept in self._kept.items() if kept.sums is None}
        settled = None if look is None or offloaded else (look, self.changes)
        if settled is None or settled != self._settled:
            self._look_at_all(offloaded)
        else:
            self.hits += len(self._kept)
        if not goes_on or any(kept.copies and kept.sums is None for kept in self._kept.values()):
            self._check_content(unread)
        self._settled = None if settled is None else (look, self.changes)
        return self.generation

    def _look_at_all(self, offloaded: bool) -> None:
        for key, kept in list(self._kept.items()):
            layers, parts = kept.now()
            if not offloaded and kept.is_of(parts):
                self.hits += 1
                scales = _scales(parts)
                if scales != kept.scales:
                    _fill_scales(kept.term, kept.steps, kept.layout, parts)
                    kept.scales = scales
            elif offloaded or _refusal(parts) or not any(part.branches for part in parts if part is not None):
                self._drop(key)
            else:
                self._make(key, layers, parts, kept.form, kept.term.up.dtype)

    def _check_content(self, unread: set[Hashable]) -> None:
        """Fill those again whose matrices were written to where no version shows it: one launch reads all of them.

        Args:
            unread: of a run before, and their content was not read in it.
        """
        copied = {key: kept for key, kept in self._kept.items() if kept.copies}
        if not copied:
            return
        known = not _capturing(next(iter(copied.values())).term.up)  # else nothing can be read now
        sums = iter(_checksums([t for kept in copied.values() for t in kept.sources]) if known else ())
        for key, kept in copied.items():
            found = tuple(itertools.islice(sums, len(kept.sources))) if known else None
            differs = kept.sums is not None and kept.sums != found
            if differs or key in unread:
                layers, parts = kept.now()
                self._make(key, layers, parts, kept.form, kept.term.up.dtype)
                self.changes += differs
            self._kept[key].sums = found

    def of(
        self, layers: Sequence[Any], parts: Sequence[Split | None], dtype: torch.dtype, form: Form = "parts"
    ) -> Term | None:
        """The term of layers that are packed in this order, or None: nothing is to be added, or not in this way.

        Args:
            layers: as they are in the model.
            parts: what they are made of, LoRAs fused beside codes included.
            dtype: what the product computes in.
            form: `joint`: the columns of all layers are one part; `beside`: for a pass of its own behind the product of
                such parts, so that codes have been scaled already.
        """
        if not any(part is not None and part.branches for part in parts):
            return None
        kept_as = dtype if form == "beside" else _dtype(parts, dtype)
        reason = self.refusal(parts) or _mixed(parts, kept_as)
        if reason:
            self.reasons[reason] += 1
            return None
        key = (*(id(part.base) for part in parts if part is not None), form)
        kept = self._kept.get(key)
        same = kept is not None and all(ref() is layer for ref, layer in zip(kept.layers, layers, strict=True))
        if kept is not None and same and kept.term.up.dtype is kept_as:
            return kept.term
        if _capturing(parts[0].base.weight):  # type: ignore[union-attr,arg-type]
            self.reasons["first seen while a graph was captured"] += 1
            return None
        return self._make(key, layers, parts, form, kept_as)

    def refusal(self, parts: Sequence[Split | None]) -> str:
        """Why these layers' matrices cannot be a term, whatever the dtype of the activations, or nothing."""
        return "weights move between calls (offload)" if self._offloaded else _refusal(parts)

    def pieces(self) -> Iterator[Piece]:
        """All terms as the last forward used them, layer by layer."""
        for kept in self._kept.values():
            _, parts = kept.now()
            if any(part is None for part in parts) or _stamp(parts) != kept.stamp:
                continue  # changed since: the next forward makes it anew
            down, up, scale, _ = kept.term
            layout, scales = kept.layout, iter(kept.scales)
            found = [part for part in parts if part is not None]
            for part, row, output in zip(found, layout.rows, layout.outputs, strict=True):
                pairs = tuple(branch._replace(scale=next(scales)) for branch in part.branches)
                own = slice(row, row + layout.R) if layout.P > 1 else slice(None)
                codes = scale_of(part.base) if layout.form != "beside" else None
                yield Piece(part.base, pairs, down[own], up[output : output + len(_weight(part))], scale[own], codes)

    def clear(self) -> None:
        for key in list(self._kept):
            self._drop(key)

    def report(self) -> CacheReport:
        """Terms that a call found as they were, and others; copies take the bytes."""
        size = sum(t.nbytes for kept in self._kept.values() if kept.copies for t in kept.term[:3])
        count = len(self._kept)
        return CacheReport("LoRA terms", self.hits, self.misses, count, count, size, dict(self.reasons))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _drop(self, key: Hashable) -> None:
        if self._kept.pop(key, None) is not None:
            self.generation += 1
            self.changes += 1

    def _make(
        self, key: Hashable, layers: Sequence[Any], parts: Sequence[Split | None], form: Form, dtype: torch.dtype
    ) -> Term:
        self.misses += 1
        former = self._kept.get(key)
        layout = _layout(parts, form)
        with torch.inference_mode(False), torch.no_grad():
            term, steps, copies = _filled(layout, parts, dtype, former)
        if former is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(former.term[:3], term[:3], strict=True)):
            self.generation += 1
        stamp = _stamp(parts)
        self.changes += former is None or former.stamp != stamp
        refs = tuple(weakref.ref(layer, _forgetter(self, key)) for layer in layers)
        sources = [t.detach() for part in parts if part is not None for b in part.branches for t in (b.down, b.up)]
        self._kept[key] = _Kept(refs, form, layout, term, steps, stamp, _scales(parts), sources, copies)
        return term


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Of tensors of any devices, in order."""
    made: dict[int, int] = {}
    for device in {t.device for t in tensors}:
        own = [place for place, t in enumerate(tensors) if t.device == device]
        made.update(zip(own, checksums([tensors[place] for place in own]), strict=True))
    return [made[place] for place in range(len(tensors))]


def _forgetter(terms: Terms, key: Hashable) -> Callable[[Any], None]:
    """Drops an entry with the first of its layers, so that an unloaded LoRA leaves no copies behind."""
    ref = weakref.ref(terms)

    def forget(_: Any) -> None:
        found = ref()
        if found is not None:
            found._drop(key)

    return forget


def _refusal(parts: Sequence[Split | None]) -> str:
    if any(part is None for part in parts):
        return "a layer has to be called as it is (DoRA, a hook, a bias in the LoRA, dropout)"
    ranks = max((_rank(part) for part in parts if part is not None), default=0)
    if ranks > MOST_RANKS:
        return f"{ranks} ranks at one layer are more than {MOST_RANKS}"
    devices = {t.device for part in parts if part is not None for b in part.branches for t in (b.down, b.up)}
    if len(devices | {_weight(part).device for part in parts if part is not None}) > 1:
        return "LoRA matrices lie on another device than the layer"
    return ""


def _rank(part: Split) -> int:
    return sum(branch.down.shape[0] for branch in part.branches)


def _weight(part: Split) -> Tensor:
    weight: Any = part.base.weight
    return weight  # type: ignore[no-any-return]


def _dtype(parts: Sequence[Split | None], dtype: torch.dtype) -> torch.dtype:
    """Codes are multiplied with bf16, whose range they do not leave, in models of half precision."""
    codes = any(part is not None and scale_of(part.base) is not None for part in parts)
    return torch.bfloat16 if codes and dtype.itemsize == 2 else dtype


def _mixed(parts: Sequence[Split | None], dtype: torch.dtype) -> str:
    """Why matrices cannot be used in this dtype: beside codes they may be rounded, elsewhere they may not."""
    for part in parts:
        if part is not None and scale_of(part.base) is None:
            for branch in part.branches:
                if branch.down.dtype is not dtype or branch.up.dtype is not dtype:
                    names = (str(t).removeprefix("torch.") for t in (branch.down.dtype, dtype))
                    return "LoRA matrices are {} and activations {}".format(*names)
    return ""


def _layout(parts: Sequence[Split | None], form: Form) -> _Layout:
    found = [part for part in parts if part is not None]
    widths = [len(_weight(part)) for part in found]
    each = [[len(branch.down) for branch in part.branches] for part in found]
    ranks = [sum(own) for own in each]
    outputs = [sum(widths[:i]) for i in range(len(widths))]
    if form != "joint" and len(found) > 1 and len(set(widths[:-1])) == 1:
        R = _padded(max(ranks))
        rows, nothing = [i * R for i in range(len(found))], [0] * len(found)
        return _Layout(form, len(found), R, widths[0], rows, nothing, outputs, each)
    begin = [sum(ranks[:i]) for i in range(len(ranks))]
    return _Layout(form, 1, _padded(sum(ranks)), 0, begin, begin, outputs, each)


def _padded(ranks: int) -> int:
    return -(-ranks // ALIGN) * ALIGN


def _filled(
    layout: _Layout, parts: Sequence[Split | None], dtype: torch.dtype, former: _Kept | None
) -> tuple[Term, Tensor | None, bool]:
    """A term with what the parts hold now, in the former's memory where that fits; the scale of each row of its codes,
    if it has any; and whether it has copies."""
    found = [part for part in parts if part is not None]
    branches = [branch for part in found for branch in part.branches]
    down, up, _ = branches[0]
    P, R = layout.P, layout.R
    divided = layout.form != "beside" and scale_of(found[0].base) is not None
    alone = len(found) == 1 and len(branches) == 1 and len(down) == R and not divided
    if alone and all(t.dtype is dtype and t.is_contiguous() for t in (down, up)):
        term = Term(down.detach(), up.detach(), torch.zeros(R, dtype=torch.float32, device=down.device), 0)
        _fill_scales(term, None, layout, parts)
        return term, None, False
    down_dtype = E4M3 if divided else dtype
    if (
        former is not None
        and former.copies
        and former.layout == layout
        and _alike(former.term.down, down_dtype, down)
        and _alike(former.term.up, dtype, up)
    ):
        term, steps = former.term, former.steps
    else:  # of zeros, not of whatever was there: padding may not bring NaN in
        N = layout.outputs[-1] + len(_weight(found[-1]))
        own = down.new_zeros(P * R, down.shape[1], dtype=down_dtype)
        term = Term(
            own,
            up.new_zeros(N, R, dtype=dtype),
            torch.zeros(P * R, dtype=torch.float32, device=down.device),
            layout.part,
        )
        steps = torch.zeros_like(term.scale) if divided else None
    for part, row, column, output in zip(found, layout.rows, layout.columns, layout.outputs, strict=True):
        for branch in part.branches:
            ranks = len(branch.down)
            rows = slice(row, row + ranks)
            target = term.up[output : output + len(branch.up), column : column + ranks]
            if steps is None:
                term.down[rows].copy_(branch.down)
                target.copy_(branch.up)
            else:
                term.down[rows], steps[rows] = coded(branch.down, getattr(part.base, "compute_dtype", dtype))
                torch.div(branch.up, scale_of(part.base)[:, None], out=target)  # type: ignore[index]
            row, column = row + ranks, column + ranks
    _fill_scales(term, steps, layout, parts)
    return term, steps, True


def coded(down: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """down [..., R, K] as codes with a scale fp32 a row [..., R].

    Args:
        dtype: that the model computes in, whose kernel is compiled.
    """
    lift = 1.0 if dtype is torch.float16 else LIFT
    codes, scale, _ = ops.quantize_rows.direct(down.detach().to(dtype) * lift)
    return codes, scale / lift


def _alike(kept: Tensor, dtype: torch.dtype, matrix: Tensor) -> bool:
    return kept.dtype is dtype and kept.device == matrix.device


def _fill_scales(term: Term, steps: Tensor | None, layout: _Layout, parts: Sequence[Split | None]) -> None:
    """One launch a branch, without waiting for the device."""
    for part, row in zip((part for part in parts if part is not None), layout.rows, strict=True):
        for branch in part.branches:
            rows = slice(row, row + len(branch.down))
            if steps is None:
                term.scale[rows].fill_(branch.scale)
            else:
                torch.mul(steps[rows], branch.scale, out=term.scale[rows])
            row = rows.stop


def _stamp(parts: Sequence[Split | None]) -> Hashable:
    """Everything but scales that a term is made of, as far as it shows."""
    return tuple(
        (_seen(scale_of(part.base)), tuple((_seen(b.down), _seen(b.up)) for b in part.branches))
        for part in parts
        if part is not None
    )


def _seen(t: Tensor | None) -> Hashable:
    return None if t is None else (t.data_ptr(), -1 if t.is_inference() else t._version, t.shape, t.stride(), t.dtype)


def _scales(parts: Sequence[Split | None]) -> tuple[float, ...]:
    return tuple(branch.scale for part in parts if part is not None for branch in part.branches)
