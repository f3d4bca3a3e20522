"""checksums(): 64 bits for the content of each tensor, the same on every device, read once and without a copy.

Identity and `_version` do not show what is written through `.data`, and that is how LoRA is merged (peft, diffusers'
`fuse_lora`) and taken out again. So the content itself is compared, modulo 2^64 and with unsigned shifts:

    s = sum over t, l of g(g(g(h[t, l], 0), 0), 0)
    h[t, l] = g( ... g(g((t LANES + l) KEY, w[t, 0, l]), w[t, 1, l]) ..., w[t, R_t - 1, l])
    g(h, w) = y ^ (y >> 33),  y = h FACTOR + w

w[T, ROWS, LANES] the tensor's bytes, row-major, as little-endian words of 8 filled up with zeros: tile t has R_t = ROWS
rows, the last one as many as hold bytes. Integer sums are exact in any order, so every device gets the same number.
g is a bijection of h and of w, so one changed word always changes s. How a word counts depends, in no linear way, on
its lane and on what stands before it there: other changes, exchanges among them, cancel by the chance of 64 bits alone,
unless they were made for it. Words in chains and not each by itself: all of one lane share the finish, and plain torch
passes over a word four times instead of thirteen. Not a shift of 32: two signs of a word changed together would then
only change the highest bit of the product, and a sign of the next word take it back.
Source: KEY, FACTOR and the shift as in splitmix64 (Steele et al. 2014) and MurmurHash3's finalizer (Appleby 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

LANES: Final = 256
ROWS: Final = 16
ROW: Final = 8 * LANES
"""Bytes of a row."""
TILE: Final = ROW * ROWS
"""Bytes of a whole tile."""
KEY: Final = 0x9E3779B97F4A7C15
FACTOR: Final = 0xFF51AFD7ED558CCD
SHIFT: Final = 33
FINISH: Final = 3
# Tiles that plain torch takes at once: on a CPU for each thread as many as keep the two values of every lane in its
# second-level cache and leave it work (torch splits by 32768 elements), elsewhere enough to hide the launches.
_TILES: Final = 128
_TILES_ELSEWHERE: Final = 4096


def checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """One number for each tensor, in order; 0 for one without elements.

    The tensors are dense, of any dtype, shape and strides, on one device; only what is not contiguous is copied.
    One kernel for all of them where Triton can run, plain torch elsewhere. Waits for the device.
    """
    if not tensors:
        return ()
    # Here, because importing fusedit imports no kernel.
    from fusedit.cache import checksum_kernel
    from fusedit.ops import triton_status

    with torch.no_grad():
        tensors = [t.contiguous() for t in tensors]
        run = checksum_kernel.launch if triton_status(tensors[0].device)[0] else plain
        return tuple(run(tensors).tolist())


def plain(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of contiguous tensors of one device, int64 [tensors], in plain torch."""
    device = tensors[0].device
    most = _TILES * torch.get_num_threads() if device.type == "cpu" else _TILES_ELSEWHERE
    scratch = torch.empty(2, most, LANES, dtype=torch.int64, device=device)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    flats = [t.reshape(-1).view(torch.uint8) for t in tensors]
    for total, flat in zip(sums, flats, strict=True):
        whole = flat.numel() // TILE
        for first in range(0, whole, most):
            last = min(first + most, whole)
            tiles = flat[first * TILE : last * TILE].view(-1, TILE)
            total += _tiles(tiles, torch.arange(first, last, device=device), [last - first] * ROWS, scratch).sum()
    # The tiles that are not whole, most of them of small tensors, together: those with most rows first.
    rests = sorted(
        ((flat.numel() % TILE, place) for place, flat in enumerate(flats) if flat.numel() % TILE), reverse=True
    )
    for start in range(0, len(rests), most):
        some = rests[start : start + most]
        rows = [-(-size // ROW) for size, _ in some]
        tiles = torch.zeros(len(some), rows[0] * ROW, dtype=torch.uint8, device=device)
        for tile, (size, place) in zip(tiles, some, strict=True):
            tile[:size] = flats[place][-size:]
        numbers = torch.tensor([flats[place].numel() // TILE for _, place in some], device=device)
        reach = [sum(row < count for count in rows) for row in range(rows[0])]
        sums[[place for _, place in some]] += _tiles(tiles, numbers, reach, scratch)
    return sums


def _tiles(tiles: torch.Tensor, numbers: torch.Tensor, reach: Sequence[int], scratch: torch.Tensor) -> torch.Tensor:
    """The sum of each tile, int64 [T], of tiles uint8 [T, bytes] with their numbers int64 [T] in their tensors.

    Row r is one of the first reach[r] tiles; scratch int64 [2, at least T, LANES] gets the chains.
    """
    if tiles.storage_offset() % 8 or tiles.data_ptr() % 8:
        tiles = tiles.clone()
    words = tiles.view(torch.int64).view(len(tiles), -1, LANES)
    h, shifted = scratch[0, : len(tiles)], scratch[1, : len(tiles)]
    lanes = torch.arange(LANES, device=tiles.device)
    torch.add((numbers * _signed(LANES * KEY))[:, None], lanes * _signed(KEY), out=h)
    for row, count in enumerate(reach):
        torch.add(words[:count, row], h[:count], alpha=_signed(FACTOR), out=h[:count])
        _fold(h[:count], shifted[:count])
    for _ in range(FINISH):
        _fold(h.mul_(_signed(FACTOR)), shifted)
    return h.sum(1)


def _fold(h: torch.Tensor, shifted: torch.Tensor) -> None:
    """h ^= h >> SHIFT without the sign, which torch's shift drags along."""
    torch.bitwise_right_shift(h, SHIFT, out=shifted)
    h.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - SHIFT) - 1))


def _signed(value: int) -> int:
    """The number that torch's int64 can hold and that is the same modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63
