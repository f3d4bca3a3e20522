"""Low-rank terms on a GPU: both halves, and products of bf16 on Hopper of which a term is more steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.ops import _linear_hopper, _low_rank, _low_rank_sums, _scaled_hopper
from fusedit.ops._fp8 import to_e4m3
from fusedit.ops._verify import error
from fusedit.ops.gelu_tanh import reference as gelu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def random(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * std).bfloat16()


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("P", [8, 32, 40, 96, 128, 512])
@pytest.mark.parametrize(
    ("B", "S", "K"), [(1, 1, 64), (2, 63, 1000), (1, 512, 12288), (2, 700, 3072), (1, 4608, 15360)]
)
def test_the_first_half_at_any_size(B: int, S: int, K: int, P: int, codes: bool) -> None:
    if codes and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs compute capability 8.9")
    x = random(B, S + 5, K)[:, 3 : 3 + S]
    down, scale, op = random(P, K, std=K**-0.5), torch.randn(P, device="cuda"), ops.registry()["low_rank"]
    if codes:
        x, down, op = to_e4m3(x.float() * 100), to_e4m3(down.float() * 100 * K**0.5), ops.registry()["scaled_low_rank"]
    t = torch.full((B, S, P + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert op.backend(x, down, scale) == ("triton", "")
    op(x, down, scale, out=t[..., :P])
    allowed = 0.005 if codes else 0.003  # the tensor cores add products of codes with about 14 bits
    assert error(t[..., :P], (x.double() @ down.double().T) * scale.double()).relative_l2 < allowed
    assert bool(t[..., P:].isnan().all())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act", ["none", "gelu", "swiglu"])
@pytest.mark.parametrize(
    ("B", "S", "K", "N", "R", "part"),
    [
        (1, 1, 16, 512, 8, 0),
        (1, 4608, 384, 6144, 32, 0),  # many tiles a program, as many steps as are in flight
        (2, 333, 400, 1568, 8, 0),  # everything ends inside a tile
        (3, 128, 3072, 768, 64, 0),
        (2, 333, 400, 2304, 32, 768),
        (1, 700, 408, 2320, 72, 512),
        (1, 333, 400, 2304, 136, 256),
    ],
)
def test_the_product_at_any_size(act: str, B: int, S: int, K: int, N: int, R: int, part: int) -> None:
    """Slices along the sequence in, slices of a wider buffer out, whose rest must stay as it was."""
    x, weight = random(B, S + 8, K)[:, 5 : 5 + S], random(N, K, std=K**-0.5)
    bias, start = None if act == "swiglu" else random(N), 256 if act == "gelu" else 0
    parts = 1 if act == "swiglu" or not part else min(3, -(-N // part))
    low = random(B, S, parts * R), random(N, R, std=R**-0.5), part if parts > 1 else 0
    assert _linear_hopper.shape_reason(x, weight) == ""
    assert _scaled_hopper.low_reason(*low, pair=act == "swiglu") == ""
    u = x.double() @ weight.double().T + _low_rank.low_rank(low[0].double(), low[1].double(), low[2])
    u += 0 if bias is None else bias.double()
    if act == "swiglu":
        a, b = u.chunk(2, dim=-1)
        truth = a * a.sigmoid() * b
    else:
        truth = u if act == "none" else torch.cat([u[..., :start], gelu(u[..., start:])], dim=-1)
    wide = torch.full((B, S + 7, truth.shape[-1] + 48), float("nan"), dtype=torch.bfloat16, device="cuda")
    y = wide[:, 3 : 3 + S, 16 : 16 + truth.shape[-1]]
    _linear_hopper.into(act, x, weight, bias, y, start, *low)
    assert error(y, truth).relative_l2 < 0.006
    y.fill_(float("nan"))
    assert bool(wide.isnan().all())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("low_rank", "flux-single"),
        ("scaled_low_rank", "flux-single"),
        ("linear_low_rank", "flux-qkv"),
        ("linear_gelu", "flux-single-lora"),
        ("linear_swiglu", "z-image-lora"),
    ],
)
def test_lengths_and_ranks_compile_nothing(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    op = ops.registry()[name]
    args, _ = next(c for c in op.cases if c.name == which).build(torch.bfloat16, "cuda")
    assert op.backend(*args).name in ("hopper", "triton")

    def cut(first: int, last: int) -> tuple[Any, ...]:
        tokens = args[0].shape[:2]
        return tuple(t[:, first:last] if getattr(t, "shape", ())[:2] == tokens else t for t in args)

    op(*cut(0, 1))
    if name in ("low_rank", "scaled_low_rank"):
        _low_rank_sums.make_ready(args[0][:, :1], args[1], torch.bfloat16)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *_, **info: compiled.append(str(info)))
    truth = op(*args)
    for first, last in ((0, 1), (3, 131), (64, 1600), (7, 2823), (1, 4000)):
        assert error(op(*cut(first, last)), truth[:, first:last].double()).relative_l2 < 0.01
    if name in ("low_rank", "scaled_low_rank"):
        for ranks in (8, 16, 24, 72, 120):
            assert error(op(args[0], args[1][:ranks], args[2][:ranks]), truth[..., :ranks].double()).relative_l2 < 0.01
    else:
        place = next(i for i, t in enumerate(args) if getattr(t, "shape", ())[:2] == args[0].shape[:2] and i)
        t, up, *part = args[place:]
        P = t.shape[-1] // up.shape[1]
        for ranks in (8, 16):
            fewer = t.view(*t.shape[:2], P, -1)[..., :ranks].flatten(2), up[:, :ranks].contiguous(), *part
            assert bool(op(*args[:place], *fewer).isfinite().all())
    assert compiled == []


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "which"),
    [("linear_low_rank", "flux-qkv"), ("linear_gelu", "flux-single-lora"), ("linear_swiglu", "z-image-lora")],
)
def test_a_term_takes_no_memory(name: str, which: str) -> None:
    op = ops.registry()[name]
    args, _ = next(c for c in op.cases if c.name == which).build(torch.bfloat16, "cuda")
    assert op.backend(*args) == ("hopper", "")
    out = op(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    op(*args, out=out)
    assert torch.cuda.max_memory_allocated() == before


def test_in_a_graph() -> None:
    x, down, scale = random(1, 600, 3072), random(64, 3072, std=0.02), torch.ones(64, device="cuda")
    weight, up = random(4096, 3072, std=0.02), random(4096, 64, std=0.1)

    def run() -> Tensor:
        return ops.linear_low_rank(x, weight, None, ops.low_rank(x, down, scale), up)

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    made.zero_()
    scale.mul_(2)  # what a graph reads anew
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(made, expected)
    scale.div_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)
