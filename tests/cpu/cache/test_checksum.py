"""checksums(): any changed bit shows, and where the tensor lies does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedit.cache.checksum import COLUMNS, checksums


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


def test_equal_content_gives_equal_numbers_wherever_it_lies() -> None:
    expected = checksums(tensors())
    assert checksums([t.clone() for t in tensors()]) == expected
    assert checksums([t.t().contiguous().t() if t.ndim == 2 else t for t in tensors()]) == expected, "strides"
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors()]
    assert any(t.storage_offset() for t in shifted)
    assert checksums(shifted) == expected, "an offset that does not allow a view"
    with torch.inference_mode():
        assert checksums(tensors()) == expected
    assert checksums([]) == ()


@pytest.mark.parametrize("index", range(8))
def test_one_changed_bit_of_any_tensor_shows(index: int) -> None:
    expected = checksums(tensors())
    for place in (0, -1):
        changed = tensors()
        changed[index].view(-1).view(torch.uint8)[place] ^= 1
        assert checksums(changed) != expected


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sign": lambda t: t.neg_(),
    "rows": lambda t: t.copy_(t.roll(1, 0)),
    "many rows": lambda t: t.copy_(t.roll(64, 0)),
    "columns": lambda t: t.copy_(t.roll(1, 1)),
    "halves": lambda t: t.copy_(t.roll(256, 1)),
    "two elements": lambda t: t[:2, 5].copy_(t[:2, 5].flip(0)),
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


def test_columns_do_not_line_up_with_rows_of_weights() -> None:
    for width in (512, 768, 1024, 2048, 2560, 4096, 9728, 10240):  # of bf16, four to a word
        rows_to_the_same_column = COLUMNS // math.gcd(COLUMNS, width // 4)
        assert rows_to_the_same_column > 64
