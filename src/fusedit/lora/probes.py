"""Probes: layers asked one by one, and compared as soon as enough of one shape are there.

Calling a layer cannot be done for many at once: what its call computes is the question. The answers can be compared
together, which takes some 60 launches whether it is one layer or thirty. So an answer waits for others of its shape, as
many as fit into a limit of memory, and the numbers of all are read from the device at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedit.float8.linear import Float8Linear
from fusedit.lora.probing import (
    COLUMNS,
    OUTPUTS,
    ROWS,
    Found,
    Inputs,
    Joined,
    below,
    compared,
    joined,
    lows,
    off,
    stacked,
)
from fusedit.ops._fp8 import E4M3, quantized
from fusedit.runtime.branches import Branch
from fusedit.runtime.terms import LIFT, Piece

_MOST: Final = 64 << 20
"""Bytes of fp32 that comparing layers together may take."""


@dataclass(frozen=True)
class Probe:
    """One layer that was asked.

    Attributes:
        path: of the layer, and how it is computed.
        names: the LoRAs that are active there.
    """

    path: str
    names: Sequence[str]


class Numbers(NamedTuple):
    """Of L layers that were compared together; nothing has waited for the device.

    Attributes:
        read: fp32 [L, 5], the first five of `Found`.
        now: fp32 [L, S, C], some weights as the codes say, or None.
        was: as they were before, on the CPU.
    """

    read: Tensor
    now: Tensor | None = None
    was: Tensor | None = None


class _Sample(Protocol):
    """What one layer answered."""

    def key(self) -> Hashable:
        """Samples of one class with equal keys are compared together."""

    def nbytes(self) -> int:
        """That comparing it takes."""


class Probes:
    """Asks layers on one device."""

    def __init__(self, device: torch.device) -> None:
        self.asked: list[Probe] = []
        self.x: Final = Inputs(device)
        self._waiting: dict[Hashable, list[tuple[int, Any]]] = {}
        self._compared: list[tuple[list[int], Numbers]] = []

    def layer(self, path: str, names: Sequence[str], layer: Any, base: Any, pairs: Sequence[Branch]) -> None:
        """A LoRA layer, or an e4m3 layer with side branches, as a call of it computes it.

        Args:
            base: the layer that `layer` wraps, or itself.
            pairs: what is to be added.
        """
        y, y0 = _asked(layer, base, self._given(base))
        self._take(Probe(path, names), _Called(y, y0, base, joined(pairs, base.weight)))

    def finite(self, path: str, names: Sequence[str], layer: Any, base: Any) -> None:
        """A layer of which nothing else is compared."""
        self._take(Probe(path, names), _Finite(layer(self._given(base))))

    def packed(self, path: str, names: Sequence[str], piece: Piece) -> None:
        """A layer's share of what fused products read; without a LoRA of its own it may add nothing."""
        weight: Any = piece.base.weight
        self._take(Probe(path, names), _Packed(piece, joined(piece.pairs, weight)))

    def numbers(self) -> list[tuple[list[int], Numbers]]:
        """Of everything that was asked, with its places in `asked`."""
        for key in list(self._waiting):
            self._compare(key)
        return self._compared

    def _given(self, base: Any) -> Tensor:
        return self.x(base.weight.shape[1], _dtype(base))

    def _take(self, probe: Probe, sample: _Sample) -> None:
        key = type(sample), sample.key()
        waiting = self._waiting.setdefault(key, [])
        waiting.append((len(self.asked), sample))
        self.asked.append(probe)
        if len(waiting) * sample.nbytes() > _MOST:
            self._compare(key)

    def _compare(self, key: Hashable) -> None:
        places, samples = zip(*self._waiting.pop(key), strict=True)
        self._compared.append((list(places), type(samples[0]).compare(samples, self.x)))


def found(probes: Probes) -> list[Found]:
    """What they found, in the order in which they were asked, read from the device at once."""
    done = probes.numbers()
    read = torch.cat([t.flatten() for _, each in done for t in (each.read, each.now) if t is not None]).cpu()
    made: dict[int, Found] = {}
    for places, (numbers, now, was) in done:
        (own, read), weights = _cut(read, numbers), torch.zeros(len(places), dtype=torch.float32, device="cpu")
        if now is not None and was is not None:
            (now, read), was = _cut(read, now), was.float()
            weights = off(now, was)
        told = torch.cat([own, weights[:, None]], dim=1).nan_to_num(nan=float("inf")).tolist()
        made |= {place: Found(finite == 1, *rest) for place, (finite, *rest) in zip(places, told, strict=True)}
    return [made[place] for place in range(len(probes.asked))]


