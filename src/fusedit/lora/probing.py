"""Probing layers: what LoRA adds to each, as it is really computed, beside scale * B A x computed here in fp32.

    d = y - y0            y the layer with its LoRAs, y0 the one without, both in the dtype that the model computes in
    D = sum s B A x       in fp32

x is small and always the same: 8 rows of numbers that e4m3 holds, the largest of each row 448 steps of a power of two.
So rounding activations to e4m3 loses nothing of it (of others up to 1/16 of each number), and what is left is rounding
to the dtype, whose unit roundoff is u: 2^-8 for bf16; at least 2^-11 is taken, which covers TF32 and sums in fp32. An
element of d is off by u |A x| through B, by 2 u of a pair's result, and by u |y| for each of n sums and for y0. So

    |d - D| <= (n + 6) u (|y0| + sum |s| |B| |A x|)             for each element, of all rows the largest      (1)

It is relative to |y|, since d is a difference of rounded numbers: a LoRA that is small beside y0 could be twice too
strong within it. What rounding does to different elements has little to do with each other, though. So of the elements
where |D| is more than twice what the n sums may round away (below, rounding takes all of D, as y0 is rounded already),
of which it can therefore take half,

    |<d - D, D>| <= (1/2 + 1/8) <D, D> + |(n + 6) u (|y0| + sum |s| |B| |A x|) D|                              (2)

In bf16 and with 3072 outputs a doubled LoRA exceeds this from about 0.5 % of y0 on.

The layer below is looked at too, since what is wrong there is in y and y0 alike: y0 beside codes times scale times x in
fp32, at 16 of its outputs, within 1/16 in L2 and the rounding of y0; and where the weights from before the conversion
lie in memory, 1024 of them beside codes times scale, within 1/4 in L2. A nearest code is off by 1/16 at most, one that
was rounded for what its layer reads by more.

All of it is written for L layers of one shape at once: the tensors are small, and launches take longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fusedit.runtime.branches import Branch

ROWS: Final = 8
OUTPUTS: Final = 16
COLUMNS: Final = 64
ALIGN: Final = 8
"""Ranks are padded with zeros to multiples of it, so that layers of many ranks have few shapes."""
_LARGEST: Final = 3.5  # 448 / 128
_LEAST: Final = 2.0**-11
_TINY: Final = 1e-30
_OF_WEIGHTS: Final = 0.25


class Found(NamedTuple):
    """What a probe found; all but the first are 1 where everything is as far off as it may be.

    Attributes:
        finite: whether the layer gave no NaN and no infinity.
        each: of bound (1).
        together: of bound (2).
        share: |d - D| / |D| in L2, for messages.
        below: of the bound on the layer without LoRA.
        weights: of the bound on its weights.
    """

    finite: bool
    each: float
    together: float
    share: float
    below: float
    weights: float

    @property
    def added(self) -> float:
        """Of what the LoRAs add."""
        return max(self.each, self.together)

    @property
    def right(self) -> bool:
        return self.finite and max(self.added, self.below, self.weights) <= 1


class Inputs:
    """The x of every width, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, width: int, dtype: torch.dtype) -> Tensor:
        """[1, ROWS, width]; the same numbers in every dtype."""
        key = width, dtype
        found = self._made.get(key)
        if found is None:
            wide = _input(width) if dtype is torch.float32 else self(width, torch.float32)
            found = self._made[key] = wide.to(self.device, dtype)
        return found


