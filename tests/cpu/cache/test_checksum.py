"""checksums(): any changed bit shows, and where the tensor lies does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedit.cache import checksum
from fusedit.cache.checksum import FACTOR, KEY, LANES, ROW, ROWS, TILE, checksums


def tensors(seed: int = 0) -> list[torch.Tensor]:
    """A matrix of several passes, small ones, odd sizes, every width, a scalar and nothing."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(300, 512, generator=generator),
        torch.randn(4096, 64, generator=generator).bfloat16(),
        torch.randn(7, 3, generator=generator).bfloat16(),
        torch.randn(5, generator=generator),
        torch.randn(3, generator=generator).double(),
        torch.arange(11, dtype=torch.int8),
        torch.tensor([True, False, True]),
        torch.tensor(2.5),
        torch.empty(0, 4),
    ]


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_definition(data: bytes) -> int:
    """The formula of checksum.py in numbers of Python, as torch's int64."""

    def g(h: int, w: int) -> int:
        y = (h * FACTOR + w) % 2**64
        return y ^ (y >> 33)

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    words += [0] * (-len(words) % LANES)
    rows = [words[at : at + LANES] for at in range(0, len(words), LANES)]
    total = 0
    for t in range(0, len(rows), ROWS):
        for lane in range(LANES):
            h = (t // ROWS * LANES + lane) * KEY
            for row in rows[t : t + ROWS]:
                h = g(h, row[lane])
            total += g(g(g(h, 0), 0), 0)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3 * ROW + 77]
)
def test_definition(size: int) -> None:
    data = random_bytes(size)
    assert checksums([data]) == (by_definition(data.numpy().tobytes()),)


def test_equal_content_gives_equal_numbers_wherever_it_lies() -> None:
    expected = checksums(tensors())
    assert checksums([t.clone() for t in tensors()]) == expected
    assert checksums([t.t().contiguous().t() if t.ndim == 2 else t for t in tensors()]) == expected, "strides"
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors()]
    assert any(t.storage_offset() for t in shifted)
    assert checksums(shifted) == expected, "an offset that does not allow a view"
    with torch.inference_mode():
        assert checksums(tensors()) == expected
    assert checksums([torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for t in tensors()]) == expected
    assert checksums([]) == ()


@pytest.mark.parametrize("offset", range(1, 9))
def test_odd_addresses(offset: int) -> None:
    data = random_bytes(2 * TILE + 1001)
    expected = checksums([data])
    assert checksums([torch.cat([data[:offset], data])[offset:]]) == expected
    # The address itself, not the offset in a storage: so do weights lie in a file that is mapped into memory.
    memory = bytearray(data.numpy().tobytes().rjust(offset + data.numel(), b"\0"))
    assert checksums([torch.frombuffer(memory, dtype=torch.uint8, offset=offset)]) == expected


def test_only_the_bytes_count() -> None:
    for t in tensors()[:4]:
        assert checksums([t]) == checksums([t.view(torch.int16)]) == checksums([t.flatten().view(torch.uint8)])


def test_one_number_each_in_order() -> None:
    numbers = checksums(tensors())
    assert len(set(numbers)) == len(numbers) == len(tensors())
    assert numbers == tuple(checksums([t])[0] for t in tensors())
    assert checksums(tensors()[::-1]) == numbers[::-1]
    a, _, b, *_ = numbers
    assert checksums([tensors()[2], tensors()[0], tensors()[2].clone()]) == (b, a, b)


