"""Float8Linear: what it computes, moves, saves, loads and copies, and that the layer it was made of comes back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusedit.float8.linear import Float8Linear, quantise_weight


def layer(activations: bool = True, *, bias: bool = True, keep: bool = True, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    made = nn.Linear(64, 48, bias=bias).to(dtype)
    return Float8Linear.convert(made, activations=activations, keep=keep)


def relative(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made - right).norm() / right.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activations", [True, False])
def test_is_near_the_layer_it_was_made_of(activations: bool, bias: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(64, 48, bias=bias)
    made = Float8Linear.convert(copy.deepcopy(stock), activations=activations, keep=False)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        error = relative(made(x), stock(x))
    assert 0 < error < (0.06 if activations else 0.04)  # e4m3 rounds by up to 1/16, 1/40 in the mean square
    assert made(x).shape == (2, 5, 48)


@pytest.mark.parametrize("K", [3072, 9216, 12288])
def test_any_number_of_rows(K: int) -> None:
    """FP8-02."""
    torch.manual_seed(0)
    stock = nn.Linear(K, 32, bias=False)
    made = Float8Linear.convert(copy.deepcopy(stock), activations=True, keep=False)
    x = torch.randn(257, K)
    with torch.no_grad():
        right = stock(x)
        for rows in (1, 2, 15, 16, 17, 127, 256, 257):
            assert 0 < relative(made(x[:rows]), right[:rows]) < 0.06, rows


def test_each_output_has_a_scale_of_its_own_and_the_largest_weight_is_448() -> None:
    weight = torch.randn(6, 32) * torch.tensor([1e-3, 1.0, 1e3, 0.1, 10.0, 0.0])[:, None]
    codes, scale = quantise_weight(weight)
    assert codes.dtype is torch.float8_e4m3fn
    assert codes.float().abs().amax(1).tolist() == [448.0] * 5 + [0.0]
    error = ((codes.float() * scale[:, None] - weight).norm(dim=1) / weight.norm(dim=1))[:5]
    assert error.max() < 0.03, "a row of small weights must not lose to a row of large ones"


def test_the_parameter_and_the_layer_stay_the_same_objects_and_come_back_bit_for_bit() -> None:
    stock = nn.Linear(64, 48)
    weight, before, bias = stock.weight, stock.weight.detach().clone(), stock.bias
    made = Float8Linear.convert(stock, activations=True, keep=True)
    assert made is stock
    assert made.weight is weight
    assert weight.dtype is torch.float8_e4m3fn
    original = made.original
    assert original is not None
    made.revert(original)
    assert type(stock) is nn.Linear
    assert stock.weight is weight
    assert torch.equal(stock.weight, before)
    assert stock.bias is bias
    assert stock.state_dict().keys() == {"weight", "bias"}
    assert stock.__dict__.keys() == nn.Linear(64, 48).__dict__.keys()


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
    ],
)
def test_to_changes_the_compute_dtype_alone(move: Callable[[Any], Any], dtype: torch.dtype) -> None:
    made = layer()
    codes, scale = made.weight.detach().clone(), made.weight_scale.clone()
    move(nn.Sequential(made))
    assert made.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(made.weight.view(torch.uint8), codes.view(torch.uint8))
    assert made.weight_scale.dtype is torch.float32
    assert torch.equal(made.weight_scale, scale)
    assert made.compute_dtype is dtype
    assert made.bias.dtype is dtype
    assert list(made.state_dict()) == ["weight", "bias", "weight_scale"]


def test_moves_to_meta_and_is_made_empty() -> None:
    made = layer().to("meta")
    assert made.weight.is_meta
    assert made.weight.dtype is torch.float8_e4m3fn
    assert made.to_empty(device="cpu").weight.shape == (48, 64)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_goes_in_and_out(assign: bool) -> None:
    made, other = layer(), layer()
    with torch.no_grad():
        other.weight_scale.mul_(3)
        other.bias.add_(1)
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert not torch.equal(made(x), other(x))
        made.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(made(x), other(x))


@pytest.mark.parametrize("assign", [False, True])
def test_a_stock_weight_that_is_loaded_is_quantised_and_becomes_the_original(assign: bool) -> None:
    made, stock = layer(), nn.Linear(64, 48)
    made.load_state_dict(stock.state_dict(), assign=assign)
    fresh = Float8Linear.convert(copy.deepcopy(stock), activations=True, keep=True)
    assert torch.equal(made.weight.view(torch.uint8), fresh.weight.view(torch.uint8))
    assert torch.equal(made.weight_scale, fresh.weight_scale)
    assert torch.equal(made.original, stock.weight)


def test_codes_without_their_scale_are_refused() -> None:
    made = layer()
    state = made.state_dict()
    del state["weight_scale"]
    before = made.weight_scale.clone()
    with pytest.raises(RuntimeError, match="weight is e4m3 without weight_scale; its values are not known"):
        made.load_state_dict(state)
    assert torch.equal(made.weight_scale, before)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "upcast": (
        lambda s: s.update({key: t.float() for key, t in s.items()}),
        r"weight is torch.float32 beside weight_scale, so its codes were cast .* or stock's weight without a scale",
    ),
    "bytes": (lambda s: s.update(weight=s["weight"].view(torch.uint8)), r"weight is torch.uint8 beside weight_scale"),
    "e5m2": (lambda s: s.update(weight=s["weight"].to(torch.float8_e5m2)), r"weight is torch.float8_e5m2 beside"),
    "half a scale": (
        lambda s: s.update(weight_scale=s["weight_scale"].bfloat16()),
        r"weight_scale is torch.bfloat16, not torch.float32; give the scales",
    ),
    "nan": (lambda s: s["weight_scale"][3].fill_(float("nan")), r"weight_scale holds NaN or infinity, .*; replace"),
    "inf": (lambda s: s["weight_scale"][3].fill_(float("inf")), r"weight_scale holds NaN or infinity, .*; replace"),
    "zero": (lambda s: s["weight_scale"][3].zero_(), r"weight_scale holds 0, where scales are positive; replace"),
    "negative": (lambda s: s["weight_scale"][3].neg_(), r"weight_scale holds -0\.\d+, where scales are positive"),
    "scale alone": (lambda s: (s.pop("weight"), s["weight_scale"].neg_()), "where scales are positive"),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("fault", REFUSED)
def test_codes_and_scales_that_stand_for_nothing_are_refused(fault: str, assign: bool) -> None:
    made = layer()
    before = {key: t.clone() for key, t in made.state_dict().items()}
    original = made.original.clone()
    state = {key: t.clone() for key, t in before.items()}
    state["bias"].add_(1)
    change, message = REFUSED[fault]
    change(state)
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state, strict=False, assign=assign)
    now = made.state_dict()
    for key, t in before.items():
        assert now[key].dtype is t.dtype
        assert torch.equal(now[key].view(torch.uint8), t.view(torch.uint8)), key
    assert torch.equal(made.original, original)


def test_a_row_of_zeros_goes_round() -> None:
    made = Float8Linear.convert(nn.Linear(64, 48).requires_grad_(False), activations=True, keep=False)
    stock = nn.Linear(64, 48).requires_grad_(False)
    stock.weight[3].zero_()
    made.load_state_dict(Float8Linear.convert(stock, activations=True, keep=False).state_dict())
    assert made.dequantised(torch.float32)[3].abs().max() == 0


def test_a_stock_layer_does_not_take_codes_for_values() -> None:
    with pytest.raises(RuntimeError, match="weight_scale"):
        nn.Linear(64, 48).load_state_dict(layer().state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_is_stock_where_the_original_is_there(how: str) -> None:
    def copied(module: Any) -> Any:
        if how == "deepcopy":
            return copy.deepcopy(module)
        if how == "pickle":
            return pickle.loads(pickle.dumps(module))
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    stock = copied(layer())
    assert type(stock) is nn.Linear
    torch.manual_seed(0)
    assert torch.equal(stock.weight, nn.Linear(64, 48).weight)
    x = torch.randn(3, 64)
    assert stock(x).shape == (3, 48)
    dropped = layer(keep=False)
    other = copied(dropped)
    assert type(other) is Float8Linear
    assert other.weight is not dropped.weight
    with torch.no_grad():
        assert torch.equal(other(x), dropped(x))


@pytest.mark.parametrize("activations", [True, False])
def test_gradients_reach_the_input(activations: bool) -> None:
    made = layer(activations)
    x = torch.randn(3, 64, requires_grad=True)
    made(x).sum().backward()
    assert x.grad is not None
    assert relative(x.grad, made.dequantised(torch.float32).sum(0).expand(3, 64)) < 1e-5


def test_sums_that_overflow_half_precision_are_scaled_before_they_are_rounded() -> None:
    stock = nn.Linear(4096, 8, bias=False)
    with torch.no_grad():
        stock.weight.fill_(400.0 / 65504)
    made = Float8Linear.convert(stock.half(), activations=True, keep=False)
    y = made(torch.ones(2, 4096, dtype=torch.float16))
    assert y.dtype is torch.float16
    assert relative(y.detach().float(), torch.full((2, 8), 4096 * 400.0 / 65504)) < 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = bad
    y = layer()(x)
    assert not torch.isfinite(y[1]).any()
    assert torch.isfinite(y[[0, 2]]).all()


def test_large_activations_stay_finite() -> None:
    x = torch.full((1, 64), 1e4)
    assert torch.isfinite(layer()(x)).all()