@lru_cache(maxsize=16)
def _input(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(1, ROWS, width, dtype=torch.float32, generator=generator, device="cpu").clamp_(-_LARGEST, _LARGEST)
    x[..., 0] = _LARGEST
    steps = (x * (448 / _LARGEST)).to(torch.float8_e4m3fn).float()
    return steps * (_LARGEST / 448)


class Joined(NamedTuple):
    """All pairs of one layer as one pair: their ranks side by side, which gives the sum over them.

    Attributes:
        down: [R, K].
        up: [N, R].
        scales: of each of the R ranks.
        pairs: n, how many these are.
        dtypes: that they are computed in.
    """

    down: Tensor
    up: Tensor
    scales: list[float]
    pairs: int
    dtypes: frozenset[torch.dtype]


def joined(pairs: Sequence[Branch], weight: Tensor) -> Joined:
    """Those of a layer with this weight [N, K], maybe none. One whose rank needs no padding is not copied."""
    if not pairs:
        down, up = (weight.new_empty(shape, dtype=torch.float32) for shape in ((0, weight.shape[1]), (len(weight), 0)))
        return Joined(down, up, [], 0, frozenset())
    down, up, scale = pairs[0]
    scales, dtypes = [scale] * len(down), frozenset(pair.down.dtype for pair in pairs)
    if len(pairs) > 1:
        down, up = torch.cat([pair.down for pair in pairs]), torch.cat([pair.up for pair in pairs], dim=1)
        scales = [pair.scale for pair in pairs for _ in range(len(pair.down))]
    more = -len(down) % ALIGN
    if more:
        down, up = (torch.nn.functional.pad(t, size) for t, size in ((down, (0, 0, 0, more)), (up, (0, more))))
        scales = scales + [0.0] * more
    return Joined(down, up, scales, len(pairs), dtypes)


def compared(d: Tensor, y0: Tensor | None, x: Tensor, pairs: Sequence[Joined], dtype: torch.dtype) -> list[Tensor]:
    """`each`, `together` and `share`, [L] each, of what is added, d fp32 [L, ROWS, N], to y0.

    Args:
        y0: [L, ROWS, N], or None for zeros.
        x: fp32 [ROWS, K].
        pairs: of each layer; all of one shape, number and dtypes.
        dtype: the coarsest that d was computed in, but for that of the pairs themselves.
    """
    n = pairs[0].pairs
    u = max(_LEAST, *(torch.finfo(t).eps / 2 for t in (dtype, *pairs[0].dtypes)))
    low = lows(x, [pair.down for pair in pairs], scales_of([pair.scales for pair in pairs], d.device))
    wide = stacked([pair.up for pair in pairs]).float()
    right = low @ wide.mT
    size = low.abs().amax(1, keepdim=True) @ wide.abs_().mT
    if y0 is not None:
        size += y0.abs().amax(1, keepdim=True)
    del wide
    allowed = (n + 6) * u * size + _TINY
    error, clear = d - right, torch.where(right.abs() > 2 * n * u * size, right, 0)
    each = (error.abs() / allowed).amax((1, 2))
    peak = right.abs().amax((1, 2), keepdim=True).clamp_min_(1.0)  # whose square fp32 may not hold
    for t in (error, clear, right, allowed):
        t /= peak
    square = 0.625 * (clear * clear).sum((1, 2)) + _norm(allowed * clear) + _TINY
    together = (error * clear).sum((1, 2)).abs() / square
    return [each, together, _norm(error) / (_norm(right) + _TINY)]


def lows(x: Tensor, downs: Sequence[Tensor], scale: Tensor) -> Tensor:
    """scale * (x down^T), fp32 [L, ROWS, R], of downs [R, K] each and scale [L, R]; as one product."""
    rows = stacked(downs).float().flatten(0, 1)
    return (x @ rows.t()).view(len(x), *scale.shape).transpose(0, 1) * scale[:, None]


def below(y0: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far y0 [L, ROWS, S] fp32 is off, of what may be: [L].

    Args:
        weight: fp32 [L, S, K], of these outputs, as codes and scale say.
        bias: [L, S] or None.
        x: fp32 [ROWS, K].
        dtype: of y0 as it was computed.
    """
    product = x @ weight.mT
    right = product if bias is None else product + bias.float()[:, None]
    rounding = max(_LEAST, torch.finfo(dtype).eps / 2) * _norm(right)
    return _norm(y0 - right) / (_norm(product) / 16 + 4 * rounding + _TINY)


def off(now: Tensor, was: Tensor) -> Tensor:
    """How far some weights [L, ..., n] are from those of before, of what may be: [L]."""
    return _norm(now - was) / (_OF_WEIGHTS * _norm(was) + _TINY)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[L, ...]; codes as whole numbers on the way, since kernels for them are fewer."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.stack(list(tensors))
    return torch.stack([t.view(torch.uint8) for t in tensors]).view(dtype)


def scales_of(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """fp32 [L, R] on the device, without waiting for it."""
    made = torch.tensor(rows, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def _norm(t: Tensor) -> Tensor:
    """In L2, of each layer."""
    made: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)
    return made
