"""e4m3 rows: what saturates and what is NaN, scales and lengths, and that a bound known before a product is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _fp8, _triton
from fusedit.ops._verify import error, misrounded

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
HERE = Path(__file__).parent
BEYOND = torch.tensor([447.0, 448.0, 449.0, 460.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def dequantized(q: Tensor, s: Tensor) -> Tensor:
    return q.float() * s[..., None]


def ulp(x: Tensor) -> Tensor:
    """The step between e4m3 codes at x."""
    return torch.ldexp(torch.ones_like(x), x.abs().clamp_min(2.0**-6).frexp().exponent - 4)


# -- casts ---------------------------------------------------------------------------------------------------------


def test_the_cast_saturates_and_keeps_nan() -> None:
    """FP8-04, with the one below."""
    q = _fp8.to_e4m3(BEYOND).float()
    assert q[:8].tolist() == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0]
    assert q[8].isnan()


def test_given_scales_saturate_numbers_and_show_inf_and_nan() -> None:
    """FP8-04."""
    q = ops.scale_rows(BEYOND[None], torch.ones(1))[0].float()
    assert q[:6].tolist() == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
    assert q[6:].isnan().all()
    assert ops.scale_rows(torch.ones(1, 3), torch.tensor([torch.nan])).float().isnan().all()


def test_the_kernels_give_the_bits_of_torch() -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join(filter(None, (str(HERE.parents[2] / "src"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, HERE / "run_fp8_rows.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    assert [name for name, right in found.items() if not right] == []


def test_codes_that_are_not_the_nearest_are_found() -> None:
    truth = torch.randn(4096, dtype=torch.float64) * 100
    right = _fp8.to_e4m3(truth)
    assert misrounded(right, truth, 1e-6) == 0
    cut = (right.view(torch.uint8) - ((right.double().abs() > truth.abs()) & (right.double() != 0)).byte()).view(E4M3)
    assert misrounded(cut, truth, 1e-6) > 1000  # rounded towards zero
    up = right.clone()
    up.view(torch.uint8)[17] += 1
    assert misrounded(up, truth, 1e-6) == 1
    up.view(torch.uint8)[17] = 127
    assert misrounded(up, truth, 1e-6) == 1
    powers = torch.tensor([2.0**k for k in range(-6, 9)], dtype=torch.float64)
    assert misrounded(_fp8.to_e4m3(powers), powers * (1 - 2.0**-5 + 1e-9), 0.0) == 0
    assert misrounded(_fp8.to_e4m3(powers), powers * (1 - 2.0**-5 - 1e-3), 0.0) == len(powers) - 1  # 2^-6: longer step


# -- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not() -> None:
    x = torch.randn(5, 32)
    x[1, 3], x[2, 0], x[3, 31] = torch.inf, -torch.inf, torch.nan
    q, s, length = ops.quantize_rows(x)
    assert dequantized(q, s)[1:4].isnan().all()
    assert s[1:4].isnan().all()
    assert length[1:4].isnan().all()
    assert dequantized(q, s)[[0, 4]].isfinite().all()
    v = torch.zeros(1, 32)
    for made in (
        ops.layer_norm_modulate_fp8(x[None], v, v),
        ops.gated_residual_layer_norm_fp8(x[None], x[None], v, v, v)[1:],
        ops.rms_norm_modulate_fp8(x[None], None, v),
        ops.rms_gated_residual_rms_norm_fp8(x[None], x[None], v[0], v, v[0], v)[1:],
    ):
        assert dequantized(made[0], made[1])[0, 1:4].isnan().all()
        assert dequantized(made[0], made[1])[0, [0, 4]].isfinite().all()


def test_rows_of_zeros_have_the_scale_one() -> None:
    q, s, length = ops.quantize_rows(torch.tensor([[0.0, -0.0], [1e-30, -1e-40], [2.0**-91, 0.0]]))
    assert s[:2].tolist() == [1.0, 1.0]
    assert length[:2].tolist() == [0.0, 0.0]
    assert q[:2].float().abs().max() == 0
    assert s[2] == torch.tensor(2.0**-91) / 448
    assert q[2, 0].float() == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_as_near_as_codes_can_be(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 40, 200) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    q, s, length = ops.quantize_rows(x)
    assert (q.dtype, s.dtype, length.dtype) == (E4M3, torch.float32, torch.float32)
    assert (q.float().abs().amax(-1) == 448).all()
    assert torch.equal(s, x.float().abs().amax(-1) / 448)
    t = x.double() / s.double()[..., None]
    assert ((q.double() - t).abs() <= ulp(t) / 2 * (1 + 1e-5)).all()
    assert torch.allclose(length, dequantized(q, s).norm(dim=-1), rtol=1e-6)


def test_codes_into_columns_of_a_wider_buffer() -> None:
    x, buffer = torch.randn(2, 5, 64), torch.full((2, 9, 160), 3.0).to(E4M3)
    scales, lengths = torch.full((2, 9), -1.0), torch.full((2, 9), -1.0)
    made = ops.quantize_rows(x)
    ops.quantize_rows(x, out=(buffer[:, 2:7, 32:96], scales[:, 2:7], lengths[:, 2:7]))
    assert torch.equal(buffer[:, 2:7, 32:96].float(), made[0].float())
    assert torch.equal(scales[:, 2:7], made[1])
    assert torch.equal(lengths[:, 2:7], made[2])
    buffer[:, 2:7, 32:96] = 3.0
    assert (buffer.float() == 3).all()
    assert (scales[:, [0, 1, 7, 8]] == -1).all()


def stock(name: str, a: tuple[Tensor, ...]) -> Tensor:
    """What is quantised, as stock makes it: rounded after every step."""
    if "layer_norm" in name:
        r, scale, shift = (a[0], *a[1:3]) if name.startswith("layer") else (a[0] + a[2][:, None] * a[1], *a[3:5])
        return F.layer_norm(r, r.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return n.to(x.dtype) * weight

    if name == "rms_norm_modulate_fp8":
        return rms(a[0], a[1]) * (1 + a[2][:, None])
    return rms(a[0] + a[3][:, None].tanh() * rms(a[1], a[2]), a[4]) * (1 + a[5][:, None])


@pytest.mark.parametrize(
    "name",
    [
        "gated_residual_layer_norm_fp8",
        "layer_norm_modulate_fp8",
        "rms_gated_residual_rms_norm_fp8",
        "rms_norm_modulate_fp8",
    ],
)
def test_quantised_norms_are_nearer_than_stock_then_quantised(name: str) -> None:
    op, ours, theirs = ops.registry()[name], [], []
    case = next(case for case in op.cases if case.name == "wide")
    for seed in range(5):
        args, _ = case.build(torch.bfloat16, seed=seed)
        truth = stock(name, tuple(t.double() for t in args))
        *_, q, s, _length = op(*args)
        ours.append(error(dequantized(q, s), truth).relative_l2)
        q, s, _length = ops.quantize_rows(stock(name, args))
        theirs.append(error(dequantized(q, s), truth).relative_l2)
    assert 0.02 < sum(ours) / 5 < 0.03  # steps of 2^-3, evenly off by up to half of one
    assert sum(ours) <= sum(theirs) * 1.001


# -- bounds --------------------------------------------------------------------------------------------------------


def test_bounds_are_the_smallest_powers_of_two() -> None:
    length = torch.cat([torch.logspace(-35, 15, 5000), torch.rand(5000) * 100])
    for bounds, square in (((3.0, 0.5, 0.0, 0.0), False), ((3.0, 0.5, 0.1, 9.0), False), ((0.3, 0.5, 0.0, 0.0), True)):
        s = ops.row_bounds(length, torch.tensor(bounds), square).double()
        assert (s.frexp().mantissa == 0.5).all()
        wide = length.double()
        b = wide**2 * bounds[0] + wide * bounds[1] if square else wide * bounds[0] + bounds[1]
        if bounds[2]:
            b = b.clamp_min(float(wide.max()) * bounds[2] + bounds[3])
        assert (s * 448 >= b * 1.0625 * (1 - 1e-6)).all()
        assert ((s / 2 * 448 < b * 1.0625 * (1 + 1e-6)) | (s == 2.0**-100)).all()


def test_bounds_at_powers_of_two_are_exact() -> None:
    exact = torch.tensor([2.0**k for k in range(-90, 90)])
    part = torch.tensor(1.0625 / 448)
    lengths = exact / part  # those of them whose product with `part` in fp32 is the power itself
    kept = lengths * part == exact
    assert kept.sum() > 100
    s = ops.row_bounds(lengths, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert torch.equal(s[kept], exact[kept])
    above = torch.nextafter(lengths, torch.tensor(torch.inf)) * 1.0000002
    assert torch.equal(ops.row_bounds(above, torch.tensor([1.0, 0.0, 0.0, 0.0]))[kept], 2 * exact[kept])


def test_bounds_of_nothing_inf_and_nan() -> None:
    one, item = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    length = torch.tensor([[0.0, 1.0, torch.inf], [torch.nan, 2.0, 1e38], [1.0, 2.0, 3.0]])
    s = ops.row_bounds(length, one)
    assert s[0, 0] == 2.0**-100
    assert s.isnan().tolist() == [[False, False, True], [True, False, False], [False] * 3]
    assert ops.row_bounds(length, item).isnan().tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert ops.row_bounds(torch.tensor([1e30]), one, square=True).isnan().all()  # beyond fp32
    assert ops.row_bounds(length[2], item).unique().numel() == 1


def weights(N: int, K: int) -> Tensor:
    """Dequantised e4m3 weights with one scale an output, some outputs much larger."""
    q, s, _ = ops.quantize_rows(torch.randn(N, K) / K**0.5 * torch.logspace(-2, 1, N)[:, None])
    return dequantized(q, s)


def adversaries(w: Tensor) -> Tensor:
    """Activations that make outputs as large as they can be: along a row of weights, with its signs, or one number."""
    along = w[::7]
    spikes = torch.eye(w.shape[1])[::9] * 1e4
    return torch.cat(
        [torch.randn(50, w.shape[1]), along, -along * 1e3, w[-3:].sign(), spikes, torch.zeros(1, w.shape[1])]
    )


@pytest.mark.parametrize("K", [1, 16, 256, 3072])
def test_no_output_of_a_product_is_beyond_its_bound(K: int) -> None:
    w, bias = weights(96, K), torch.randn(96)
    q, s, length = ops.quantize_rows(adversaries(w))
    u = dequantized(q, s).double() @ w.double().T + bias.double()
    bounds = torch.tensor([float(w.norm(dim=1).max()), float(bias.abs().max()), 0.0, 0.0])
    scale = ops.row_bounds(length, bounds)
    assert (u.abs().amax(-1) <= scale.double() * 448).all()
    g = F.gelu(u.float(), approximate="tanh")
    codes = ops.scale_rows(g, scale)
    assert ((g / scale[:, None]).abs() <= 448).all()  # the clamp has nothing to do
    assert error(dequantized(codes, scale), g.double()).relative_l2 < 0.04


def test_no_output_of_a_gated_product_is_beyond_its_bound() -> None:
    w, v = weights(96, 256), weights(96, 256).flip(0)
    q, s, length = ops.quantize_rows(adversaries(torch.cat([w, v])))
    x = dequantized(q, s).double()
    g = F.silu(x @ w.double().T) * (x @ v.double().T)
    bounds = torch.tensor([float((w.norm(dim=1) * v.norm(dim=1)).max()), 0.0, 0.0, 0.0])
    scale = ops.row_bounds(length, bounds, square=True)
    assert (g.abs().amax(-1) <= scale.double() * 448).all()


def test_no_mixture_of_rows_is_beyond_the_bound_of_the_item() -> None:
    w, bias = weights(64, 128), torch.randn(64)
    q, s, length = ops.quantize_rows(torch.randn(2, 30, 128) * torch.logspace(-2, 2, 30)[:, None])
    v = dequantized(q, s) @ w.T + bias
    o = (torch.randn(2, 30, 30) * 9).softmax(-1) @ v
    reach = [float(w.norm(dim=1).max()), float(bias.abs().max())]
    scale = ops.row_bounds(length, torch.tensor([0.0, 0.0, *reach]))
    assert (o.abs().amax(-1) <= scale * 448).all()


# -- arguments -----------------------------------------------------------------------------------------------------

X = torch.randn(2, 3, 16)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("quantize_rows", (X[0, 0],), "x must have at least two dimensions, not float32[16] on cpu"),
        ("quantize_rows", (X[None],), "x must be [S, K] or [B, S, K], not float32[1, 2, 3, 16] on cpu; flatten its"),
        ("quantize_rows", (X[..., :0],), "x must have at least one element a row, not float32[2, 3, 0] on cpu"),
        ("quantize_rows", (X.to(E4M3),), "x must be float16, bfloat16 or float32, not float8_e4m3fn[2, 3, 16] on cpu"),
        ("scale_rows", (X, X[..., :1]), "s must be float32[2, 3] on cpu, not float32[2, 3, 1] on cpu"),
        ("scale_rows", (X, X[..., 0].half()), "s must be float32[2, 3] on cpu, not float16[2, 3] on cpu"),
        ("row_bounds", (X.half(), X[0, 0, :4]), "length must be float32, not float16[2, 3, 16] on cpu"),
        ("row_bounds", (X, X[0, 0, :3]), "bounds must be float32[4] on cpu, not float32[3] on cpu"),
        ("row_bounds", (X, X[0, 0, :4], 1), "square must be True or False, not int 1"),
        ("layer_norm_modulate_fp8", (X, X[:, 0, :8], None), "scale must be [B, C] = [2, 16], floating point on cpu"),
        ("rms_norm_modulate_fp8", (X[..., :0], None, None), "x must have at least one element a row"),
        ("gated_residual_layer_norm_fp8", (X, X[:1], *(X[:, 0],) * 3), "y must be float32[2, 3, 16] on cpu"),
        ("rms_gated_residual_rms_norm_fp8", (X, X, X[:, 0], None, X[0, 0], None), "y_weight must be [C] = [16]"),
        ("grouped_linear", (X[0], [X[1].to(E4M3)], [X[0, :, 0]]), "weights[0] must be float16, bfloat16 or float32"),
        (
            "grouped_linear",
            (X[0], [X[1]], [X[0, 0, :3]], None, None, None, [X[0, 0, :3]]),
            "weights[0] must be float8_e4m3fn, not float32[3, 16] on cpu",
        ),
        (
            "grouped_linear",
            (X[0], [X[1].to(E4M3)], [X[0, 0, :3]], None, None, None, []),
            "needs as many scales as weights, 1, not 0",
        ),
        (
            "grouped_linear",
            (X[0], [X[1].to(E4M3)], [X[0, 0, :3]], None, None, None, [X[0, 0, :4]]),
            "scales[0] must be float32[3] on cpu, not float32[4] on cpu",
        ),
        (
            "grouped_linear",
            (X[0], [X[1].to(E4M3)], [X[0, 0, :3]], None, None, None, [X[0, 0, :6:2]]),
            "scales[0] must be contiguous",
        ),
    ],
)
def test_what_is_refused(name: str, args: tuple[Any, ...], words: str) -> None:
    for call in (ops.registry()[name], ops.registry()[name].plain, ops.registry()[name].backend):
        with pytest.raises(OpError) as raised:
            call(*args)
        assert str(raised.value).startswith(f"{name}: {words}")


def test_results_of_another_dtype_are_refused() -> None:
    q, s, length = ops.quantize_rows(X)
    with pytest.raises(OpError, match=r"out\[0\] must be float8_e4m3fn\[2, 3, 16\] on cpu, not float32"):
        ops.quantize_rows(X, out=(X.clone(), s, length))
    with pytest.raises(OpError, match=r"out\[1\] must be float32\[2, 3\] on cpu, not float16"):
        ops.quantize_rows(X, out=(q, s.half(), length))
    with pytest.raises(OpError, match=r"out .* lies on length .* it may lie on no input of this call"):
        ops.row_bounds(length, torch.ones(4), out=length)


def test_devices_without_e4m3_are_served_by_torch_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(device=torch.device("cuda", 0))
    for capability, said in (
        ((8, 0), "e4m3 needs compute capability 8.9, not 8.0"),
        ((8, 9), ""),
        ((9, 0), ""),
        ((12, 0), ""),
    ):
        monkeypatch.setattr(_triton, "capability", lambda _, found=capability: found)
        assert _fp8.limit(x) == said


# -- weights in e4m3 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_grouped_product_of_codes_is_that_of_what_they_stand_for(dtype: torch.dtype) -> None:
    x, layers = torch.randn(2, 64).to(dtype), [torch.randn(n, 64) * 50 for n in (48, 80)]
    biases = [torch.randn(len(w)).to(dtype) for w in layers]
    codes, scales, _ = zip(*(ops.quantize_rows(w) for w in layers), strict=True)
    y, hit = ops.grouped_linear(x, list(codes), biases, scales=list(scales))
    kept = [dequantized(q, s).double() for q, s in zip(codes, scales, strict=True)]
    truth = torch.cat([x.double() @ w.T + b.double() for w, b in zip(kept, biases, strict=True)], 1)
    assert y.dtype == hit.dtype == dtype
    assert error(y, truth).largest < {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]


def test_sums_of_codes_may_be_larger_than_fp16_holds() -> None:
    x, codes = torch.full((1, 512), 60.0).half(), torch.full((8, 512), 448.0).to(E4M3)
    y, _ = ops.grouped_linear(x, [codes], [torch.zeros(8).half()], scales=[torch.full((8,), 1e-5)])
    assert torch.allclose(y.float(), torch.full((1, 8), 512 * 60 * 448e-5), rtol=1e-3)
