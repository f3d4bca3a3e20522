"""Products of e4m3 beside what every op is tested for: libraries that fail, sides of a packed product, limits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _low_rank, _scaled, _scaled_ends, _scaled_hopper, _scaled_library, _triton
from fusedit.ops._fp8 import E4M3, to_e4m3
from fusedit.ops._op import Backend
from fusedit.ops._verify import error, misrounded

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_scaled_library, "_failed", {})
    with torch.no_grad():
        yield


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries as on compute capability 9.0; torch has their scaled product on a CPU too."""
    monkeypatch.setattr(_triton, "capability", lambda _: (9, 0))
    monkeypatch.setattr(_scaled_library, "_strided", {0: True})


def operands(*shape: int, N: int = 96) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight = (to_e4m3(torch.randn(size) * 100) for size in (shape, (N, shape[-1])))
    return x, (torch.rand(shape[:-1]) + 0.5) / 100, weight, (torch.rand(N) + 0.5) / (100 * shape[-1] ** 0.5)


# -- the libraries -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("takes_slices", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_libraries_write_into_any_rows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, takes_slices: bool) -> None:
    monkeypatch.setattr(_scaled_library, "_strided", {0: takes_slices})
    x, x_scale, weight, weight_scale = operands(2, 40, 64)
    x, x_scale, bias = x[:, 3:35], x_scale[:, 3:35], torch.randn(96)
    truth = _scaled.product(x.double(), x_scale.double(), weight, weight_scale.double(), bias.double())
    name = "rowwise" if dtype is torch.bfloat16 else "tensorwise"
    assert _scaled_library.choose(x, weight, dtype).name == name
    buffer = torch.full((2, 50, 200), float("nan"), dtype=dtype)
    for y in (buffer[:, 8:40, 8:104], buffer[:, :32, 5:101], buffer[:, :32, ::2][..., :96], torch.empty(2, 32, 96)):
        y = y.to(dtype) if y.dtype is not dtype else y
        assert _scaled_library.run(x, x_scale, weight, weight_scale, bias, y, name) == name
        assert error(y, truth).relative_l2 < (0.004 if dtype is torch.bfloat16 else 4e-4)
        y.fill_(float("nan"))
    assert bool(buffer.isnan().all())


@pytest.mark.usefixtures("hopper")
def test_a_failed_library_is_not_asked_again_for_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch._scaled_mm, []

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(kwargs["scale_a"].numel())
        if kwargs["scale_a"].numel() > 1 or args[0].shape[0] < 16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    for rows, served, tries in ((40, "tensorwise", [40, 1]), (40, "tensorwise", [1]), (8, "dequantised", [8, 1])):
        x, x_scale, weight, weight_scale = operands(rows, 64)
        first = _scaled_library.choose(x, weight, torch.bfloat16)
        y = torch.full((rows, 96), float("nan"), dtype=torch.bfloat16)
        asked.clear()
        assert _scaled_library.run(x, x_scale, weight, weight_scale, None, y, first.name) == served
        assert asked == tries
        truth = _scaled.product(x.double(), x_scale.double(), weight, weight_scale.double())
        assert error(y, truth).relative_l2 < 0.004
    again = _scaled_library.choose(x, weight, torch.bfloat16)
    failed = "failed for these sizes (CUBLAS_STATUS_NOT_SUPPORTED)"
    assert again == ("dequantised", f"rowwise: {failed}; tensorwise: {failed}")
    assert _scaled_library.choose(operands(200, 64)[0], weight, torch.bfloat16) == ("rowwise", "")


@pytest.mark.parametrize(
    ("capability", "K", "N", "words"),
    [
        ((8, 6), 64, 96, "products of e4m3 need compute capability 8.9, not 8.6"),
        ((9, 0), 50, 96, "takes inputs and outputs in multiples of 16, not 50 and 96"),
        ((9, 0), 64, 35, "takes inputs and outputs in multiples of 16, not 64 and 35"),
        ((12, 0), 0, 96, "takes inputs and outputs in multiples of 16, not 0 and 96"),
    ],
)
def test_what_no_scaled_product_takes_is_dequantised(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], K: int, N: int, words: str
) -> None:
    monkeypatch.setattr(_triton, "capability", lambda _: capability)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, x_scale, weight, weight_scale = operands(7, max(K, 1), N=N)
    x, weight = x[:, :K], weight[:, :K]
    chosen = _scaled_library.choose(x, weight, torch.bfloat16)
    assert chosen.name == "dequantised"
    assert words in chosen.reason
    y, bias = torch.full((7, N), float("nan"), dtype=torch.bfloat16), torch.randn(N)
    assert _scaled_library.run(x, x_scale, weight, weight_scale, bias, y, chosen.name) == "dequantised"
    truth = _scaled.product(x.double(), x_scale.double(), weight, weight_scale.double(), bias.double())
    assert error(y, truth).relative_l2 < 0.004