def test_without_elements() -> None:
    assert checksums([torch.empty(0), torch.empty(3, 0, dtype=torch.int8)]) == (0, 0)
    assert checksums([torch.zeros(3), torch.empty(0)])[0] != 0, "zeros count"
    assert checksums([torch.zeros(ROW // 4)]) != checksums([torch.zeros(ROW // 4 + 1)])


def test_many_small_tensors() -> None:
    some = [random_bytes(size, size) for size in range(500)]
    assert checksums(some) == tuple(checksums([t])[0] for t in some)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_how_many_tiles_are_taken_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    some = [*tensors(), random_bytes(7 * TILE + 5), *tensors(1)]
    expected = checksums(some)
    monkeypatch.setattr(checksum, "_TILES", most)
    assert checksums(some) == expected


class Sizes(TorchDispatchMode):
    """Notes the largest result of any operation that is no view of the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.own = weight.untyped_storage().data_ptr()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.own:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("offset", [0, 1])
def test_a_weight_is_not_copied(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    monkeypatch.setattr(checksum, "_TILES", 4)
    weight = random_bytes(64 * TILE + 300)
    most = 4 * torch.get_num_threads() * TILE
    assert most < weight.nbytes / 2
    with Sizes(weight) as sizes:
        checksums([weight[offset:]])
    assert 0 < sizes.largest <= most


@pytest.mark.parametrize("index", range(8))
def test_one_changed_bit_of_any_tensor_shows(index: int) -> None:
    expected = checksums(tensors())
    for place in (0, -1):
        changed = tensors()
        changed[index].view(-1).view(torch.uint8)[place] ^= 1
        now = checksums(changed)
        assert [a != b for a, b in zip(now, expected, strict=True)] == [place == index for place in range(9)]


def test_one_changed_bit_anywhere_shows() -> None:
    data = random_bytes(2 * TILE + ROW + 13)
    places = {*range(0, data.numel(), 797), *range(data.numel() - 21, data.numel()), TILE - 1, TILE, ROW - 1, ROW}
    seen = {checksums([data])}
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            seen.add(checksums([data]))
            data[place] ^= 1 << bit
    assert len(seen) == 8 * len(places) + 1


DISTANCES = (1, 2, 3, LANES - 1, LANES, LANES + 1, 2 * LANES, LANES * ROWS, 2 * LANES * ROWS, 4092, 2 * 4092, 341 * 192)


@pytest.mark.parametrize("distance", DISTANCES)
def test_exchanged_words_show(distance: int) -> None:
    words = random_bytes(8 * (distance + 4064)).view(torch.int64)
    exchanges = [(first, size) for first in range(0, 4000, 97) for size in (1, 2, 64) if size <= distance]
    seen = {checksums([words])}
    for first, size in exchanges:
        changed = words.clone()
        changed[first : first + size] = words[first + distance : first + distance + size]
        changed[first + distance : first + distance + size] = words[first : first + size]
        seen.add(checksums([changed]))
    assert len(seen) == len(exchanges) + 1


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanged_signs_show(distance: int, dtype: torch.dtype) -> None:
    """The signs of any of the numbers of one word, and of any of another: sums of weights, and their squares, stay."""
    numbers = 8 // dtype.itemsize
    values = torch.ones(distance + 1, numbers, dtype=dtype)
    patterns = [torch.tensor(signs) for signs in itertools.product([1, -1], repeat=numbers)]
    seen = set()
    for one, other in itertools.product(patterns, patterns):
        values[0], values[distance] = one, other
        seen.add(checksums([values]))
    assert len(seen) == len(patterns) ** 2


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sign": lambda t: t.neg_(),
    "rows": lambda t: t.copy_(t.roll(1, 0)),
    "two rows": lambda t: t[3:5].copy_(t[3:5].flip(0)),
    "many rows": lambda t: t.copy_(t.roll(64, 0)),
    "all rows": lambda t: t.copy_(t.flip(0)),
    "columns": lambda t: t.copy_(t.roll(1, 1)),
    "halves": lambda t: t.copy_(t.roll(256, 1)),
    "two elements": lambda t: t[:2, 5].copy_(t[:2, 5].flip(0)),
    "signs of rows": lambda t: t[::2].neg_(),
    "signs of columns": lambda t: t[:, 1::2].neg_(),
    "negative zero": lambda t: t[3, 3].copy_(torch.tensor(-0.0)),
    "NaN": lambda t: t[3, 3].fill_(torch.nan),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_that_keep_norms_and_sums_show(change: Callable[[torch.Tensor], Any]) -> None:
    changed = tensors()
    changed[0][3, 3] = 0.0
    before = checksums(changed)
    change(changed[0])
    assert checksums(changed) != before


def test_rows_of_a_weight_that_lie_4092_words_apart() -> None:
    """341 rows of 768 numbers in bf16: what a sum by 4092 columns would not see."""
    weight = torch.randn(1000, 768, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = checksums([weight])
    weight[[5, 346]] = weight[[346, 5]]
    assert checksums([weight]) != before


def test_equal_numbers_exchanged_with_other_numbers_in_between() -> None:
    """A constant weight has nothing to exchange; each other place of one other number has its own sum."""
    weight = torch.ones(64, 256, dtype=torch.bfloat16)
    seen = set()
    for place in range(0, weight.numel(), 61):
        weight.view(-1)[place] = 2
        seen.add(checksums([weight]))
        weight.view(-1)[place] = 1
    assert len(seen) == len(range(0, weight.numel(), 61))
