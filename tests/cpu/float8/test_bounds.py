"""Scales that are known before the product: they bound it for any rows and weights, and follow the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedit import ops
from fusedit.float8.linear import Float8Linear
from fusedit.float8.products import quantise
from fusedit.models import _bounds
from fusedit.models._bounds import Bounds
from fusedit.runtime.branches import Branch, Split, split
from fusedit.runtime.hoist import Run, RunCache

E4M3 = 448.0


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


KINDS = ("normal", "aligned", "one", "sparse", "opposite", "large", "tiny")


def layer(kind: str, k: int = 64, n: int = 96, *, bias: bool = True, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    made = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k, generator=g))
        if bias:
            made.bias.copy_(torch.randn(n, generator=g) * 3)
        if kind == "one":
            made.weight.fill_(1.0)
        elif kind == "sparse":
            made.weight.zero_()
            made.weight[torch.arange(n), torch.arange(n) % k] = 1e3
        elif kind == "large":
            made.weight.mul_(1e6)
        elif kind == "tiny":
            made.weight.mul_(1e-12)
    return Float8Linear.convert(made, activations=True, keep=False)


def gelu_bounds(layers: list[Any]) -> torch.Tensor:
    return _bounds.gelu_bounds([split(layer) for layer in layers])  # type: ignore[misc]


def swiglu_bounds(layers: list[Any]) -> torch.Tensor:
    return _bounds.swiglu_bounds([split(layer) for layer in layers])  # type: ignore[misc]


def rows(kind: str, weight: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """[1, S, K], among them the worst ones that there are: parallel to a row of the weight."""
    x = torch.randn(1, 40, weight.shape[1], generator=torch.Generator().manual_seed(seed))
    if kind == "aligned":
        return weight[:40][None] * 7
    if kind == "opposite":
        return -weight[:40][None]
    return x * 1e5 if kind == "large" else x


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_gelu_is_never_too_small(kind: str) -> None:
    first, value = layer(kind), layer("normal", seed=5)
    x = quantise(rows(kind, first.dequantised(torch.float32)))
    scale = ops.row_bounds(x.length, gelu_bounds([first, value]), False)
    dense = x.dense(torch.float32)
    u = F.linear(dense, first.dequantised(torch.float32), first.bias)
    largest = F.gelu(u, approximate="tanh").abs().amax(-1)
    assert (largest <= scale * E4M3).all()
    v = F.linear(dense, value.dequantised(torch.float32), value.bias)
    mixed = torch.softmax(torch.randn(1, 40, 40) * 20, -1) @ v
    assert (mixed.abs().amax(-1) <= scale * E4M3).all(), "attention's output is a mean of rows of v"
    exponent = torch.frexp(scale)[0]
    assert (exponent == 0.5).all(), "a power of two, so that it costs no precision"


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_swiglu_is_never_too_small_and_not_absurdly_large(kind: str) -> None:
    gate, value = layer(kind, bias=False), layer(kind, bias=False, seed=0 if kind == "aligned" else 3)
    x = quantise(rows(kind, gate.dequantised(torch.float32)))
    scale = ops.row_bounds(x.length, swiglu_bounds([gate, value]), True)
    a, b = (F.linear(x.dense(torch.float32), part.dequantised(torch.float32)) for part in (gate, value))
    largest = (F.silu(a) * b).abs().amax(-1)
    assert (largest <= scale * E4M3).all()
    if kind == "aligned":  # silu(u) u for rows parallel to weights: the longest weight nearly reaches the bound
        assert (scale * E4M3 / largest).min() < 4


def test_loras_widen_the_bounds_by_what_they_add() -> None:
    g = torch.Generator().manual_seed(4)
    parts, layers = [], [layer("normal", bias=False, seed=i) for i in range(2)]
    changed = []
    for each in layers:
        down, up = torch.randn(4, 64, generator=g), torch.randn(96, 4, generator=g)
        parts.append(Split(each, (Branch(down, up, 2.0), Branch(down, up, -0.5))))
        changed.append(each.dequantised(torch.float32) + 1.5 * up @ down)
    x = quantise(torch.cat([torch.randn(1, 40, 64, generator=g), changed[0][None]], dim=1))
    a, b = (F.linear(x.dense(torch.float32), weight) for weight in changed)
    scale = ops.row_bounds(x.length, _bounds.swiglu_bounds(parts), True)
    assert ((F.silu(a) * b).abs().amax(-1) <= scale * E4M3).all()
    scale = ops.row_bounds(x.length, _bounds.gelu_bounds(parts), False)
    assert (F.gelu(a).abs().amax(-1) <= scale * E4M3).all()
    none = [Split(each, (Branch(*part.branches[0][:2], 0.0),)) for each, part in zip(layers, parts, strict=True)]
    assert torch.equal(_bounds.swiglu_bounds(none), swiglu_bounds(layers)), "a LoRA at scale 0 changes the base"


def test_the_longest_row_of_an_item_bounds_its_attention_and_no_other_items() -> None:
    value = layer("normal")
    first = layer("normal", seed=2)
    x = torch.randn(2, 16, 64)
    x[1] *= 1e4
    bounds = gelu_bounds([first, value])
    both = ops.row_bounds(quantise(x).length, bounds, False)
    alone = ops.row_bounds(quantise(x[:1]).length, bounds, False)
    assert torch.equal(both[:1], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_gives_no_scale(bad: float) -> None:
    x = torch.randn(1, 4, 64)
    x[0, 2, 3] = bad
    lengths = quantise(x).length
    scale = ops.row_bounds(lengths, swiglu_bounds([layer("normal", bias=False), layer("normal", bias=False)]), True)
    assert scale[0, 2].isnan()
    assert scale[0, [0, 1, 3]].isfinite().all()


def test_bounds_are_kept_for_a_run_and_follow_the_weights() -> None:
    cache, calls = RunCache(), []

    def make(group: Any) -> torch.Tensor:
        calls.append(group)
        return _bounds.gelu_bounds(group)

    bounds, first = Bounds(cache, make), layer("normal")
    assert bounds(lambda: [[], []]) == (None, (False, False))
    cache.begin(Run(torch.ones(3), 0, 0, None))

    def groups() -> list[list[Any]]:
        return [[split(first)], []]

    kept = bounds(groups)
    assert kept.table is not None
    assert torch.equal(kept.table[1], torch.zeros(4))
    assert kept.there == (True, False)
    assert kept.rows(kept.table)[1] is None
    assert bounds(groups) is kept
    assert len(calls) == 1
    for edit in (
        lambda: first.weight_scale.mul_(2),
        lambda: first.bias.add_(1),
        lambda: first.load_state_dict(layer("normal", seed=8).state_dict()),
        lambda: first.load_state_dict(layer("normal", seed=9).state_dict(), assign=True),
    ):
        before = len(calls)
        with torch.no_grad():
            edit()
        found = bounds(groups).table
        assert found is not None
        assert torch.equal(found[0], gelu_bounds([first]))
        assert len(calls) == before + 1
    cache.begin(Run(torch.ones(3), 0, 0, None))
    first.weight.data.view(torch.uint8).fill_(0x7E)  # through .data, which no version shows: found by the next run
    found = bounds(groups).table
    assert found is not None
    assert torch.equal(found[0], gelu_bounds([first]))


def test_nothing_is_asked_in_a_run_while_the_look_is_the_same() -> None:
    cache, asked = RunCache(), []
    bounds, first = Bounds(cache, _bounds.gelu_bounds), layer("normal")

    def groups() -> list[list[Any]]:
        asked.append(1)
        return [[split(first)], []]

    cache.begin(Run(torch.ones(3), 0, 0, None))
    kept = bounds(groups, 1)
    assert bounds(groups, 1) is kept
    assert len(asked) == 1
    assert bounds(groups, 2) is kept
    assert bounds(groups) is kept, "without a look the layers are asked"
    assert len(asked) == 3
    cache.begin(Run(torch.ones(3), 0, 0, None))
    assert bounds(groups, 2) is not kept, "another run"
