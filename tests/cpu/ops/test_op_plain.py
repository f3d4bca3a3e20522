"""Plain torch, which is what every op is on a CPU: right, in every dtype, layout and way of calling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops._cases import Case
from fusedit.ops._op import Op
from fusedit.ops._verify import double, error, misrounded, verify
from fusedit.ops.winograd_weight import A, B, G


def small() -> Iterator[object]:
    for op in ops.registry().values():
        for case in op.cases:
            if "small" in case.tags:
                yield pytest.param(op, case, id=f"{op.name}-{case.name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("op", "case"), list(small()))
def test_every_way_of_calling(op: Op[..., object], case: Case, dtype: torch.dtype) -> None:
    with torch.no_grad():
        assert verify(op, case, dtype) == []


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the stock models write it: norm in fp32, then the weight in the weight's dtype."""
    n = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return n.to(weight.dtype) * weight


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)


def stock(name: str, a: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The stock formulation of one op, on the arguments of its `small` case."""
    if name == "layer_norm_modulate":
        return (F.layer_norm(a[0], a[0].shape[-1:], eps=1e-6) * (1 + a[1][:, None]) + a[2][:, None],)
    if name == "rms_norm_modulate":
        return (rms(a[0], a[1], 1e-5) * (1 + a[2][:, None]),)
    if name == "gated_residual":
        return (a[0] + a[2][:, None] * a[1],)
    if name == "gated_residual_layer_norm":
        r = a[0] + a[2][:, None] * a[1]
        return r, F.layer_norm(r, r.shape[-1:], eps=1e-6) * (1 + a[3][:, None]) + a[4][:, None]
    if name == "rms_gated_residual":
        return (a[0] + a[3][:, None].tanh() * rms(a[1], a[2], 1e-5),)
    if name == "rms_gated_residual_rms_norm":
        r = a[0] + a[3][:, None].tanh() * rms(a[1], a[2], 1e-5)
        return r, rms(r, a[4], 1e-5) * (1 + a[5][:, None])
    if name == "qk_norm_rope":
        return rope(rms(a[0][:, :, 0], a[1], 1e-6), *a[3:5]), rope(rms(a[0][:, :, 1], a[2], 1e-6), *a[3:5])
    if name == "gelu_tanh":
        return (F.gelu(a[0], approximate="tanh"),)
    if name == "strided_copy":
        return (a[0].clone(),)
    if name == "linear_gelu":
        return (F.gelu(F.linear(*a), approximate="tanh"),)
    if name == "linear_swiglu":
        half = a[1].shape[0] // 2
        return (F.silu(F.linear(a[0], a[1][:half])) * F.linear(a[0], a[1][half:]),)
    if name == "grouped_linear":
        weights, biases = a[1], a[2]
        y = torch.cat([F.linear(a[0], w, b) for w, b in zip(weights, biases, strict=True)], dim=1)
        return y, torch.zeros(len(y))
    if name == "swiglu":
        return (F.silu(a[0]) * a[1],)
    if name == "low_rank":
        return ((F.linear(*a[:2]) * a[2]).to(a[0].dtype),)
    if name == "add_low_rank":
        return (a[0] + F.linear(*a[1:3]),)
    if name == "linear_low_rank":
        return (F.linear(*a[:3]) + F.linear(*a[3:5]),)
    if name == "group_norm_silu":
        return (F.silu(F.group_norm(a[0], a[3], a[1], a[2], eps=1e-6)),)  # type: ignore[arg-type]
    if name == "residual_group_norm_silu":
        r = a[0] + a[1]
        return r, F.silu(F.group_norm(r, a[4], a[2], a[3], eps=1e-6))  # type: ignore[arg-type]
    if name == "conv2d_group_norm_silu":
        r = F.conv2d(a[0], a[1], a[5], padding=1) + a[6]
        return r, F.silu(F.group_norm(r, a[4], a[2], a[3], eps=1e-6))  # type: ignore[arg-type]
    if name == "group_norm_silu_conv2d":
        n = F.silu(F.group_norm(a[0], a[3], a[1], a[2], eps=1e-6))  # type: ignore[arg-type]
        return (F.conv2d(n, a[4], a[5], padding=1),)
    if name == "conv2d":
        return (F.silu(F.conv2d(*a[:3], padding=1)) + a[3],)
    if name == "upsample_conv2d":
        return (F.conv2d(F.interpolate(a[0], scale_factor=2.0, mode="nearest"), *a[1:], padding=1),)
    if name in ("nchw_to_nhwc", "nhwc_to_nchw", "pack_tiles", "unpack_tiles"):
        return (ops.registry()[name].reference(*a).to(a[0].dtype),)
    if name == "row_dots":
        return (torch.linalg.vector_norm(a[0].float(), dim=1).square()[None],)
    if name == "winograd_weight":
        g = a[0].new_tensor(G[2])
        return (torch.einsum("ir,kcrs,js->ijkc", g, a[0], g).reshape(16, *a[0].shape[:2]),)
    if name == "winograd_conv2d":  # every step rounded
        (x, u, bias, residual), (_, _, H, W) = a, a[0].shape
        d = F.pad(x, (1, 1 + W % 2, 1, 1 + H % 2)).unfold(2, 4, 2).unfold(3, 4, 2)
        v = torch.einsum("ir,nchwrs,js->nhwijc", x.new_tensor(B[2]), d, x.new_tensor(B[2])).flatten(3, 4)
        m = torch.einsum("nhwpc,pkc->nhwpk", v, u).unflatten(3, (4, 4))
        y = torch.einsum("pi,nhwijk,qj->nkhpwq", x.new_tensor(A[2]), m, x.new_tensor(A[2]))
        return (F.silu(y.flatten(4, 5).flatten(2, 3)[:, :, :H, :W] + bias[:, None, None]) + residual,)
    q, k, v = (t.transpose(1, 2) for t in a[:3])
    return (F.scaled_dot_product_attention(q, k, v).transpose(1, 2),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(n for n, op in ops.registry().items() if op.exactness != "lossy"))
def test_at_least_as_accurate_as_stock(name: str, dtype: torch.dtype) -> None:
    op = ops.registry()[name]
    case = next(case for case in op.cases if case.name == "small")
    ours, theirs = [], []
    for seed in range(20):
        args, kwargs = case.build(dtype, seed=seed)
        truth = op.reference(*map(double, args), **kwargs)
        truths = [truth] if torch.is_tensor(truth) else list(truth)
        made = op.plain(*args, **kwargs)
        made = [made] if torch.is_tensor(made) else list(made)
        ours.append([error(y, r).relative_l2 for y, r in zip(made, truths, strict=True)])
        theirs.append([error(y, r).relative_l2 for y, r in zip(stock(name, args), truths, strict=True)])
    mine, other = torch.tensor(ours).mean(0), torch.tensor(theirs).mean(0)
    assert (mine <= other * 1.05 + 2e-8).all(), (mine, other)


@pytest.mark.parametrize("start", [0, 1, 6])
@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0), (2, 1, 3, 0), (2, 1, 3, 2, 0)], ids=len)
def test_a_product_over_nothing_is_the_bias(shape: tuple[int, ...], start: int) -> None:
    weight, bias = torch.randn(6, 0), torch.randn(6)
    expected = torch.cat([bias[:start], F.gelu(bias[start:], approximate="tanh")]).expand(*shape[:-1], 6)
    first = torch.randn(1, *shape[1:])
    for x in (torch.randn(shape), first.expand(shape), torch.randn(*shape[:-1], 5)[..., :0]):
        for call in (ops.linear_gelu, ops.linear_gelu.plain):
            assert torch.allclose(call(x, weight, bias, start), expected)
            out = torch.full(expected.shape, float("nan"))
            assert torch.allclose(call(x, weight, bias, start, out=out), expected)
            wider = torch.full((*expected.shape[:-1], 9), float("nan"))[..., :6]
            assert torch.allclose(call(x, weight, bias, start, out=wider), expected)
        assert torch.equal(ops.linear_swiglu(x, weight), torch.zeros(*shape[:-1], 3))


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LIMITS = {F64: 1e-12, F32: 3e-6, BF16: 8e-3}


def cast(t: object, dtype: torch.dtype) -> object:
    return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "other"), [(F32, F64), (BF16, F64), (F64, F32), (F64, F16), (F32, F16), (BF16, F32)], ids=str
)
@pytest.mark.parametrize("name", sorted(ops.registry()))
def test_one_argument_in_another_dtype(name: str, dtype: torch.dtype, other: torch.dtype) -> None:
    """Whatever an op takes it computes in the widest dtype and rounds to that of x, fp64 on either side too."""
    op = ops.registry()[name]
    args, kwargs = next(case for case in op.cases if case.name == "small").build(F32 if dtype is F64 else dtype)
    args = tuple(cast(t, F64) if dtype is F64 else t for t in args)
    for place in range(1, len(args)):
        given = (*args[:place], cast(args[place], other), *args[place + 1 :])
        try:
            op.backend(*given, **kwargs)
        except OpError:
            continue
        truth = op.reference(*given, **kwargs)
        for call in (op, op.plain, op.unchecked):
            made = call(*given, **kwargs)
            pairs = [(made, truth)] if torch.is_tensor(truth) else list(zip(made, truth, strict=True))
            kept = op.dtypes(*given, **kwargs)
            for (y, r), wanted, slack in zip(pairs, kept, op.slack, strict=True):
                assert y.dtype == wanted
                if wanted is torch.float8_e4m3fn:
                    assert misrounded(y, r, slack) == 0, (place, call)
                else:
                    assert error(y, r.double()).relative_l2 < LIMITS[max(wanted, dtype, key=LIMITS.get)], (place, call)


@torch.no_grad()
@pytest.mark.parametrize("place", [2, 3, 7])
def test_the_sum_of_a_norm_in_fp64_is_rounded_before_the_norm(place: int) -> None:
    x = torch.randn(2, 8, 3, 5)
    args = [x, x.clone(), torch.rand(8), torch.rand(8), 4, 1e-6, True, torch.rand(8)]
    args[place] = args[place].double()  # type: ignore[union-attr]
    s, y = ops.residual_group_norm_silu(*args)  # type: ignore[arg-type]
    assert s.dtype == y.dtype == x.dtype
    for t, truth in zip((s, y), ops.residual_group_norm_silu.reference(*args), strict=True):
        assert error(t, truth.double()).relative_l2 < LIMITS[F32]


def test_weights_in_another_dtype_are_not_rounded() -> None:
    x, y = torch.randn(1, 64, 128).bfloat16(), torch.randn(1, 64, 128).bfloat16()
    gate = 1 + torch.rand(1, 128) / 300  # below the resolution of bf16
    made = ops.gated_residual.plain(torch.zeros_like(x), y, gate)
    assert torch.equal(made, (y.float() * gate[:, None]).bfloat16())
    assert not torch.equal(made, y)
