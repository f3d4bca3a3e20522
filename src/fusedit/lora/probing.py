"""Probing one layer: what LoRA adds to it, as it is really computed, beside scale * B A x computed here in fp32.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fusedit.float8.linear import Float8Linear
from fusedit.runtime.branches import Branch

ROWS: Final = 8
_OUTPUTS: Final = 16
_COLUMNS: Final = 64
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


@dataclass
class Probe:
    """One layer, looked at; nothing has waited for the device.

    Attributes:
        path: of the layer, and how it is computed.
        names: the LoRAs that are active there.
        numbers: fp32 [5] on the device, the first five of `Found`.
        weights: some weights as the codes say, fp32 on the device, and as they were before, on the CPU.
    """

    path: str
    names: Sequence[str]
    numbers: Tensor
    weights: tuple[Tensor, Tensor] | None = None


@dataclass
class Inputs:
    """The x of every width, made once."""

    device: torch.device
    made: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def __call__(self, width: int, dtype: torch.dtype) -> Tensor:
        """[1, ROWS, width]."""
        key = width, dtype
        if key not in self.made:
            generator = torch.Generator().manual_seed(width)
            x = torch.randn(1, ROWS, width, generator=generator).clamp_(-_LARGEST, _LARGEST)
            x[..., 0] = _LARGEST
            steps = (x * (448 / _LARGEST)).to(torch.float8_e4m3fn).float()
            self.made[key] = (steps * (_LARGEST / 448)).to(self.device, dtype)
        return self.made[key]


def probe_layer(path: str, names: Sequence[str], layer: Any, base: Any, pairs: Sequence[Branch], x: Inputs) -> Probe:
    """A LoRA layer, or an e4m3 layer with side branches, as a call of it computes it.

    Args:
        base: the layer that `layer` wraps, or itself.
        pairs: what is to be added.
    """
    dtype = base.compute_dtype if isinstance(base, Float8Linear) else base.weight.dtype
    given = x(base.weight.shape[1], dtype)
    y, y0 = layer(given)[0], _alone(base, given)[0]
    numbers = [y.isfinite().all().float(), *compared(y.float() - y0.float(), y0, given[0], pairs, dtype)]
    weights = None
    if isinstance(base, Float8Linear):
        numbers.append(_below(base, y0, given[0]))
        weights = _some_weights(base)
    else:
        numbers.append(numbers[0].new_zeros(()))
    return Probe(path, names, torch.stack(numbers), weights)


def probe_finite(path: str, names: Sequence[str], layer: Any, base: Any, x: Inputs) -> Probe:
    """A layer of which nothing else is compared."""
    dtype = base.compute_dtype if isinstance(base, Float8Linear) else base.weight.dtype
    finite = layer(x(base.weight.shape[1], dtype)).isfinite().all().float()
    return Probe(path, names, torch.stack([finite, *(finite.new_zeros(()),) * 4]))


def compared(
    d: Tensor, y0: Tensor, x: Tensor, pairs: Sequence[Branch], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`each`, `together` and `share` of what is added, d [ROWS, N] fp32, to y0.

    Args:
        x: [ROWS, K].
        dtype: the coarsest that d was computed in, but for that of the pairs themselves.
    """
    right, size = torch.zeros_like(d), y0.float().abs().amax(0)
    for down, up, scale in pairs:
        low, wide = x.float() @ down.float().t(), up.float()
        right += scale * (low @ wide.t())
        size = size + abs(scale) * (low.abs().amax(0) @ wide.abs().t())
    u = max(_LEAST, *(torch.finfo(t).eps / 2 for t in (dtype, *(pair.down.dtype for pair in pairs))))
    norm, allowed = torch.linalg.vector_norm, (len(pairs) + 6) * u * size + _TINY
    error, clear = d - right, torch.where(right.abs() > 2 * len(pairs) * u * size, right, 0)
    together = (error * clear).sum().abs() / (0.625 * (clear * clear).sum() + norm(allowed * clear) + _TINY)
    return (error.abs() / allowed).amax(), together, norm(error) / (norm(right) + _TINY)


def found(probes: Sequence[Probe]) -> list[Found]:
    """What they found, read from the device at once."""
    samples = [probe.weights[0].flatten() for probe in probes if probe.weights is not None]
    numbers = torch.stack([probe.numbers for probe in probes])
    flat = torch.cat([numbers.flatten(), *samples]).cpu()
    read, rest = (
        flat[: numbers.numel()].view(numbers.shape).nan_to_num(nan=float("inf")).tolist(),
        flat[numbers.numel() :],
    )
    made = []
    for probe, (finite, each, together, share, below) in zip(probes, read, strict=True):
        weights = 0.0
        if probe.weights is not None:
            was = probe.weights[1].flatten()
            now, rest = rest[: len(was)], rest[len(was) :]
            off = torch.linalg.vector_norm(now - was) / (_OF_WEIGHTS * torch.linalg.vector_norm(was) + _TINY)
            weights = float(off.nan_to_num(nan=float("inf")))
        made.append(Found(finite == 1, each, together, share, below, weights))
    return made


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


def _below(base: Float8Linear, y0: Tensor, x: Tensor) -> Tensor:
    every = max(1, len(base.weight) // _OUTPUTS)
    weight = base.weight.detach()[::every].float() * base.weight_scale[::every, None]
    product, made = x.float() @ weight.t(), y0[:, ::every].float()
    right = product if base.bias is None else product + base.bias.detach()[::every].float()
    norm = torch.linalg.vector_norm
    rounding = max(_LEAST, torch.finfo(y0.dtype).eps / 2) * norm(right)
    share: Tensor = norm(made - right) / (norm(product) / 16 + 4 * rounding + _TINY)
    return share


def _some_weights(base: Float8Linear) -> tuple[Tensor, Tensor] | None:
    if base.original is None or base.original.shape != base.weight.shape:
        return None
    rows, columns = (max(1, n // most) for n, most in zip(base.weight.shape, (_OUTPUTS, _COLUMNS), strict=True))
    now = base.weight.detach()[::rows, ::columns].float() * base.weight_scale[::rows, None]
    return now, base.original[::rows, ::columns].float()
