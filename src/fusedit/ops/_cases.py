"""Case: shapes that tests, benchmarks and tuning share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedit.ops._fp8 import to_e4m3

Tensor = torch.Tensor


@dataclass(frozen=True)
class T:
    """A tensor to be made: its shape, how it lies in memory, and what it holds.

    Attributes:
        layout: `dense`; `sliced` (columns of a wider buffer); `joint` (a slice along dimension 1 of a longer buffer);
            `inside` (`joint` and `sliced` at once); `offset` (dense, starting one element late, so that no row is
            16-byte aligned); `transposed` (the two last dimensions swapped in memory); `gapped` (every second element
            of the last dimension); `channels_last`.
        dtype: fixed dtype, or None for the dtype of the run.
            What is made in e4m3 is clamped to +-448: give such codes a `std` of about 100.
        fill: `normal`, `positive` (0.5 to 1.5, times `std`: scales), `cos` or `sin` (of the same random angles), `mask`
            (bool, first of each row always True).
        mean, std: of the normal numbers.
    """

    shape: tuple[int, ...]
    layout: str = "dense"
    dtype: torch.dtype | None = None
    fill: str = "normal"
    mean: float = 0.0
    std: float = 1.0

    def make(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        if self.fill in ("cos", "sin"):
            generator.manual_seed(7)
            angles = torch.rand(self.shape, generator=generator, device=device) * 6.2831853
            values = angles.cos() if self.fill == "cos" else angles.sin()
        elif self.fill == "mask":
            values = torch.rand(self.shape, generator=generator, device=device) < 0.6
            values[..., :1] = True
        elif self.fill == "positive":
            values = (torch.rand(self.shape, generator=generator, device=device) + 0.5) * self.std
        else:
            values = torch.randn(self.shape, generator=generator, device=device) * self.std + self.mean
        kept = torch.bool if self.fill == "mask" else self.dtype or dtype
        return place(to_e4m3(values) if kept is torch.float8_e4m3fn else values.to(kept), self.layout)


def place(values: Tensor, layout: str) -> Tensor:
    """The same values, lying in memory as `layout` says (see `T`)."""
    shape = tuple(values.shape)
    if layout == "dense":
        return values.contiguous()
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        buffer = values.new_zeros((*shape[:-1], 2 * shape[-1] + 8))[..., shape[-1] : 2 * shape[-1]]
    elif layout == "offset":
        buffer = values.new_zeros(values.numel() + 1)[1:].view(shape)
    elif layout == "transposed":
        buffer = values.new_zeros((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    elif layout == "joint":
        buffer = values.new_zeros((shape[0], shape[1] + 5, *shape[2:]))[:, 3 : 3 + shape[1]]
    elif layout == "inside":
        wider = values.new_zeros((shape[0], shape[1] + 5, *shape[2:-1], 2 * shape[-1] + 8))
        buffer = wider[:, 3 : 3 + shape[1], ..., shape[-1] : 2 * shape[-1]]
    elif layout == "gapped":
        buffer = values.new_zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return buffer.copy_(values)


@dataclass(frozen=True)
class Case:
    """One set of arguments for one op.

    Attributes:
        name: unique within the op.
        args: `T` for a tensor, anything else as it is; `packed` builds them otherwise.
        tags: `small` (runs in the interpreter), `real` (a size of a real model), `odd`, `strided`, `empty`, `alias`.
        kwargs: keyword arguments.
        alias: from the built arguments, the `out` that lies on top of an input.
        packed: from the tensors made of `args`, the arguments themselves (for views of one packed buffer).
    """

    name: str
    args: tuple[Any, ...]
    tags: tuple[str, ...] = ("small",)
    kwargs: tuple[tuple[str, Any], ...] = ()
    alias: Callable[..., Any] | None = None
    packed: Callable[..., tuple[Any, ...]] | None = None

    def build(
        self, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with random values (never zeros)."""
        made = tuple(
            arg.make(dtype, device, 1000 * seed + place) if isinstance(arg, T) else arg
            for place, arg in enumerate(self.args)
        )
        return (self.packed(*made) if self.packed else made), dict(self.kwargs)
