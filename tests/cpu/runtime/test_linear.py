"""Packed products: what their stamp sees, and packing from two threads."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn

from fusedit.models import _products
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


def product(packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """x through all layers of the group, as the models do it."""
    return _products.packed(packed, x, x.new_empty(*x.shape[:-1], 32 * len(NAMES)))


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
    before = product(packed, x)
    edit(getattr(parent, name))
    assert not torch.allclose(product(packed, x), before)
    torch.testing.assert_close(product(packed, x), parent.separate(x))


def test_two_groups_of_the_same_layers_pack_from_two_threads() -> None:
    x = torch.randn(1, 5, 32)
    for _ in range(150):
        parent = Parent()
        groups = [group(parent), group(parent)]
        start = threading.Barrier(2)

        def first(packed: PackedLinear, start: threading.Barrier = start) -> None:
            start.wait()
            with torch.no_grad():
                product(packed, x)

        threads = [threading.Thread(target=first, args=(packed,)) for packed in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for parameter in parent.parameters():
            parameter.mul_(1.5)
        for packed in groups:
            torch.testing.assert_close(product(packed, x), parent.separate(x))
        for packed in groups:
            packed.unpack()
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in parent.parameters())


def own_storages(tensors: Iterable[torch.Tensor]) -> bool:
    return all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def replaced(parent: Parent, name: str) -> None:
    setattr(parent, name, copy.deepcopy(getattr(parent, name)))


GONE: dict[str, Callable[[Parent, str], None]] = {
    "replaced": replaced,
    "identity": lambda parent, name: setattr(parent, name, nn.Identity()),
    "none": lambda parent, name: setattr(parent, name, None),
    "deleted": lambda parent, name: delattr(parent, name),
    "no weight": lambda parent, name: setattr(getattr(parent, name), "weight", None),
    "bias deleted": lambda parent, name: delattr(getattr(parent, name), "bias"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", GONE)
def test_unpacking_reaches_all_that_was_packed_whatever_became_of_the_layers(what: str, name: str) -> None:
    parent, x = Parent(), torch.randn(1, 5, 32)
    parameters, layer = list(parent.parameters()), getattr(parent, name)
    values = [p.clone() for p in parameters]
    packed = group(parent)
    product(packed, x)
    assert not own_storages(parameters)
    GONE[what](parent, name)
    packed.unpack()
    assert own_storages(parameters)
    assert all(map(torch.equal, parameters, values))
    assert layer is not getattr(parent, name, None) or what in ("no weight", "bias deleted")


def test_a_replaced_layer_is_packed_with_the_others_and_let_go_of_with_them() -> None:
    parent, x = Parent(), torch.randn(1, 5, 32)
    packed, old = group(parent), list(parent.parameters())
    product(packed, x)
    replaced(parent, "a")
    torch.testing.assert_close(product(packed, x), parent.separate(x))
    assert not own_storages(parent.parameters())
    packed.unpack()
    assert own_storages([*old, *parent.parameters()])


def test_a_group_that_only_saw_the_packed_layers_unpacks_them() -> None:
    parent, x = Parent(), torch.randn(1, 5, 32)
    product(group(parent), x)  # and is gone
    assert not own_storages(parent.parameters())
    group(parent).unpack()
    assert own_storages(parent.parameters())


@pytest.mark.parametrize("bias", [torch.ones(32, dtype=torch.bfloat16), torch.ones(1), torch.ones(33)])
def test_a_bias_unlike_its_weight_is_left_as_it_is(bias: torch.Tensor) -> None:
    parent, x = Parent(), torch.randn(1, 5, 32)
    parent.b.bias = nn.Parameter(bias)
    packed = group(parent)
    assert packed.whole(packed.parts()) is None
    assert parent.b.bias.dtype is bias.dtype
    assert own_storages(parent.parameters())
    if bias.numel() == 1:  # stock spreads it over all outputs
        torch.testing.assert_close(product(group(parent), x), parent.separate(x))
