"""Codes that are rounded for what their layer reads: the arithmetic, the kernel, and which layers share a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.scripts import run_script
from torch import nn

from fusedit.float8 import rounding
from fusedit.float8.linear import quantise_weight
from fusedit.float8.round_panel import PANEL, round_panel
from fusedit.float8.rounding import DAMPING, Moments, Rounder
from fusedit.ops import triton_status
from fusedit.ops._fp8 import to_e4m3

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(not triton_status()[0], reason=f"triton cannot run: {triton_status()[1]}")


def correlated(n: int, K: int, seed: int = 0, rank: int = 12) -> torch.Tensor:
    """Rows that lie near a few directions, with a mean, as activations do."""
    g = torch.Generator().manual_seed(seed)
    base = torch.Generator().manual_seed(99)
    directions, mean = torch.randn(rank, K, generator=base), torch.randn(K, generator=base)
    return torch.randn(n, rank, generator=g) @ directions + mean + 0.1 * torch.randn(n, K, generator=g)


def missed(codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Relative L2 of x W^T."""
    made = codes.double() * scale.double()[:, None]
    return float((x.double() @ (made - weight.double()).T).norm() / (x.double() @ weight.double().T).norm())


@pytest.mark.parametrize("K", [48, 200, 384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_were_not_among_the_samples_gain(K: int, dtype: torch.dtype) -> None:
    weight = torch.randn(40, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scale = Moments(correlated(600, K).to(dtype)).round(weight)
    nearest, same_scale = quantise_weight(weight)
    assert torch.equal(scale, same_scale)
    x = correlated(100, K, seed=7)
    assert missed(codes, scale, weight, x) < 0.6 * missed(nearest, scale, weight, x)
    assert float((codes.float() - nearest.float()).abs().max()) <= 448 / 4, "no code may be far from its weight"


def test_the_factor_is_of_the_inverse() -> None:
    x = correlated(300, 40)
    moments = Moments(x)
    order, U = moments.order[0], moments.factor[0].double()
    own = (x.T @ x / 300 / x.abs().amax() ** 2).double()
    own.diagonal().mul_(1 + DAMPING)
    own = own[order][:, order]
    assert torch.equal(U, U.triu())
    assert float(((U.T @ U @ own) - torch.eye(40)).abs().max()) < 5e-3
    assert bool((own.diagonal().diff() <= 0).all()), "large inputs first"


def test_inputs_that_go_together_with_none_get_the_nearest_codes() -> None:
    x = torch.eye(32).repeat(4, 1) * torch.linspace(0.1, 5, 32)
    weight = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    codes, scale = Moments(x).round(weight)
    assert torch.equal(codes.float(), to_e4m3(weight / scale[:, None]).float())


@pytest.mark.parametrize("samples", [torch.zeros(5, 16), torch.full((5, 16), 1e-20), correlated(1, 16)])
def test_samples_that_say_little(samples: torch.Tensor) -> None:
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    codes, scale = Moments(samples).round(weight)
    values = codes.float() * scale[:, None]
    assert bool(values.isfinite().all())
    assert float((values - weight).norm() / weight.norm()) < 0.2


def test_zero_rows_and_wide_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "WIDEST", 50)
    x = correlated(300, 96)
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(4))
    weight[3] = 0
    moments = Moments(x)
    assert moments.factor.shape == (2, 48, 48)
    codes, scale = moments.round(weight)
    assert not codes[3].float().any()
    nearest, _ = quantise_weight(weight)
    assert missed(codes, scale, weight, x) < 0.8 * missed(nearest, scale, weight, x)


def test_a_panel_is_what_the_formula_says() -> None:
    g = torch.Generator().manual_seed(0)
    w, factor = torch.randn(1, 3, 4, generator=g) * 100, torch.rand(1, 4, 4, generator=g).triu() + torch.eye(4)
    codes, error = round_panel(w, factor)
    left = w[0].clone()
    for k in range(4):
        q = left[:, k].clamp(-448, 448).to(torch.float8_e4m3fn).float()
        e = (left[:, k] - q) / factor[0, k, k]
        assert torch.equal(codes[0, :, k].float(), q)
        assert torch.equal(error[0, :, k], e)
        for j in range(k + 1, 4):
            left[:, j] = left[:, j] - e * factor[0, k, j]
    assert PANEL == 128


@needs_triton
def test_the_kernel_gives_the_bits_of_torch() -> None:
    found = run_script(HERE / "run_round_panel.py", TRITON_INTERPRET="1")
    assert found
    assert all(found.values()), found


@needs_triton
def test_the_kernel_compiles_without_spills(tmp_path: Path) -> None:
    found = run_script(HERE / "run_round_panel.py", TRITON_CACHE_DIR=str(tmp_path))
    assert set(found) == {"89", "90", "100", "120"}
    # 8 bytes: what ptxas gives a frame on capability 10.0, with registers to spare.
    assert all(made["stack"] <= 8 and made["registers"] < 128 for made in found.values()), found


def test_layers_that_read_the_same_are_rounded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {name: nn.Linear(24, 10) for name in "abcd"}
    layers["e"] = nn.Linear(8, 10)
    shared, own = correlated(50, 24), correlated(50, 24, seed=1)
    samples = {"a": shared, "b": shared, "c": own, "e": shared}  # e has other inputs than these
    alone = {name: Moments(samples[name]).round(layers[name].weight.data) for name in "abc"}
    taken: list[int] = []
    stock = Moments.__init__
    monkeypatch.setattr(Moments, "__init__", lambda self, x: (taken.append(len(x)), stock(self, x))[1])
    rounder = Rounder(samples, layers)
    for name in ("a", "c", "b"):
        codes = rounder.codes(name)
        assert codes is not None
        assert torch.equal(codes[0].view(torch.uint8), alone[name][0].view(torch.uint8))
        assert torch.equal(codes[1], alone[name][1])
    assert len(taken) == 2
    assert rounder.codes("d") is None
    assert rounder.codes("e") is None


def test_what_does_not_fit_at_once_keeps_its_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST", 300)
    layers = {name: nn.Linear(24, 10) for name in "abc"}
    x = correlated(50, 24)
    rounder = Rounder(dict.fromkeys("abc", x), layers)
    for name in "abc":
        codes = rounder.codes(name)
        assert codes is not None
        assert torch.equal(codes[0].view(torch.uint8), Moments(x).round(layers[name].weight.data)[0].view(torch.uint8))


def test_samples_that_are_not_finite_are_no_samples() -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(5, 6)
    x[2, 3] = torch.nan
    assert Rounder({"a": x}, {"a": layer}).codes("a") is None
    assert Rounder({"a": x[:0]}, {"a": layer}).codes("a") is None


def test_codes_that_are_known_are_taken() -> None:
    layer = nn.Linear(6, 4)
    known = quantise_weight(layer.weight.data)
    made = Rounder({"a": torch.randn(5, 6)}, {"a": layer}, known={"a": known}).codes("a")
    assert made is not None
    assert torch.equal(made[0].view(torch.uint8), known[0].view(torch.uint8))


def test_large_and_small_inputs_are_rounded_for_alike() -> None:
    weight = torch.randn(9, 48, generator=torch.Generator().manual_seed(6))
    x = correlated(200, 48)
    codes = [Moments(x * by).round(weight)[0].view(torch.uint8) for by in (1.0, 2.0**60, 2.0**-60)]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])
