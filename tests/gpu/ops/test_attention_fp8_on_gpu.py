"""8-bit attention on Hopper: every variant of the kernel against the same arithmetic in torch, ends, graphs."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusedit import ops
from fusedit.ops import _attention_fp8, _attention_fp8_plain
from fusedit.ops._attention_fp8 import Variant
from fusedit.ops._attention_fp8_weights import EXACT, LINEAR, QUADRATIC
from fusedit.ops._verify import error

Tensor = torch.Tensor
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]
KINDS = ((EXACT, EXACT), (LINEAR, LINEAR), (EXACT, QUADRATIC), (LINEAR, EXACT))


def packed(B: int, S: int, T: int, H: int) -> list[Tensor]:
    x = torch.randn(B, max(S, T), 3, H, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(S))
    x[:, :, 1:] += 2.0
    return [t[:, :n] for t, n in zip(x.bfloat16().unbind(2), (S, T, T), strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1, 128, 128, 1), (2, 300, 515, 3), (1, 1, 1, 2), (1, 700, 77, 70)], ids=str)
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "e4m3"])
def test_kernel_agrees_with_torch(sizes: tuple[int, int, int, int], int8: bool) -> None:
    q, k, v = packed(*sizes)
    made = _attention_fp8.quantise(q, k, v, 128**-0.5, int8=int8)
    for (left, right), turns, apart in itertools.product(KINDS, (True, False), (True, False)):
        variant = Variant(int8, left, right, turns, apart)
        o = torch.full(q.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        expected = torch.empty(q.shape, device="cuda")
        _attention_fp8.attend(made, k.shape[1], o, variant)
        _attention_fp8_plain.attend(made, k.shape[1], expected, variant)
        # Weights near the middle of two codes of e4m3 may get the other one, and results that of two numbers in bf16,
        # which around 2 lie far apart beside what keys add to it; in a wrong order these would be off by about 1.
        assert error(o - 2.0, expected.bfloat16().double() - 2.0).relative_l2 < 0.06, variant


@torch.no_grad()
def test_one_variant_serves_every_length_and_a_graph() -> None:
    x = packed(1, 333, 333, 2)
    before = ops.attention_fp8.ran["hopper"]
    expected = ops.attention_fp8(*x)
    assert ops.attention_fp8.ran["hopper"] == before + 1
    assert ops.attention_fp8.backend(*x) == ("hopper", "")
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attention_fp8(*x, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(ops.attention_fp8(*x), expected)  # the same bits every time


@torch.no_grad()
def test_nan_and_inf_show() -> None:
    for place, value in ((0, "nan"), (1, "inf"), (2, "-inf")):
        x = [t.clone() for t in packed(1, 300, 300, 2)]
        x[place][0, 200, 1, 9] = float(value)
        o = ops.attention_fp8(*x)
        assert o[0, :, 0].isfinite().all()
        assert o[0, 200, 1].isnan().all()
        assert bool(o[0, :200, 1].isnan().all()) == (place > 0)


@torch.no_grad()
@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_logits_of_any_size(size: float) -> None:
    q, k, v = packed(1, 260, 390, 2)
    q = (q.float() * size).bfloat16()
    o = ops.attention_fp8(q, k, v)
    truth = ops.attention.reference(q.double(), k.double(), v.double())
    plain = error(ops.attention_fp8.plain(q, k, v), truth)
    assert error(o, truth).relative_l2 < 1.5 * plain.relative_l2 + 0.01


@torch.no_grad()
def test_who_serves_instead() -> None:
    x = packed(1, 130, 130, 2)
    mask = torch.ones(1, 130, dtype=torch.bool, device="cuda")
    assert ops.attention_fp8.backend(*x, mask) == ("attention", "takes no mask")
    assert ops.attention_fp8.backend(*(t[..., :64] for t in x)).reason == "takes heads of 128, not 64"
    assert ops.attention_fp8.backend(*(t.half() for t in x)).reason == "takes bfloat16, not float16"