@pytest.mark.usefixtures("hopper")
def test_half_precision_does_not_overflow_from_unscaled_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8-05."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight = (torch.full(shape, 448.0).to(E4M3) for shape in ((16, 64), (96, 64)))
    scale, weight_scale = torch.full((16,), 1e-3), torch.full((96,), 1e-3)  # sums of 1.3e7
    for name in ("tensorwise", "dequantised"):
        y = torch.empty(16, 96, dtype=torch.float16)
        _scaled_library.run(x, scale, weight, weight_scale, None, y, name)
        assert bool(((y - 12.845).abs() < 0.01).all()), name


# -- sides of a packed product, and what follows one ---------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 32, 40, 64, 96])
@pytest.mark.parametrize("low", [False, True])
def test_gelu_on_one_side(monkeypatch: pytest.MonkeyPatch, start: int, low: bool) -> None:
    """As two products and a pass, the low-rank term cut at `start`, in the middle of a part too."""
    op = ops.registry()["scaled_linear_gelu"]
    x, x_scale, weight, weight_scale = operands(2, 9, 64)
    bias, g_scale = torch.randn(96), torch.rand(2, 9) / 30 + 0.01
    term: tuple[Any, ...] = (30 * torch.randn(2, 9, 24), 300 * torch.randn(96, 8), 32) if low else (None, None, 0)
    arguments = (x, x_scale, weight, weight_scale, bias, g_scale, start, "float32", *term)
    module = importlib.import_module("fusedit.ops.scaled_linear_gelu")
    monkeypatch.setattr(module, "choose", lambda *_: Backend("separate", "for this test"))
    wide = torch.full((2, 9, 120), float("nan")).to(E4M3)
    y, g = op(*arguments, out=(torch.empty(2, 9, start), wide[..., 24 : 120 - start]))
    truth_y, truth_g = op.reference(*(t.double() if isinstance(t, Tensor) else t for t in arguments))
    assert error(y, truth_y).relative_l2 < 1e-6
    assert misrounded(g, truth_g, 1e-5) == 0
    assert bool(wide[..., :24].float().isnan().all())


@pytest.mark.parametrize("first", [0, 32, 40])
def test_a_side_of_a_low_rank_term(first: int) -> None:
    t, up = torch.randn(5, 24), torch.randn(96, 8)
    whole = _low_rank.low_rank(t, up, 32)
    for last in (first, 64, 80, 96):
        side_t, side_up, part = _low_rank.side(t, up, 32, first, last)
        if first == last:
            assert side_t is None and side_up is None  # noqa: PT018
        else:
            assert side_t is not None and side_up is not None  # noqa: PT018
            torch.testing.assert_close(_low_rank.low_rank(side_t, side_up, part), whole[:, first:last])


def test_activations_in_the_interpreter(run_python: Callable[..., str]) -> None:
    """The kernel behind a product: codes as fp32 arithmetic gives them, nothing written beside them."""
    code = """
import json, torch
from fusedit.ops import _scaled_ends, _triton
from fusedit.ops._fp8 import E4M3
from fusedit.ops._verify import misrounded
assert _triton.INTERPRETING
found = {}
for pair in (False, True):
    for shape in ((2, 5, 64), (7, 96), (1, 3, 2304), (2, 3, 75), (1, 1, 1)):
        for place in ("dense", "sliced", "gapped"):
            C = shape[-1]
            u = (2 * torch.randn(*shape[:-1], 2 * C if pair else C)).half()
            scale = torch.rand(*shape[:-1]) * 0.03 + 0.005
            scale[..., 0] = float("nan")
            buffer = torch.full((*shape[:-1], 2 * C + 32), float("nan")).to(E4M3)
            views = {"dense": buffer[..., :C].clone(), "sliced": buffer[..., 16 : 16 + C]}
            g = {**views, "gapped": buffer[..., : 2 * C : 2]}[place]
            _scaled_ends.finish(u, scale, g, pair)
            wrong = misrounded(g, _scaled_ends.before_rounding(u.double(), scale.double(), pair), 1e-6)
            hidden = int((~g[..., 0, :].float().isnan()).sum())
            g.fill_(float("nan"))
            found[f"{pair} {shape} {place}"] = [wrong, hidden, int((~buffer.float().isnan()).sum())]
print(json.dumps(found))
"""
    found = json.loads(run_python(code, TRITON_INTERPRET="1").splitlines()[-1])
    assert len(found) == 30
    assert all(counts == [0, 0, 0] for counts in found.values()), found


