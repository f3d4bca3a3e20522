"""Packed products: what their stamp sees, and packing from two threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fusedit.runtime.counters import Counters
from fusedit.runtime.linear import PackedLinear

NAMES = ("a", "b", "c")


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(32, 32))

    def separate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in NAMES], dim=-1)


def group(parent: Parent) -> PackedLinear:
    return PackedLinear(parent, NAMES, "rewrite", Counters())


@pytest.fixture(autouse=True)
def _often_switched() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with torch.no_grad():
        yield
    sys.setswitchinterval(before)


def transposed(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t()


def expanded(layer: nn.Linear) -> None:
    layer.bias.data = layer.bias.data[:1].expand(32)


@pytest.mark.parametrize("edit", [transposed, expanded])
@pytest.mark.parametrize("name", NAMES)
def test_another_view_of_the_same_place_is_seen(name: str, edit: Callable[[nn.Linear], None]) -> None:
    parent, x = Parent(), torch.randn(1, 5, 32)
    packed = group(parent)
    before = packed(x)
    edit(getattr(parent, name))
    assert not torch.allclose(packed(x), before)
    torch.testing.assert_close(packed(x), parent.separate(x))


def test_two_groups_of_the_same_layers_pack_from_two_threads() -> None:
    x = torch.randn(1, 5, 32)
    for _ in range(150):
        parent = Parent()
        groups = [group(parent), group(parent)]
        start = threading.Barrier(2)

        def first(packed: PackedLinear, start: threading.Barrier = start) -> None:
            start.wait()
            with torch.no_grad():
                packed(x)

        threads = [threading.Thread(target=first, args=(packed,)) for packed in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for parameter in parent.parameters():
            parameter.mul_(1.5)
        for packed in groups:
            torch.testing.assert_close(packed(x), parent.separate(x))
        for packed in groups:
            packed.unpack()
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in parent.parameters())
