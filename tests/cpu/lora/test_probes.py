"""Layers of one shape are compared together: the same is found as one by one, and few launches come with each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pipes import flux_call, flux_pipe, lora_state
from support.runs import FLUX, Kind, each_kind
from test_verifier import a_lora, quantised
from torch.utils._python_dispatch import TorchDispatchMode

import fusedit
from fusedit.lora import probes, verifier
from fusedit.lora.probes import Probes, found
from fusedit.lora.probing import Found, Inputs, compared, joined
from fusedit.runtime.branches import Branch
from fusedit.runtime.install import find
from fusedit.runtime.terms import Terms

CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """How many ops of aten ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.ops += 1
        return func(*args, **(kwargs or {}))


def ops(action: Callable[[], Any]) -> int:
    with Counted() as counted, torch.no_grad():
        action()
    return counted.ops


def terms_of(pipe: Any) -> Terms:
    fused = find(pipe.transformer)
    assert fused is not None
    return next(session.model.terms for session in fused.sessions.values())


def look(pipe: Any, terms: Terms | None = None, *, again: bool = False) -> list[Found]:
    """What a look at everything finds."""
    module = pipe.transformer
    seen: list[list[Found]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "found", lambda asked: seen.append(found(asked)) or seen[-1])
        if not again:
            verifier._VERIFIED.pop(module, None)
        layers = verifier.adapted(module)
        assert verifier.verify(module, layers, verifier.stamp_of(layers), terms, CPU)
    return seen[0]


def calls(pipe: Any) -> None:
    """Those that a look cannot do without: each layer with its LoRA and without."""
    x = Inputs(CPU)
    for _, layer, base in verifier.adapted(pipe.transformer):
        given = x(base.weight.shape[1], getattr(base, "compute_dtype", base.weight.dtype))
        layer(given), base(given)


def deep(blocks: int) -> Any:
    """A quantised FLUX with a LoRA on every layer of so many blocks of both kinds, and terms."""
    pipe = flux_pipe(num_layers=blocks, num_single_layers=blocks)
    fusedit.accelerate(pipe, "fp8")
    fusedit.load_lora(pipe, lora_state(pipe, rank=8, scale=0.1, names=("transformer_blocks",)), "a")
    flux_call(pipe, num_inference_steps=1)
    return pipe


def test_few_ops_come_with_each_layer_beside_the_two_calls() -> None:
    """What does not depend on how many layers there are is left out: some 60 for each shape."""
    counts: list[tuple[int, int, int]] = []
    for blocks in (1, 3):
        pipe = deep(blocks)
        asked, packed = len(verifier.adapted(pipe.transformer)), terms_of(pipe)
        own = ops(lambda each=pipe: look(each)) - ops(lambda each=pipe: calls(each))
        again = ops(lambda each=pipe, terms=packed: look(each, terms, again=True))
        assert len(look(pipe, packed, again=True)) == asked, "every layer has a share in a term"
        counts.append((asked, own, again - ops(lambda terms=packed: list(terms.pieces()))))
    (few, *less), (many, *more) = counts
    layers, shares = ((b - a) / (many - few) for a, b in zip(less, more, strict=True))
    assert layers <= 5, "rows of the codes, as whole numbers, and two cuts of the weights from before"
    assert shares <= 2, "codes as whole numbers"


@each_kind
def test_together_the_same_is_found_as_one_by_one(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks from 1 to 6, and two LoRAs of them at each layer."""
    pipe, _ = quantised(kind, torch.bfloat16)
    for seed, name in enumerate("ab"):
        fusedit.load_lora(pipe, a_lora(pipe, seed), name, 0.7)
    kind.call(pipe)
    monkeypatch.setattr(probes, "_MOST", 1)
    alone = look(pipe, terms_of(pipe))
    for most in (30_000, 64 << 20):
        monkeypatch.setattr(probes, "_MOST", most)
        together = look(pipe, terms_of(pipe))
        torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-3, atol=1e-4)
    assert len(alone) > len(verifier.adapted(pipe.transformer))


def test_one_wrong_layer_among_many_is_the_one_that_is_found() -> None:
    pipe, _ = quantised(FLUX)
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    layers = verifier.adapted(pipe.transformer)
    wrong = layers[len(layers) // 2]
    up = wrong.layer.lora_B["a"]
    right = up.forward
    asked = Probes(CPU)
    for each in layers:
        pairs = [Branch(each.layer.lora_A["a"].weight, each.layer.lora_B["a"].weight, each.layer.scaling["a"])]
        up.forward = (lambda x: 2 * right(x)) if each is wrong else right
        with torch.no_grad():
            asked.layer(each.path, ["a"], each.layer, each.base, pairs)
    off = [probe.path for probe, result in zip(asked.asked, found(asked), strict=True) if not result.right]
    assert off == [wrong.path]


def test_a_share_without_pairs_may_add_nothing() -> None:
    x, weight = torch.ones(8, 16), torch.zeros(24, 16)
    for d, right in ((torch.zeros(1, 8, 24), True), (torch.full((1, 8, 24), 1e-3), False)):
        each, _, _ = compared(d, None, x, [joined([], weight)], torch.bfloat16)
        assert bool(each <= 1) is right


def test_several_pairs_are_one_with_all_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.zeros(24, 16), torch.randn(8, 16, generator=generator)
    pairs = [
        Branch(torch.randn(rank, 16, generator=generator), torch.randn(24, rank, generator=generator), scale)
        for rank, scale in ((3, 0.5), (8, -2.0))
    ]
    one = joined(pairs, weight)
    assert one.down.shape == (16, 16)
    assert one.scales == [0.5] * 3 + [-2.0] * 8 + [0.0] * 5
    right = sum((scale * (x @ down.t()) @ up.t() for down, up, scale in pairs), torch.zeros(8, 24))
    each, together, share = (float(t) for t in compared(right[None], None, x, [one], torch.float32))
    assert max(each, together, share) < 1e-2
    alone = joined(pairs[1:], weight)
    assert alone.down is pairs[1].down
    assert alone.up is pairs[1].up


def test_x_is_the_same_in_every_dtype() -> None:
    x = Inputs(CPU)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(x(96, dtype).float(), x(96, torch.float32))
    codes = 128 * x(96, torch.float32)
    assert torch.equal(codes.to(torch.float8_e4m3fn).float(), codes)