def test_what_is_not_finite_shows() -> None:
    x, x_scale, weight, weight_scale = operands(3, 64)
    x_scale[1] = float("nan")
    g_scale = torch.tensor([1e-4, 1e-2, float("nan")])
    y, g = ops.scaled_linear_gelu(x, x_scale, weight, weight_scale, None, g_scale, 32)
    assert [bool(row.isnan().all()) for row in y] == [False, True, False]
    assert [bool(row.isnan().all()) for row in g.float()] == [False, True, True]
    assert float(g[0].float().max()) == 448.0  # saturates, and is a number
    assert not bool(g[0].float().isnan().any())


# -- the kernel for Hopper, without one ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "gapped", "unaligned", "transposed"])
@pytest.mark.parametrize("act", ["none", "gelu", "swiglu"])
def test_results_that_the_copy_engine_cannot_write(monkeypatch: pytest.MonkeyPatch, act: str, layout: str) -> None:
    """into() gives the kernel three dimensions and rows on 16 bytes, and its results where they belong."""
    N, start = 512, 256 if act == "gelu" else 0
    x, x_scale, weight, weight_scale = operands(40, 64, N=N)
    g_scale = torch.rand(40) / 30 + 0.01

    def emulate(act: str, *given: Any) -> None:
        x, x_scale, weight, weight_scale, bias, y, g, g_scale, start, *low = given
        assert x.ndim == 3
        for t in (y, g):
            assert t is None or (t.ndim == 3 and t.stride(-1) == 1 and t.data_ptr() % 16 == 0)
        u = _scaled.product(x, x_scale, weight, weight_scale, bias, *low)
        if y is not None:
            y.copy_(u if act == "none" else u[..., :start])
        if g is not None:
            g.copy_(to_e4m3(_scaled_ends.before_rounding(u[..., start:], g_scale, act == "swiglu")))

    def place(columns: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.full((41 * 2 * columns + 8,), float("nan")).to(dtype)
        if layout == "gapped":
            return buffer[: 40 * 2 * columns].view(40, 2 * columns)[:, ::2]
        if layout == "unaligned":
            return buffer[1 : 1 + 40 * columns].view(40, columns)
        if layout == "transposed":
            return buffer[: 40 * columns].view(columns, 40).t()
        return buffer[: 40 * columns].view(40, columns)

    monkeypatch.setattr(_scaled_hopper, "launch", emulate)
    y = place(start or N, torch.bfloat16) if act != "swiglu" else None
    g = place({"gelu": N - start, "swiglu": N // 2}[act], E4M3) if act != "none" else None
    _scaled_hopper.into(act, x, x_scale, weight, weight_scale, None, y, g, g_scale, start)
    u = _scaled.product(x.double(), x_scale.double(), weight, weight_scale.double())
    if y is not None:
        assert error(y, u[:, : y.shape[1]]).relative_l2 < 0.004
    if g is not None:
        truth = _scaled_ends.before_rounding(u[:, start:], g_scale.double(), act == "swiglu")
        assert misrounded(g, truth, 1e-5) == 0


@pytest.mark.parametrize(
    ("t", "up", "part", "pair", "words"),
    [
        (torch.ones(4, 16).bfloat16(), torch.ones(512, 16).bfloat16(), 0, False, ""),
        (torch.ones(4, 16).bfloat16(), torch.ones(512, 16).bfloat16(), 0, True, ""),
        (torch.ones(4, 32).bfloat16(), torch.ones(512, 16).bfloat16(), 256, False, ""),
        (torch.ones(4, 32).bfloat16(), torch.ones(512, 16).bfloat16(), 256, True, "do not begin where tiles do"),
        (torch.ones(4, 32).bfloat16(), torch.ones(512, 16).bfloat16(), 128, False, "do not begin where tiles do"),
        (torch.ones(4, 16), torch.ones(512, 16), 0, False, "in bfloat16, not float32"),
        (torch.ones(4, 12).bfloat16(), torch.ones(512, 12).bfloat16(), 0, False, "not on 16 bytes"),
        (torch.ones(16, 4).bfloat16().t(), torch.ones(512, 16).bfloat16(), 0, False, "not on 16 bytes"),
        (None, None, 0, True, ""),
    ],
)
def test_low_rank_terms_of_the_kernel(t: Tensor | None, up: Tensor | None, part: int, pair: bool, words: str) -> None:
    said = _scaled_hopper.low_reason(t, up, part, pair)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize("name", ["scaled_linear", "scaled_linear_gelu", "scaled_linear_swiglu"])
def test_the_kernel_multiplies_e4m3_and_bf16_on_tensor_cores(compiled: dict[str, Any], name: str) -> None:
    if not ops.registry()[name].builds():
        pytest.skip("no Gluon here")
    made = compiled[f"{name}/hopper/90"]["products"]
    assert made == [
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3",
    ]


# -- arguments -----------------------------------------------------------------------------------------------------

X, XS, W, WS = operands(3, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": X.float()}, "x must be float8_e4m3fn, not float32[3, 64] on cpu; make it with quantize_rows"),
        ({"weight": W.bfloat16()}, "weight must be float8_e4m3fn, not bfloat16[96, 64]"),
        ({"weight": W[:, :60]}, "weight must be float8_e4m3fn[96, 64] on cpu, not float8_e4m3fn[96, 60]"),
        ({"x_scale": XS[:, None]}, "x_scale must be float32[3] on cpu, not float32[3, 1]"),
        ({"x_scale": XS.half()}, "x_scale must be float32[3] on cpu, not float16[3]"),
        ({"weight_scale": WS[:1]}, "weight_scale must be float32[96] on cpu, not float32[1]"),
        ({"bias": torch.ones(95)}, "bias must be [N] = [96], floating point on cpu, not float32[95]"),
        ({"dtype": "int8"}, "dtype must be bfloat16, float16, float32, not str 'int8'"),
        ({"dtype": torch.bfloat16}, "dtype must be a name, not dtype torch.bfloat16"),
        ({"up": torch.ones(96, 4)}, "t is None; a low-rank term needs both t and up"),
        ({"t": torch.ones(3, 4)}, "up is None; a low-rank term needs both t and up"),
        (
            {"t": torch.ones(3, 6), "up": torch.ones(96, 4)},
            "t must have the 4 ranks of up once a part, not float32[3, 6]",
        ),
        ({"t": torch.ones(3, 0), "up": torch.ones(96, 0)}, "t must have the 0 ranks of up once a part"),
        ({"t": torch.ones(3, 4).half(), "up": torch.ones(96, 4)}, "t must be float32[3, 4] on cpu, not float16[3, 4]"),
        (
            {"t": torch.ones(3, 8), "up": torch.ones(96, 4)},
            "part must be how many of 96 columns each of 2 parts has, not 0",
        ),
        ({"t": torch.ones(3, 8), "up": torch.ones(96, 4), "part": 96}, "part must be how many of 96 columns"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    given = {"x": X, "x_scale": XS, "weight": W, "weight_scale": WS, "bias": None, **change}
    for call in (ops.scaled_linear, ops.scaled_linear.backend):
        with pytest.raises(OpError) as raised:
            call(**given)
        assert str(raised.value).startswith(f"scaled_linear: {words}")


def test_scales_and_halves_that_do_not_fit() -> None:
    with pytest.raises(OpError, match=r"g_scale must be float32\[3\] on cpu, not float32\[96\]"):
        ops.scaled_linear_gelu(X, XS, W, WS, None, WS)
    with pytest.raises(OpError, match=r"start must be an integer from 0 to 96, the outputs of weight, not 97"):
        ops.scaled_linear_gelu(X, XS, W, WS, None, XS, 97)
    with pytest.raises(OpError, match=r"weight must have an even number of rows, not float8_e4m3fn\[95, 64\]"):
        ops.scaled_linear_swiglu(X, XS, W[:95], WS[:95], XS)
    with pytest.raises(OpError, match=r"out\[0\] must be bfloat16\[3, 32\] on cpu, not float32\[3, 32\]"):
        ops.scaled_linear_gelu(X, XS, W, WS, None, XS, 32, out=(torch.empty(3, 32), torch.empty(3, 64).to(E4M3)))
