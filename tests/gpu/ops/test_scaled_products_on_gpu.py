"""Products of e4m3 on a GPU: the libraries, and the kernel for Hopper at every kind of size, slice and term."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.ops import _scaled, _scaled_ends, _scaled_hopper, _scaled_library
from fusedit.ops._fp8 import E4M3, to_e4m3
from fusedit.ops._verify import error, misrounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def operands(B: int, S: int, K: int, N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight = (to_e4m3(torch.randn(size, device="cuda") * 100) for size in ((B, S, K), (N, K)))
    x_scale, weight_scale = (torch.rand(size, device="cuda") + 0.5 for size in ((B, S), (N,)))
    return x, x_scale / 100, weight, weight_scale / (100 * K**0.5)


def rank(B: int, S: int, K: int, N: int, R: int, parts: int) -> tuple[Tensor, Tensor]:
    t = 30 * torch.randn(B, S, parts * R, device="cuda")
    return t.bfloat16(), (100 * (K / R) ** 0.5 * torch.randn(N, R, device="cuda")).bfloat16()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act", ["none", "gelu", "swiglu"])
@pytest.mark.parametrize(
    ("B", "S", "K", "N", "R", "part"),
    [
        (1, 1, 16, 512, 0, 0),
        (1, 4608, 384, 6144, 0, 0),  # many tiles a program, as many steps as are in flight
        (2, 333, 400, 1568, 0, 0),  # everything ends inside a tile
        (3, 128, 3072, 768, 8, 0),
        (2, 333, 400, 2304, 32, 768),
        (1, 700, 400, 2336, 64, 512),
        (1, 333, 400, 2304, 136, 256),
    ],
)
def test_the_kernel_at_any_size(act: str, B: int, S: int, K: int, N: int, R: int, part: int) -> None:
    """Slices along the sequence in, slices of a wider buffer out, whose rest must stay as it was."""
    x, x_scale, weight, weight_scale = operands(B, S + 8, K, N)
    x, x_scale = x[:, 5 : 5 + S], x_scale[:, 5 : 5 + S]
    bias = None if act == "swiglu" else torch.randn(N, device="cuda").bfloat16()
    start = 256 if act == "gelu" else 0
    parts = 1 if act == "swiglu" or not part else min(3, -(-N // part))
    t, up = rank(B, S, K, N, R, parts) if R else (None, None)
    low = (t, up, part if parts > 1 else 0)
    assert _scaled_hopper.reason(x, weight, act == "swiglu") == ""
    assert _scaled_hopper.low_reason(*low, pair=act == "swiglu") == ""
    u = _scaled.product(
        *(x.double(), x_scale.double(), weight.double(), weight_scale.double()),
        *(None if bias is None else bias.double(), *low),
    )
    g_scale = torch.rand(B, S, device="cuda") / 30 + 0.01
    columns = {"none": N, "gelu": start, "swiglu": 0}[act]
    wide = torch.full((B, S + 7, columns + 48), float("nan"), dtype=torch.bfloat16, device="cuda")
    codes = torch.full((B, S + 7, N + 48), float("nan"), device="cuda").to(E4M3)
    y = wide[:, 3 : 3 + S, 16 : 16 + columns] if columns else None
    count = {"none": 0, "gelu": N - start, "swiglu": N // 2}[act]
    g = codes[:, 3 : 3 + S, 32 : 32 + count] if count else None
    _scaled_hopper.into(act, x, x_scale, weight, weight_scale, bias, y, g, g_scale, start, *low)
    if y is not None:
        assert error(y, u[..., :columns]).relative_l2 < 0.005
        y.fill_(float("nan"))
    if g is not None:
        truth = _scaled_ends.before_rounding(u[..., start:], g_scale.double(), act == "swiglu")
        assert misrounded(g, truth, _scaled.GATED if act == "swiglu" else _scaled.CODES) == 0
        kept = to_e4m3(truth)
        assert error(g, truth).relative_l2 < 1.05 * error(kept, truth).relative_l2 + 1e-3
        g.view(torch.uint8).fill_(0x7F)
    assert bool(wide.isnan().all())
    assert bool(codes.float().isnan().all())


@pytest.mark.parametrize("N", [64, 3072, 3080])
@pytest.mark.parametrize("K", [3072, 9216, 12288])
def test_no_size_is_refused_by_what_serves_it(K: int, N: int) -> None:
    """FP8-02: libraries refuse some of these on some chips. 3080 outputs are no multiple of 16."""
    x, x_scale, weight, weight_scale = operands(1, 4096, K, N)
    truth = _scaled.product(x.double(), x_scale.double(), weight.double(), weight_scale.double())
    for rows in (1, 2, 15, 16, 17, 127, 256, 257, 4096):
        y = ops.scaled_linear(x[:, :rows], x_scale[:, :rows], weight, weight_scale, None)
        assert error(y, truth[:, :rows]).relative_l2 < 0.005, rows


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("N", [2320, 6160])
def test_a_gate_whose_rows_of_codes_end_inside_16_bytes_is_the_library_s(N: int) -> None:
    """The copy engine would write codes beyond the row, into whatever lies there."""
    x, x_scale, weight, weight_scale = operands(1, 4608, 400, N)
    g_scale = torch.rand(1, 4608, device="cuda") / 30 + 0.01
    backend = ops.scaled_linear_swiglu.backend(x, x_scale, weight, weight_scale, g_scale)
    assert backend == ("separate", f"writes 16 codes at a time, not {N // 2} a row")
    codes = torch.full((1, 4608, N // 2 + 40), float("nan"), device="cuda").to(E4M3)
    g = codes[..., 16 : 16 + N // 2]
    ops.scaled_linear_swiglu(x, x_scale, weight, weight_scale, g_scale, out=g)
    u = _scaled.product(x.double(), x_scale.double(), weight.double(), weight_scale.double())
    assert misrounded(g, _scaled_ends.before_rounding(u, g_scale.double(), True), _scaled.GATED) == 0
    g.view(torch.uint8).fill_(0x7F)
    assert bool(codes.float().isnan().all())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "which"), [("scaled_linear_gelu", "flux-single"), ("scaled_linear_swiglu", "z-image")]
)
def test_lengths_of_the_models_compile_nothing(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    op = ops.registry()[name]
    case = next(c for c in op.cases if c.name == which)
    args, _ = case.build(torch.bfloat16, "cuda")
    assert op.backend(*args) == ("hopper", "")

    def cut(first: int, last: int) -> tuple[Any, ...]:
        tokens = args[0].shape[:2]
        return tuple(t[:, first:last] if getattr(t, "shape", ())[:2] == tokens else t for t in args)

    op(*cut(0, 1))
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *_, **info: compiled.append(str(info)))
    op.ran.clear()
    truth = op(*args)
    truth = truth if isinstance(truth, tuple) else (truth,)
    for first, last in ((0, 1), (3, 131), (64, 1600), (7, 2823), (5, 2309), (1, 4000)):
        part = op(*cut(first, last))
        for a, b in zip(part if isinstance(part, tuple) else (part,), truth, strict=True):
            assert (
                error(a.float(), b[:, first:last].double()).relative_l2 < 0.03
            )  # a code here and there is the next one
    assert compiled == []
    assert set(op.ran) == {"hopper", "separate"}


def test_libraries_serve_and_say_so() -> None:
    x, x_scale, weight, weight_scale = operands(2, 512, 3072, 3072)
    truth = _scaled.product(x.double(), x_scale.double(), weight.double(), weight_scale.double())
    for dtype in ("bfloat16", "float16", "float32"):
        backend = ops.scaled_linear.backend(x, x_scale, weight, weight_scale, None, dtype)
        y = ops.scaled_linear(x, x_scale, weight, weight_scale, None, dtype)
        assert error(y, truth).relative_l2 < 0.005, backend
    if torch.cuda.get_device_capability() == (9, 0):
        assert ops.scaled_linear.backend(x, x_scale, weight, weight_scale, None) == ("rowwise", "")
    for name in _scaled_library.NAMES:  # each of them, whichever is chosen
        y = torch.full((2, 512, 6200), float("nan"), dtype=torch.bfloat16, device="cuda")
        _scaled_library.run(x, x_scale, weight, weight_scale, None, y[..., 8:3080], name)
        assert error(y[..., 8:3080], truth).relative_l2 < 0.005
        assert bool(y[..., :8].isnan().all())
        assert bool(y[..., 3080:].isnan().all())


@pytest.mark.parametrize(("rows", "K"), [(1, 3072), (17, 15360), (200, 15360), (256, 10240), (512, 12288)])
def test_few_rows_and_long_sums(rows: int, K: int) -> None:
    """Where some versions of cuBLAS have no row-wise product, the next library serves."""
    x, x_scale, weight, weight_scale = operands(1, rows, K, 3072)
    bias = torch.randn(3072, device="cuda").bfloat16()
    y = ops.scaled_linear(x, x_scale, weight, weight_scale, bias)
    truth = _scaled.product(x.double(), x_scale.double(), weight.double(), weight_scale.double(), bias.double())
    assert error(y, truth).relative_l2 < 0.005


def test_in_a_graph() -> None:
    x, x_scale, weight, weight_scale = operands(1, 600, 3072, 4096)
    g_scale = torch.rand(1, 600, device="cuda") / 30 + 0.01
    expected = ops.scaled_linear_gelu(x, x_scale, weight, weight_scale, None, g_scale, 1024)
    out = tuple(torch.empty_like(t) for t in expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.scaled_linear_gelu(x, x_scale, weight, weight_scale, None, g_scale, 1024, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1].view(torch.uint8), expected[1].view(torch.uint8))
