"""checksums(): 64 bits for the content of each tensor, the same on every device, read once and without a copy.

Identity and `_version` do not show what is written through `.data`, and that is how LoRA is merged (peft, diffusers'
`fuse_lora`) and taken out again. So the content itself is compared: bits as 64-bit integers, summed in COLUMNS columns
(integer sums are exact, whatever their order), the columns weighted by fixed random odd factors. Any changed element
changes the result. Two changes cancel only if they were made for it, or if two words COLUMNS * n apart change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional as F

# A multiple of 4, for vector loads; else without a factor in common with the power-of-two widths of weights, so that
# exchanging rows of a matrix moves their words to other columns.
COLUMNS: Final = 4092
_SMALL: Final = 1 << 18  # bytes below which tensors are laid end to end first: one pass over many costs less than many


def checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """One number for each large tensor, in order, and one for everything else.

    The tensors are dense, of any dtype and strides, on one device. Waits for the device.
    """
    if not tensors:
        return ()
    with torch.no_grad():
        bodies: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for t in tensors:
            flat = t if t.ndim == 1 else t.reshape(-1)
            if t.nbytes < _SMALL:
                small.setdefault(t.dtype, []).append(flat)
                continue
            words = _words(flat)
            rows = words.numel() // COLUMNS
            bodies.append(words.as_strided((rows, COLUMNS), (COLUMNS, 1)))
            rest.append(words[rows * COLUMNS :])
        left = torch.cat([*rest, *(_words(torch.cat(group)) for group in small.values())])
        left = F.pad(left, (0, -left.numel() % COLUMNS))
        bodies.append(left.view(left.numel() // COLUMNS, COLUMNS))
        sums = torch.empty(len(bodies), COLUMNS, dtype=torch.int64, device=left.device)
        for row, body in zip(sums, bodies, strict=True):
            torch.sum(body, 0, out=row)
        return tuple((sums * _factors(left.device)).sum(1).tolist())


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor [n] as int64, filled up with zeros; a view where size and address allow one."""
    size = flat.element_size()
    if not flat.is_contiguous() or flat.numel() * size % 8 or flat.storage_offset() * size % 8:
        flat = F.pad(flat.contiguous().view(torch.uint8), (0, -flat.numel() * size % 8)).clone()
    return flat.view(torch.int64)


def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return (2 * torch.randint(-(2**62), 2**62, (COLUMNS,), generator=generator, device="cpu") + 1).to(device)
