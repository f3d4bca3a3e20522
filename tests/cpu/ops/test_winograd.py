"""Winograd: the algorithm is a convolution exactly, what half precision costs it, and what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _conv
from fusedit.ops._verify import error
from fusedit.ops.winograd_conv2d import TABLE, _constexprs, _launch
from fusedit.ops.winograd_weight import A, B, G

Tensor = torch.Tensor
SIZES = [(1, 1), (1, 5), (2, 1), (3, 3), (4, 4), (5, 7), (8, 9), (6, 13)]
TILES = [2, 4]


def numbers(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std).to(dtype)


def layer(N: int, C: int, K: int, H: int, W: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return numbers(N, C, H, W, dtype=dtype), numbers(K, C, 3, 3, seed=1, std=(9 * C) ** -0.5, dtype=dtype)


# -- the algorithm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
def test_the_matrices_are_a_convolution_in_whole_fractions(tile: int) -> None:
    """A^T [(G g) (B^T d)] = the correlation of g and d, for every pair of unit vectors, without any rounding."""
    a, b, g = ([[Fraction(v).limit_denominator(24) for v in row] for row in m[tile]] for m in (A, B, G))
    for tap in range(3):
        for place in range(tile + 2):
            products = [g[t][tap] * b[t][place] for t in range(tile + 2)]
            made = [sum(x * y for x, y in zip(row, products, strict=True)) for row in a]
            assert made == [int(out + tap == place) for out in range(tile)]


@pytest.mark.parametrize("tile", TILES)
def test_the_rows_that_the_kernel_adds_are_those_of_the_matrix(tile: int) -> None:
    constants = _constexprs(tile, TABLE["half"][tile])
    for row, entries in enumerate(B[tile]):
        summed = [0.0] * (tile + 2)
        for part in range(tile * row, tile * (row + 1)):
            assert constants["FACTOR"][part] != 0.0  # zero times infinity would be NaN
            summed[constants["ROW"][part]] += constants["FACTOR"][part]
        assert summed == list(entries)
    for matrix in (A[tile], B[tile]):  # what the kernel takes for granted
        assert [row[0] != 0 for row in matrix] == [True] + [False] * (len(matrix) - 1)
        assert all(row[1] != 0 for row in matrix[1:])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_equals_a_convolution_in_fp64(tile: int, size: tuple[int, int]) -> None:
    for N, C, K in ((2, 5, 3), (1, 1, 1), (1, 8, 16)):
        x, weight = layer(N, C, K, *size)
        y = ops.winograd_conv2d(x, ops.winograd_weight(weight, tile))
        assert error(y, F.conv2d(x, weight, padding=1)).largest < (1e-14 if tile == 2 else 1e-13)


@pytest.mark.parametrize("activation", _conv.ACTIVATIONS)
@pytest.mark.parametrize("tile", TILES)
def test_the_epilogue_is_that_of_a_direct_convolution(tile: int, activation: str) -> None:
    x, weight = layer(2, 6, 4, 5, 6)
    u = ops.winograd_weight(weight, tile)
    for bias in (None, numbers(4, seed=2)):
        for residual in (None, numbers(2, 4, 5, 6, seed=3)):
            truth = ops.conv2d.reference(x, weight, bias, residual, activation)
            assert error(ops.winograd_conv2d(x, u, bias, residual, activation), truth).largest < 1e-13
            assert error(ops.winograd_conv2d.reference(x, u, bias, residual, activation), truth).largest < 1e-13


@pytest.mark.parametrize("tile", TILES)
def test_linear_in_both_arguments_and_moves_with_the_picture(tile: int) -> None:
    (x, weight), (other, second) = layer(1, 4, 3, 9, 8), (numbers(1, 4, 9, 8, seed=4), numbers(3, 4, 3, 3, seed=5))
    u, v = ops.winograd_weight(weight, tile), ops.winograd_weight(second, tile)
    torch.testing.assert_close(ops.winograd_weight(2 * weight - second, tile), 2 * u - v)
    y = ops.winograd_conv2d(x, u)
    torch.testing.assert_close(ops.winograd_conv2d(2 * x - other, u), 2 * y - ops.winograd_conv2d(other, u))
    torch.testing.assert_close(ops.winograd_conv2d(x, 2 * u - v), 2 * y - ops.winograd_conv2d(x, v))
    moved = ops.winograd_conv2d(F.pad(x, (1, 0, 1, 0)), u)  # other tiles hold the same pixels
    torch.testing.assert_close(moved[:, :, 2:, 2:], y[:, :, 1:, 1:])
    assert not ops.winograd_conv2d(torch.zeros_like(x), u).any()


@pytest.mark.parametrize("tile", TILES)
def test_a_weight_of_one_tap(tile: int) -> None:
    """The middle tap alone: u is one number times the outer product of a column of G, and y is x."""
    weight = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    weight[..., 1, 1] = 3
    column = torch.tensor(G[tile], dtype=torch.float64)[:, 1]
    u = ops.winograd_weight(weight, tile)
    torch.testing.assert_close(u.flatten(), 3 * torch.outer(column, column).flatten())
    x = numbers(1, 1, 5, 5)
    torch.testing.assert_close(ops.winograd_conv2d(x, u), 3 * x)


def test_no_channels_leave_the_bias() -> None:
    bias = numbers(3)
    y = ops.winograd_conv2d(numbers(1, 0, 4, 5), numbers(16, 3, 0), bias, activation="relu")
    assert torch.equal(y, bias.relu()[None, :, None, None].expand(1, 3, 4, 5))


# -- what half precision costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tile", "low", "high"),
    [
        (torch.bfloat16, 2, 0.0042, 0.006),
        (torch.bfloat16, 4, 0.025, 0.037),
        (torch.float16, 2, 0.0005, 0.0008),
        (torch.float16, 4, 0.003, 0.0046),
        (torch.float32, 2, 0.0, 6e-7),
        (torch.float32, 4, 0.0, 5e-6),
    ],
)
def test_rounding_the_transforms(dtype: torch.dtype, tile: int, low: float, high: float) -> None:
    """Plain torch rounds the products too: a little more than the kernel's 0.0042 and 0.025 in bf16.

    A direct convolution has 0.0017. Were it less than `low`, the op's docstring would be wrong.
    """
    x, weight = layer(1, 64, 32, 24, 24, dtype)
    truth = F.conv2d(x.double(), weight.double(), padding=1)
    made = error(ops.winograd_conv2d(x, ops.winograd_weight(weight, tile)), truth).relative_l2
    assert low < made < high
    if dtype is not torch.float32:
        assert made > 2 * error(F.conv2d(x, weight, padding=1), truth).relative_l2


def test_the_weight_is_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight = numbers(8, 8, 3, 3, dtype=dtype)
        for tile in TILES:
            u = ops.winograd_weight(weight, tile)
            assert torch.equal(u, ops.winograd_weight(weight.float(), tile).to(dtype))
            assert u.shape == ((tile + 2) ** 2, 8, 8)


# -- arguments -----------------------------------------------------------------------------------------------------

X, W = numbers(2, 6, 5, 4, dtype=torch.float32), numbers(8, 6, 3, 3, dtype=torch.float32)
U = ops.winograd_weight(W)
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.winograd_weight(W[0]), "winograd_weight: weight must be [K, C, R, R], not float32[6, 3, 3] on cpu"),
    (lambda: ops.winograd_weight(W[..., :2]), "winograd_weight: weight must have 3 x 3 taps, not float32[8, 6, 3, 2]"),
    (lambda: ops.winograd_weight(W.int()), "winograd_weight: weight must be float16, bfloat16 or float32, not int32"),
    (lambda: ops.winograd_weight(W, 3), "winograd_weight: tile must be 2 or 4, not 3"),
    (lambda: ops.winograd_weight(W, 2.0), "winograd_weight: tile must be a whole number, not float 2.0"),  # type: ignore[arg-type]
    (lambda: ops.winograd_weight(W, True), "winograd_weight: tile must be a whole number, not bool True"),
    (lambda: ops.winograd_weight(W, out=U[:9]), "winograd_weight: out must be float32[16, 8, 6] on cpu, not"),
    (lambda: ops.winograd_conv2d(X[0], U), "winograd_conv2d: x must be [N, C, H, W], not float32[6, 5, 4] on cpu"),
    (lambda: ops.winograd_conv2d(X, W), "winograd_conv2d: u must be [P, K, C], not float32[8, 6, 3, 3] on cpu"),
    (lambda: ops.winograd_conv2d(X, U[:9]), "winograd_conv2d: u must have 16 or 36 planes, of winograd_weight, not "),
    (lambda: ops.winograd_conv2d(X[:, :5], U), "winograd_conv2d: u must be float32[16, 8, 5] on cpu, not float32[16, "),
    (lambda: ops.winograd_conv2d(X.half(), U), "winograd_conv2d: u must be float16[16, 8, 6] on cpu, not float32[16, "),
    (lambda: ops.winograd_conv2d(X.long(), U), "winograd_conv2d: x must be float16, bfloat16 or float32, not int64[2"),
    (lambda: ops.winograd_conv2d(X, U.to("meta")), "winograd_conv2d: u must be float32[16, 8, 6] on cpu, not float32["),
    (lambda: ops.winograd_conv2d(X, U, U[0]), "winograd_conv2d: bias must be "),
    (lambda: ops.winograd_conv2d(X, U, None, X), "winograd_conv2d: residual must be float32[2, 8, 5, 4] on cpu, not"),
    (lambda: ops.winograd_conv2d(X, U, activation="gelu"), "winograd_conv2d: activation must be one of none, silu, re"),
    (lambda: ops.winograd_conv2d(X, U, out=X), "winograd_conv2d: out must be float32[2, 8, 5, 4] on cpu, not float32["),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[str(index) for index in range(len(CALLS))])
def test_what_cannot_be(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(OpError) as raised:
        call()
    assert str(raised.value).startswith(said)


def test_the_result_may_lie_on_the_residual_and_on_nothing_else() -> None:
    square = ops.winograd_weight(W[:6])
    residual = numbers(2, 6, 5, 4, seed=6, dtype=torch.float32)
    expected = ops.winograd_conv2d(X, square, None, residual)
    assert ops.winograd_conv2d(X, square, None, residual, out=residual) is residual
    assert torch.equal(residual, expected)
    x = X.clone()
    for given in (None, residual):
        with pytest.raises(OpError, match=r"out float32.* lies on x .*, which is still read"):
            ops.winograd_conv2d(x, square, None, given, out=x)
    assert torch.equal(x, X)


def test_results_are_channels_last_and_any_out_will_do() -> None:
    y = ops.winograd_conv2d(X, U)
    assert y.is_contiguous(memory_format=torch.channels_last)
    for out in (
        torch.empty_like(y),
        torch.empty(2, 8, 5, 4),
        torch.empty(2, 16, 5, 4)[:, 1:9],
        torch.empty(4, 5, 8, 2).permute(3, 2, 1, 0),
    ):
        assert ops.winograd_conv2d(X, U, out=out) is out
        assert torch.equal(out, y)


def test_the_cost_is_that_of_a_direct_convolution() -> None:
    pixels = 2 * 5 * 4
    assert ops.winograd_conv2d.cost(X, U) == (4 * (X.numel() + U.numel() + 8 * pixels), 2 * pixels * W.numel())
    assert ops.winograd_weight.cost(W).bytes == 4 * (W.numel() + U.numel())


def test_more_than_the_kernels_can_count() -> None:
    assert ops.winograd_conv2d._limit is not None
    assert ops.winograd_weight._limit is not None
    for shape, planes, words in (
        ((1, 8, 65536, 65536), 36, ""),
        ((2, 8, 65536, 65536), 36, "2 images of 65536 x 65536 with 8 and 8 channels are too many"),
        ((1, 8, 1, 2**31), 16, "1 images of 1 x 2147483648 with 8 and 8 channels are too many"),
    ):
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        u = torch.empty(planes, 8, 8, dtype=torch.bfloat16, device="meta")
        assert ops.winograd_conv2d._limit(x, u) == words
    assert ops.winograd_weight._limit(W) == ""
    assert "too many" in ops.winograd_weight._limit(torch.empty(2**31, 1, 3, 3, device="meta"))


def test_every_launch_is_compiled_ahead_of_time() -> None:
    built = {build.name: build for build in ops.winograd_conv2d.builds()}
    if not ops.triton_status()[0]:
        pytest.skip("triton is not installed")
    assert len(built) == sum(len(tables) for tables in TABLE.values())
    for dtype, vec, kind in (
        (torch.bfloat16, 8, "half"),
        (torch.float16, 8, "half"),
        (torch.bfloat16, 1, "unaligned"),
        (torch.float32, 4, "fp32"),
        (torch.float32, 1, "fp32"),
    ):
        for tile in TILES:
            assert _launch(torch.empty(0, dtype=dtype), tile, vec) == TABLE[kind][tile]
    assert all("no-spill" in build.traits for build in built.values())
