"""Modulation: the adaptive norms' scales, shifts and gates of all blocks, in one launch and for a whole run at once.

Stock computes them block by block at every step: FLUX.1-dev reads 3.2 billion weights for one row each time. Here one
launch computes all blocks (`ops.grouped_linear`); and since the scheduler knows its time steps when a run starts, rows
of the coming steps are computed together, kept in a table, and found there again by their time step. The comparison is
made on the device, so a table never answers for a time step or guidance it was not made for: then the launch computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from fusedit import ops
from fusedit.report import CacheReport
from fusedit.runtime.branches import Split, split_for_packing
from fusedit.runtime.counters import Counters
from fusedit.runtime.hoist import RunCache
from fusedit.runtime.linear import scale_of
from fusedit.runtime.terms import Term, Terms

ROWS: Final = 32
"""Rows of a table at most: 68 MB for FLUX.1-dev, 31 MB for Z-Image-Turbo."""
TABLES: Final = 2
"""Tables of the same steps: true guidance in two calls a step alternates two conditionings."""
TOKENS_PER_ROW: Final = 160
"""And no more than a row for this many tokens: then table, fused activations and what a graph holds together stay below
stock's peak. FLUX.1-dev has 28 rows at 1024x1024, one table for its 28 steps."""
CALLS: Final = 64

Ahead = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Table(NamedTuple):
    """The rows of the coming steps from `first` on: keys [J, B, Q] and values [J, B, N]."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor


class Modulation:
    """The modulation of one model.

    Args:
        cache: the model's RunCache, which knows the run and keeps the tables.
        counters: the model's.
        terms: the model's, of what LoRA adds.
    """

    def __init__(self, cache: RunCache, counters: Counters, terms: Terms) -> None:
        self.cache, self.counters, self.terms = cache, counters, terms
        self.hits = self.misses = 0
        self.reasons: Counter[str] = Counter()
        # For each call since the last reading that had an earlier call's table, whether its rows were found there: on
        # the device until somebody asks.
        self._found: torch.Tensor | None = None
        self._calls = 0

    def __call__(
        self,
        rewrite: str,
        layers: Sequence[Any],
        x: torch.Tensor,
        key: torch.Tensor,
        ahead: Ahead,
        *,
        watched: tuple[torch.Tensor, ...],
        owner: nn.Module,
        tokens: int,
        settings: Hashable = None,
    ) -> torch.Tensor:
        """x [B, K] through all layers -> [B, N]; equals `separate(layers, x)`.

        Args:
            rewrite: counted under this name.
            layers: linear layers, as they are at the moment.
            x: the conditioning of this call.
            key: float32 [B, Q], which together with `watched` and the parameters of `owner` determines x.
            ahead: time steps [J] of the scheduler -> (keys [J, B, Q], conditioning [J * B, K]) of calls at these.
            watched: tensors that `ahead` reads besides the time steps.
            owner: the modules that `ahead` and `layers` belong to.
            tokens: of this call, items times length; bounds the table.
            settings: what else `ahead` depends on.
        """
        parts = [split_for_packing(layer) for layer in layers]
        reason = _why_separate(layers, parts, x)
        adapted = () if reason is not None else self._adapted(layers, parts, x)
        if adapted is None:
            reason = "what LoRA adds to a modulation layer cannot be added behind the product (see LoRA terms)"
        if reason is not None or adapted is None:
            self.counters.fell_back(rewrite, reason or "")
            return separate(layers, x)
        self.counters.ran(rewrite)
        group = _Group.of(parts, adapted)
        table, kept = self._table(group, key, ahead, watched, owner, tokens, settings)
        if not kept:
            self.misses += key.shape[0]  # computed by this call, alone or with the rows of the coming steps
        if table is None:
            return group(x)
        hit = self._place(table.values) if kept else x.new_empty(x.shape[0])
        y = group(x, key, table.keys, table.values, out=(x.new_empty(x.shape[0], table.values.shape[2]), hit))
        run = self.cache.run
        if run is not None and run.step + 1 >= len(run.timesteps):
            self.cache.drop(table)  # the VAE, which comes next, may need the memory
        return y

    def report(self) -> CacheReport:
        """Rows of calls that were found in a table of an earlier call, and others; synchronises with the device."""
        self._read()
        tables = self._tables()
        # Keys may be expanded over the batch: what counts is the memory behind them.
        storages = [t.untyped_storage() for table in tables for t in (table.values, table.keys)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        entries = sum(table.keys.shape[0] * table.keys.shape[1] for table in tables)
        capacity = TABLES * ROWS
        return CacheReport("modulation rows", self.hits, self.misses, entries, capacity, size, dict(self.reasons))

    def _tables(self) -> list[_Table]:
        return [value for value in self.cache.values() if isinstance(value, _Table)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _adapted(
        self, layers: Sequence[Any], parts: Sequence[Split | None], x: torch.Tensor
    ) -> tuple[_Adapted, ...] | None:
        """What LoRA adds, in one term for layers of one width that follow each other; None where it cannot be one."""
        widths: list[int] = [len(part.base.weight) for part in parts if part is not None]  # type: ignore[arg-type]
        made, first = [], 0
        for _, same in groupby(widths):
            last = first + len(list(same))
            if any(part is not None and part.branches for part in parts[first:last]):
                term = self.terms.of(layers[first:last], parts[first:last], x.dtype, "beside")
                if term is None:
                    return None
                made.append(_Adapted(slice(sum(widths[:first]), sum(widths[:last])), term))
            first = last
        return tuple(made)

    def _table(
        self,
        group: _Group,
        key: torch.Tensor,
        ahead: Ahead,
        watched: tuple[torch.Tensor, ...],
        owner: nn.Module,
        tokens: int,
        settings: Hashable,
    ) -> tuple[_Table | None, bool]:
        """The table for this call, if it can have one, and whether an earlier call has made it."""
        run, batch = self.cache.run, key.shape[0]
        steps = min(ROWS, tokens // TOKENS_PER_ROW) // batch
        first = 0 if run is None or steps < 2 else run.step - run.step % steps
        timesteps = key[:0] if run is None else run.timesteps[first : first + steps]
        reason = ""
        if run is None:
            reason = "no run: called outside the pipeline, or before set_timesteps()"
        elif steps < 2:
            reason = f"a table would take more memory than the step saves ({tokens} tokens, {batch} items)"
        elif timesteps.numel() == 0 or timesteps.device != key.device:
            reason = "the scheduler's time steps end before this step, or lie on another device"
        if reason:
            self.reasons[reason] += 1
            return None, False

        def make() -> _Table:
            for former in (kept := self._tables())[: max(0, len(kept) - TABLES + 1)]:
                self.cache.drop(former)
            keys, x = ahead(timesteps)
            return _Table(first, keys, group(x).view(*keys.shape[:2], -1))

        for former in self._tables():
            if former.first != first:
                self.cache.drop(former)
        settings = (first, steps, batch, group.weights[0].dtype, settings)
        table, kept = self.cache.get(make, watched, owner, settings, or_none=True)
        if kept is None:
            self.reasons[
                "inputs or weights that cannot be watched (inference mode, or a LoRA layer that does more than add)"
            ] += 1
        return table, bool(kept)

    def _place(self, values: torch.Tensor) -> torch.Tensor:
        """Where a call says which of its rows it found in an earlier call's table of these values [J, B, N]: [B]."""
        found, batch = self._found, values.shape[1]
        same = found is not None and (found.shape[1], found.dtype, found.device) == (batch, values.dtype, values.device)
        if found is None or not same or self._calls == CALLS:
            self._read()
            with torch.inference_mode(False):  # else no later call outside of it could write here
                found = self._found = values.new_empty(CALLS, batch)
        self._calls += 1
        return found[self._calls - 1]

    def _read(self) -> None:
        if self._found is not None and self._calls:
            found = int(self._found[: self._calls].sum(dtype=torch.float32))
            self.hits += found
            self.misses += self._calls * self._found.shape[1] - found
            self._calls = 0


