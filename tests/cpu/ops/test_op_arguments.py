"""Arguments that no op takes: each is refused in one sentence, whichever way the op is called."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops._op import Op

# torch warns of what these tests hand in: sparse, nested and quantised tensors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors"
)
REGISTRY = ops.registry()
NAMES = sorted(REGISTRY)
SEVERAL = [name for name in NAMES if REGISTRY[name]._outputs > 1]
X, V = torch.randn(2, 3, 16), torch.randn(2, 16)
W, B = torch.randn(4, 16), torch.randn(4)
KEY = torch.randn(2, 5)
SCALAR = torch.tensor(1.0)


def small(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return next(case for case in REGISTRY[name].cases if case.name == "small").build(torch.float32)


def sentence(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with torch.no_grad(), pytest.raises(OpError) as raised:
        call(*args, **kwargs)
    said = str(raised.value)
    assert "\n" not in said
    return said


def ways(op: Op[..., Any]) -> tuple[Callable[..., Any], ...]:
    return op, op.plain, op.backend


@pytest.mark.parametrize("name", NAMES)
def test_too_few_and_unknown_arguments(name: str) -> None:
    args, _ = small(name)
    for call in ways(REGISTRY[name]):
        first = REGISTRY[name]._first
        assert sentence(call).startswith(f"{name}: missing a required argument: '{first}'; it takes ({first}, ")
        assert sentence(call, *args, epsilon=1).startswith(
            f"{name}: got an unexpected keyword argument 'epsilon'; it takes ({first}"
        )
        assert sentence(call, *args, *range(9)).startswith(f"{name}: ")
        if len(args) > 1 and name != "attention":
            assert sentence(call, args[0]).startswith(f"{name}: missing a required argument: ")


@pytest.mark.parametrize("name", NAMES)
def test_first_arguments_that_are_no_dense_tensor(name: str) -> None:
    (x, *rest), kwargs = small(name)
    x = x.float()  # codes in e4m3 can be made neither sparse nor quantised
    rows = x.reshape(-1, x.shape[-1])
    wrong: list[tuple[Any, str]] = [
        (1, "must be a tensor, not int 1"),
        (None, "must be a tensor, not NoneType None"),
        ([x, x], "must be a tensor, not a list of 2"),
        (x.numpy(), "must be a tensor, not ndarray"),
        (x.to_sparse(), "must be a dense tensor, not sparse_coo float32["),
        (rows.to_sparse_csr(), "must be a dense tensor, not sparse_csr float32["),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "must be floating point, not qint8["),
        (torch.nested.nested_tensor([rows, rows]), "must be a dense tensor, not nested float32 on cpu; pad it"),
        (torch.nested.nested_tensor([rows, rows], layout=torch.jagged), "must be a dense tensor, not nested float32"),
    ]
    first = REGISTRY[name]._first
    for value, words in wrong:
        said = sentence(REGISTRY[name], value, *rest, **kwargs)
        if name == "qk_norm_rope" and "must be [B, S, 3, H, D]" in said:
            continue
        assert said.startswith(f"{name}: {first} {words}")


def test_later_arguments_that_are_no_dense_tensor() -> None:
    assert "swiglu: b must be a dense tensor, not sparse_coo" in sentence(ops.swiglu, X, X.to_sparse())
    nested = torch.nested.nested_tensor([W, W])
    assert "scale must be a dense tensor, not nested" in sentence(ops.layer_norm_modulate, X, nested, V)
    assert "y must be a dense tensor, not mkldnn" in sentence(ops.gated_residual, X, X.to_mkldnn(), V)
    assert "out must be a dense tensor, not sparse_coo" in sentence(ops.gelu_tanh, V, out=V.to_sparse())
    assert "v must be a tensor, not int 3" in sentence(ops.attention.backend, *torch.randn(2, 1, 4, 2, 8), 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((V, W, B), "weights must be a list of tensors, not float32[4, 16] on cpu; for one, give [weights]"),
        ((V, W[:1, :1], B), "weights must be a list of tensors, not float32[1, 1]"),
        ((V, None, None), "weights must be a list of tensors, not NoneType None"),
        ((V, [W], B), "biases must be a list of tensors, not float32[4] on cpu"),
        ((V, [1], [B]), "weights[0] must be a tensor, not int 1"),
        ((V, [W], [None]), "biases[0] must be a tensor, not NoneType None"),
        ((V, [W.to_sparse()], [B]), "weights[0] must be a dense tensor, not sparse_coo"),
        ((V, [W], [B], 1, 2, 3), "key must be a tensor, not int 1"),
        ((V, [W], [B], KEY, [KEY], KEY), "keys must be a tensor, not a list of 1"),
        ((V, [W], [B], KEY, KEY[None], 7), "table must be a tensor, not int 7"),
        ((V, [W], [B], SCALAR, KEY[None], W), "key must be [R, Q], not float32[] on cpu"),
        ((V, [W], [B], KEY, SCALAR, W), "keys must be [J, R, Q], not float32[] on cpu"),
        ((V, [W], [B], KEY, KEY[None], SCALAR), "table must be float32[1, 2, 4] on cpu, not float32[] on cpu"),
        ((V, [W], [B], KEY.half(), KEY[None], W), "key must be float32[2, 5] on cpu, not float16[2, 5] on cpu"),
    ],
)
def test_lists_and_tables_of_grouped_linear(arguments: tuple[Any, ...], words: str) -> None:
    for call in (ops.grouped_linear, ops.grouped_linear.backend):
        assert sentence(call, *arguments).startswith(f"grouped_linear: {words}")


def test_a_tensor_in_a_list_that_requires_grad() -> None:
    wanting = W.clone().requires_grad_()
    for call in (ops.grouped_linear, torch.ops.fusedit.grouped_linear, ops.grouped_linear.plain):
        for arguments in ((V, [W, wanting], [B, B]), (V, [W], [B.clone().requires_grad_()])):
            with pytest.raises(OpError, match=r"^grouped_linear has no gradient: call it under torch.no_grad\(\), or"):
                call(*arguments)
    with torch.no_grad():
        assert not ops.grouped_linear(V, [wanting], [B])[0].requires_grad


@pytest.mark.parametrize("name", SEVERAL)
def test_outputs_are_a_tuple_of_as_many_as_there_are(name: str) -> None:
    args, kwargs = small(name)
    outs = tuple(torch.full_like(t, 7.0) for t in REGISTRY[name](*args, **kwargs))
    count = len(outs)
    for out, words in (
        (list(outs), f"a list of {count}"),
        (outs[:1], "a tuple of 1"),
        ((*outs, outs[0]), f"a tuple of {count + 1}"),
        (outs[0], str(outs[0].dtype).removeprefix("torch.")),
        ({}, "dict {}"),
    ):
        said = sentence(REGISTRY[name], *args, **kwargs, out=out)
        assert said.startswith(f"{name}: out must be a tuple of {count} tensors, not {words}")
    assert "out[1] must be a tensor, not NoneType None" in sentence(
        REGISTRY[name], *args, **kwargs, out=(outs[0], None, *outs[2:])
    )
    assert all(bool((t.float() == 7).all()) for t in outs)
    assert f"out must be a tuple of {count} tensors" in sentence(REGISTRY[name].plain, *args, **kwargs, out=outs[:1])


def test_the_one_output_is_a_tensor() -> None:
    assert sentence(ops.gelu_tanh, X, out=[X]) == "gelu_tanh: out must be a tensor, not a list of 1"


def test_too_few_dimensions() -> None:
    for name, rest in (("linear_gelu", (W, B)), ("linear_swiglu", (W,))):
        for x in (V[0], SCALAR):
            shape = list(x.shape)
            expected = f"{name}: x must have at least two dimensions, not float32{shape} on cpu"
            assert sentence(REGISTRY[name], x, *rest) == expected


def test_pictures_without_channels() -> None:
    """torch gives other shapes or fails in its own words; `winograd_conv2d`, which needs none of it, gives the bias."""
    x, weight, none = torch.randn(1, 0, 4, 4), torch.randn(3, 0, 3, 3), torch.randn(0)
    for name, rest in (
        ("conv2d", (weight,)),
        ("upsample_conv2d", (weight,)),
        ("group_norm_silu_conv2d", (none, none, 1, weight)),
        ("conv2d_group_norm_silu", (weight, B[:3], B[:3], 1)),
    ):
        for call in ways(REGISTRY[name]):
            assert (
                sentence(call, x, *rest) == f"{name}: x must have at least one channel, not float32[1, 0, 4, 4] on cpu"
            )


def test_numbers_that_are_none() -> None:
    assert "eps must be a number, not str 'a'" in sentence(ops.layer_norm_modulate, X, V, V, eps="a")
    image, weight = torch.randn(1, 8, 4, 4), torch.ones(8)
    said = sentence(ops.group_norm_silu, image, weight, weight, 2.0)
    assert said == "group_norm_silu: groups must be a whole number, not float 2.0"


EPS = sorted(name for name in NAMES if "eps" in REGISTRY[name]._signature.kinds)
IMAGE, ONES = torch.randn(1, 8, 4, 4), torch.ones(8)
QKV = torch.randn(3, 2, 5, 2, 8).unbind()


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("a defect of a foreign class")


NO_NUMBERS: list[tuple[Any, str]] = [
    (Fraction(1, 3), "must be a number, not Fraction Fraction(1, 3); convert it with float()"),
    (True, "must be a number, not bool True"),
    (1j, "must be a number, not complex 1j"),
    (torch.ones(2, 100), "must be a number, not float32[2, 100] on cpu"),
    (torch.tensor(0.5), "must be a number, not float32[] on cpu"),
    (np.ones((2, 2)), "must be a number, not ndarray float64[2, 2]"),
    (np.ones(2), "must be a number, not ndarray float64[2]"),
    ([1.0], "must be a number, not a list of 1"),
    (Unprintable(), "must be a number, not Unprintable"),
    (10**30, f"must be below 2**63 where it is a whole number, not int {10**30}"),
    (10**400, "must be below 2**63 where it is a whole number, not int"),
    (10**5000, "must be below 2**63 where it is a whole number, not int"),
]


@pytest.mark.parametrize("name", EPS)
def test_an_eps_that_is_none(name: str) -> None:
    args, _ = small(name)
    wrong = [
        *NO_NUMBERS,
        (None, "must be a number, not NoneType None"),
        *((v, f"must be finite and 0 or more, not float {v}") for v in (-1e-6, float("nan"), float("inf"))),
        (-1, "must be finite and 0 or more, not int -1"),
    ]
    for value, words in wrong:
        for call in ways(REGISTRY[name]):
            assert sentence(call, *args, eps=value) == f"{name}: eps {words}"
    for right in (0, 1, 0.0, np.float64(1e-3)):
        for call in ways(REGISTRY[name]):
            call(*args, eps=right)


def test_other_numbers_that_are_none() -> None:
    wrong = [*NO_NUMBERS, *((v, f"must be finite or None, not float {v}") for v in (float("nan"), -float("inf")))]
    for value, words in wrong:
        for call in ways(ops.attention):
            assert sentence(call, *QKV, scale=value) == f"attention: scale {words}"
    for silu in (1, None, "yes", torch.ones(9, 9), np.ones(3), Unprintable()):
        for call in ways(ops.group_norm_silu):
            said = sentence(call, IMAGE, ONES, ONES, 4, silu=silu)
            assert said.startswith("group_norm_silu: silu must be True or False, not ")
            assert "1." not in said
    for groups in (True, torch.tensor([[2, 2]]), Fraction(2), 4.0):
        for call in ways(ops.group_norm_silu):
            assert "groups must be a whole number, not " in sentence(call, IMAGE, ONES, ONES, groups)
    for start in (-1, True, torch.arange(99), 10**5000):
        for call in ways(ops.linear_gelu):
            assert "start must be an integer from 0 to 4, the outputs of weight, not " in sentence(call, X, W, B, start)


def test_numbers_that_are_some() -> None:
    for scale in (2, -0.5, 0, np.float64(0.25)):
        assert torch.equal(ops.attention(*QKV, scale=scale), ops.attention(*QKV, scale=float(scale)))
    assert torch.equal(ops.group_norm_silu(IMAGE, ONES, ONES, np.int64(4)), ops.group_norm_silu(IMAGE, ONES, ONES, 4))


def test_wrong_shapes_of_plain_are_named() -> None:
    for call in (ops.swiglu.plain, ops.swiglu.unchecked):
        assert sentence(call, X, V) == "swiglu: b must be float32[2, 3, 16] on cpu, not float32[2, 16] on cpu"


def test_plain_refuses_what_the_op_refuses() -> None:
    out = torch.randn(1)
    before = out.clone()
    assert "out must be float32[2, 3, 16] on cpu, not float32[1]" in sentence(ops.swiglu.plain, X, X, out=out)
    assert torch.equal(out, before)
    buffer = torch.randn(2, 3, 12)
    before = buffer.clone()
    assert "partly overlaps an input" in sentence(ops.strided_copy.plain, buffer[..., :8], out=buffer[..., 4:])
    assert torch.equal(buffer, before)
    assert sentence(ops.swiglu.plain, X, 3) == "swiglu: b must be a tensor, not int 3"
    assert "start must be an integer from 0 to 4" in sentence(ops.linear_gelu.plain, X, W, B, -1)


@pytest.mark.parametrize("name", NAMES)
def test_plain_has_no_gradient(name: str) -> None:
    (x, *rest), kwargs = small(name)
    with pytest.raises(OpError, match=rf"^{name} has no gradient: call it under torch.no_grad\(\)"):
        REGISTRY[name].plain(x.detach().clone().requires_grad_(), *rest, **kwargs)


def test_an_error_that_no_argument_explains_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ops.gelu_tanh, "_plain", broken)
    for call in (ops.gelu_tanh, ops.gelu_tanh.plain, torch.ops.fusedit.gelu_tanh):
        with pytest.raises(RuntimeError, match="a defect"):
            call(X)