class _Called(NamedTuple):
    """What a layer and the one it wraps gave, [1, ROWS, N] each."""

    y: Tensor
    y0: Tensor
    base: Any
    pairs: Joined

    def key(self) -> Hashable:
        base = self.base
        kind = isinstance(base, Float8Linear), _dtype(base), base.bias is None, _kept(base) is None
        return *kind, base.weight.shape, *_alike(self.pairs)

    def nbytes(self) -> int:
        return _nbytes(self.pairs) + 4 * OUTPUTS * self.pairs.down.shape[1]

    @staticmethod
    def compare(samples: Sequence[_Called], inputs: Inputs) -> Numbers:
        bases, dtype = [each.base for each in samples], _dtype(samples[0].base)
        x = inputs(bases[0].weight.shape[1], torch.float32)[0]
        y, y0 = torch.cat([each.y for each in samples]), torch.cat([each.y0 for each in samples])
        own = compared(y.float() - y0.float(), y0, x, [each.pairs for each in samples], dtype)
        finite = _finite(y)
        if not isinstance(bases[0], Float8Linear):
            return Numbers(torch.stack([finite, *own, torch.zeros_like(finite)], dim=1))
        N, K = bases[0].weight.shape
        rows, columns = slice(None, None, max(1, N // OUTPUTS)), slice(None, None, max(1, K // COLUMNS))
        codes = stacked([base.weight[rows] for base in bases])
        weight = codes.float() * torch.stack([base.weight_scale for base in bases])[:, rows, None]
        bias = None if bases[0].bias is None else torch.stack([base.bias for base in bases])[:, rows]
        read = torch.stack([finite, *own, below(y0[..., rows].float(), weight, bias, x, y0.dtype)], dim=1)
        if _kept(bases[0]) is None:
            return Numbers(read)
        return Numbers(read, weight[..., columns], torch.stack([base.original[rows, columns] for base in bases]))


class _Finite(NamedTuple):
    """What a layer gave, of which nothing else is known."""

    y: Tensor

    def key(self) -> Hashable:
        return self.y.shape, self.y.dtype

    def nbytes(self) -> int:
        return 4 * self.y.numel()

    @staticmethod
    def compare(samples: Sequence[_Finite], _: Inputs) -> Numbers:
        finite = _finite(torch.cat([each.y for each in samples]))
        return Numbers(torch.nn.functional.pad(finite[:, None], (0, 4)))


class _Packed(NamedTuple):
    """What fused products read of a layer's LoRAs, and what it was made of."""

    piece: Piece
    pairs: Joined

    def key(self) -> Hashable:
        down, up, codes = self.piece.down, self.piece.up, self.piece.codes
        return down.shape, up.shape, down.dtype, up.dtype, codes is None, *_alike(self.pairs)

    def nbytes(self) -> int:
        return 2 * _nbytes(self.pairs) + 8 * sum(t.numel() for t in (self.piece.down, self.piece.up))

    @staticmethod
    def compare(samples: Sequence[_Packed], inputs: Inputs) -> Numbers:
        pieces = [each.piece for each in samples]
        first = pieces[0]
        x = inputs(first.down.shape[1], torch.float32)[0]
        low = lows(x, [piece.down for piece in pieces], torch.stack([piece.scale for piece in pieces]))
        d = low @ stacked([piece.up for piece in pieces]).float().mT
        if first.codes is not None:
            d *= torch.stack([piece.codes for piece in pieces if piece.codes is not None])[:, None]
        pairs = [each.pairs for each in samples]
        if first.down.dtype is E4M3:
            pairs = _as_codes(pairs, _dtype(first.base))
        own = compared(d, None, x, pairs, first.up.dtype)
        finite = _finite(d)
        return Numbers(torch.stack([finite, *own, torch.zeros_like(finite)], dim=1))


def _as_codes(pairs: Sequence[Joined], dtype: torch.dtype) -> list[Joined]:
    """The same with `down` rounded to e4m3, each row with a scale of its own, as the fused products of this dtype take
    it: so that rounding, which may be 1/16 of each number, does not hide what else is off."""
    down = stacked([each.down for each in pairs]).to(dtype).float()
    codes, scale, _ = quantized(down * LIFT)  # of which no row is so small that it would count as zeros
    rounded = codes.float() * (scale / LIFT)[..., None]
    return [each._replace(down=down) for each, down in zip(pairs, rounded, strict=True)]


def _alike(pairs: Joined) -> tuple[Hashable, ...]:
    return pairs.down.shape, pairs.up.shape, pairs.down.dtype, pairs.up.dtype, pairs.pairs, pairs.dtypes


def _nbytes(pairs: Joined) -> int:
    """Of the two matrices as they are and in fp32, the large one twice, and of eight results of all rows."""
    down, up = pairs.down.numel(), pairs.up.numel()
    return 6 * down + 10 * up + 8 * 4 * ROWS * pairs.up.shape[0]


def _finite(y: Tensor) -> Tensor:
    """Of each layer, 1 or 0."""
    return y.isfinite().flatten(1).all(1).float()


def _dtype(base: Any) -> torch.dtype:
    """That the layer computes in."""
    dtype: torch.dtype = base.compute_dtype if isinstance(base, Float8Linear) else base.weight.dtype
    return dtype


def _kept(base: Any) -> Tensor | None:
    """The weights from before the conversion, where they lie in memory and are comparable."""
    original: Tensor | None = base.__dict__.get("original")
    return None if original is None or original.shape != base.weight.shape else original


def _cut(flat: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The front of it in this shape, and the rest."""
    return flat[: like.numel()].view(like.shape), flat[like.numel() :]


def _asked(layer: Any, base: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer gives, and what the one that it wraps gave to it: calling that again takes half as long again."""
    if layer is base or base.__dict__.get("branches"):
        return layer(x), _alone(base, x)
    heard: list[Tensor] = []
    hook = base.register_forward_hook(lambda _layer, _args, y0: heard.append(y0.clone()))
    try:
        y: Tensor = layer(x)
    finally:
        hook.remove()
    return y, heard[0] if len(heard) == 1 else _alone(base, x)


def _alone(base: Any, x: Tensor) -> Tensor:
    """The layer without side branches. The same dict comes back: what is kept between steps knows it by identity."""
    space = base.__dict__
    branches = space.get("branches")
    if branches:
        space["branches"] = {}
    try:
        y: Tensor = base(x)
    finally:
        if branches:
            space["branches"] = branches
    return y