class _Adapted(NamedTuple):
    """What LoRA adds to these columns."""

    columns: slice
    term: Term


class _Group(NamedTuple):
    """All layers of one call: what they wrap, and what LoRA adds."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    adapted: tuple[_Adapted, ...]

    @classmethod
    def of(cls, parts: Sequence[Split | None], adapted: tuple[_Adapted, ...]) -> _Group:
        """`_why_separate` sees to it that all are alike."""
        bases: list[Any] = [part.base for part in parts if part is not None]
        scales = [scale_of(base) for base in bases]
        kept = [scale for scale in scales if scale is not None]
        return cls(
            [b.weight for b in bases], [b.bias for b in bases], kept if len(kept) == len(bases) else None, adapted
        )

    def __call__(self, x: torch.Tensor, *table: torch.Tensor, out: Any = None) -> torch.Tensor:
        """x [R, K] -> [R, N]; rows whose key is among a table's (key, keys, values) from there."""
        kwargs = {} if self.scales is None else {"scales": self.scales}
        op = ops.grouped_linear
        y: torch.Tensor
        y, hit = op.direct(x, self.weights, self.biases, *table, **kwargs, out=out)
        low, add = ops.low_rank, ops.add_low_rank
        first, then = (low.unchecked, add.unchecked) if x.is_cpu else (low, add)
        for columns, term in self.adapted:
            part = y[:, columns]
            # Rows of the table have it already. Whether a row is one of them is known on the device alone.
            missed = (1 - hit.float(), torch.ones(part.shape[1], dtype=torch.float32, device=x.device)) if table else ()
            then(part, first(x, term.down, term.scale), term.up, term.part, *missed, out=part)
        return y


def separate(layers: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    """x [B, K] through each layer, whatever it is -> [B, N]."""
    return torch.cat([layer(x) for layer in layers], dim=-1)


def _why_separate(layers: Sequence[Any], parts: Sequence[Split | None], x: torch.Tensor) -> str | None:
    codes = parts[0] is not None and scale_of(parts[0].base) is not None
    for layer, part in zip(layers, parts, strict=True):
        base: Any = layer if part is None else part.base
        kind: Any = type(base)
        if part is None or (kind is not nn.Linear and scale_of(base) is None):
            return f"a modulation layer is a {kind.__module__.partition('.')[0]} {kind.__name__} layer"
        if (scale_of(base) is not None) is not codes:
            return "modulation layers differ in precision"
        if base.bias is None:
            return "a modulation layer has no bias"
        for t, dtype in ((base.weight, base.weight.dtype if codes else x.dtype), (base.bias, x.dtype)):
            if t.dtype is not dtype or t.device != x.device or not t.is_contiguous():
                return "modulation weights differ from the activations in dtype or device, or are not contiguous"
    return None
