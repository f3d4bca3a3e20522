"""A linear layer and GELU in its tanh form, on all of its outputs or on those from one on.

    u[..., n] = bias[n] + sum_k x[..., k] weight[n, k] (+ low[..., n])
    y[..., n] = u[..., n] for n < start, gelu_tanh(u[..., n]) from there on

x[..., K], weight[N, K], bias[N], y[..., N], one dtype. On CUDA in one kernel where one is as fast as the library's
product alone; GELU then works on the fp32 accumulator: u is never rounded, and never written and read again.
- `epilogue`: start = 0, bf16, by cuBLASLt's GELU epilogue. H200, [4096,3072] x [12288,3072]: 0.478 ms, against 0.525
  with gelu_tanh behind the product and 0.467 for the product alone; relative error 0.00165 against 0.00239. Its tanh is
  the hardware's, good to about 11 bits, which is not enough for fp16 and fp32.
- `triton`: start > 0, half precision, on Hopper: a persistent kernel, TMA loads, 128 x 256 tiles of wgmma. It is there
  for the input of a parallel block, q, k and v before the MLP's columns, where the library has no epilogue.
- `hopper`: with a low-rank term (what LoRA adds: t[..., P R], up[N, R], see _low_rank.py), bf16, on Hopper: the term is
  more steps of the product; see _linear_hopper.py.
- `separate`: a product, add_low_rank and gelu_tanh in place. `linear_gelu.backend(...)` says which, and why.
Bytes: x, weight, bias read, y written. FLOPs: 2 M N K. Exactness: reordered.
Source: the feed-forward of FLUX (Hendrycks and Gimpel 2016); CUBLASLT_EPILOGUE_GELU_BIAS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _hopper, _linear_hopper, _low_rank
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._hopper import BK, BM, BN, STAGES, descriptor, place
from fusedit.ops._low_rank import rank
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.add_low_rank import add_low_rank
from fusedit.ops.gelu_tanh import gelu, gelu_tanh
from fusedit.ops.gelu_tanh import reference as gelu_reference
from fusedit.runtime.product import multiply, rows

Tensor = torch.Tensor
HALF: Final = BN // 2
"""Columns that are activated or not as a whole."""


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Tensor:
    x, weight, bias, t, up = wide(x, weight, bias, t, up)
    u = x @ weight.T + bias
    if t is not None and up is not None:
        u = u + _low_rank.low_rank(t, up, part)
    return torch.cat([u[..., :start], gelu_reference(u[..., start:])], dim=-1)


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if out is None and not start and t is None:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return _separate(x, weight, bias, start, out, (t, up, part), gelu_tanh.unchecked, add_low_rank.unchecked)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> tuple[tuple[int, ...]]:
    _check.activation("linear_gelu", "x", x, "." * max(2, getattr(x, "ndim", 2)))
    _check.activation("linear_gelu", "weight", weight, "NK")
    N = weight.shape[0]
    _check.like("linear_gelu", "weight", weight, x, (N, x.shape[-1]))
    _check.like("linear_gelu", "bias", bias, x, (N,))
    if type(start) is not int or not 0 <= start <= N:
        shown = _check.show(start).removeprefix("int ")
        raise OpError(f"linear_gelu: start must be an integer from 0 to {N}, the outputs of weight, not {shown}")
    _low_rank.check("linear_gelu", x, N, t, up, part, x.dtype)
    return ((*x.shape[:-1], N),)


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Cost:
    del start, part
    count = x.numel() // max(1, x.shape[-1])
    written = count * weight.shape[0] * x.element_size()
    flops = 2 * count * weight.numel() + _low_rank.flops(x, up)
    return Cost(_low_rank.nbytes(x, weight, bias, t, up) + written, flops)


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # the result may lie on none


def choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del bias
    if t is not None:
        return _linear_hopper.choose("gelu", x, weight, t, up, part, start)
    if start:
        chosen = _hopper.choose(x, weight, weight.shape[0])
        uneven = chosen.name == "triton" and start % HALF
        return Backend("separate", f"start {start} is no multiple of {HALF}") if uneven else chosen
    if x.device.type != "cuda":
        return Backend("plain", f"no GELU epilogue on {x.device.type}")
    if torch.version.hip is not None:
        return Backend("separate", "ROCm is not supported")
    if x.dtype is not torch.bfloat16:
        return Backend("separate", f"the epilogue's tanh is too coarse for {str(x.dtype).removeprefix('torch.')}")
    if not hasattr(torch, "_addmm_activation"):
        return Backend("separate", "this torch does not offer the epilogue")
    if not weight.shape[1]:
        return Backend("separate", "has nothing to multiply")
    if weight.shape[1] % 8 or weight.shape[0] % 8 or not weight.is_contiguous():
        return Backend("separate", "rows of the weight are not on 16 bytes")
    return Backend("epilogue", "")


@kernel
def _kernel(
    x_d: tl.tensor,
    weight_d: tl.tensor,
    y_d: tl.tensor,
    bias_ptr: tl.tensor,
    B: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    start: tl.tensor,
    programs: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # The columns before `start` and those from there on in two loops: a branch in a flattened loop would undo its
    # pipeline, and one loop with GELU for all took 4 % longer. The second goes on where the first leaves each program.
    height = tl.cdiv(S, BM) * B
    plain = start // BN
    first = height * plain
    tiles = height * tl.cdiv(N, BN)
    pid = tl.program_id(0)
    # flatten: loads of the next tile start while this one's epilogue is computed.
    for tile in tl.range(pid, first, programs, flatten=True):
        r, c = place(tile, height, plain, GROUP)
        _tile(x_d, weight_d, y_d, bias_ptr, r, c * BN, S, N, K, start, False, BM, BN, BK, HALF)
    for tile in tl.range(pid + tl.cdiv(tl.maximum(first - pid, 0), programs) * programs, tiles, programs, flatten=True):
        r, c = place(tile - first, height, tl.cdiv(N, BN) - plain, GROUP)
        _tile(x_d, weight_d, y_d, bias_ptr, r, (plain + c) * BN, S, N, K, start, True, BM, BN, BK, HALF)


@kernel
def _tile(
    x_d: tl.tensor,
    weight_d: tl.tensor,
    y_d: tl.tensor,
    bias_ptr: tl.tensor,
    r: tl.tensor,
    column: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    start: tl.tensor,
    GELU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    per_item = tl.cdiv(S, BM)
    item, row = r // per_item, r % per_item * BM
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        x = x_d.load([item, row, k * BK]).reshape(BM, BK)
        acc = tl.dot(x, weight_d.load([column, k * BK]).T, acc)
    # In two halves, since a whole tile of the result would cost the fourth stage its shared memory.
    left, right = acc.reshape(BM, 2, HALF).permute(0, 2, 1).split()
    left = _finish(left, bias_ptr, column, N, start, GELU, HALF)
    y_d.store([item, row, column], left.to(y_d.dtype).reshape(1, BM, HALF))
    right = _finish(right, bias_ptr, column + HALF, N, start, GELU, HALF)
    y_d.store([item, row, column + HALF], right.to(y_d.dtype).reshape(1, BM, HALF))


@kernel
def _finish(
    u: tl.tensor,
    bias_ptr: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    start: tl.tensor,
    GELU: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    at = column + tl.arange(0, HALF)
    u += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    return tl.where(column < start, u, gelu(u)) if GELU else u  # a half of the first tile may still lie before `start`


_CONSTEXPRS: Final = {"BM": BM, "BN": BN, "BK": BK, "HALF": HALF, "GROUP": 16}


def builds() -> list[Build]:
    types = {
        "x_d": f"tensordesc<bf16[1,{BM},{BK}]>",
        "weight_d": f"tensordesc<bf16[{BN},{BK}]>",
        "y_d": f"tensordesc<bf16[1,{BM},{HALF}]>",
        "bias_ptr": "*bf16",
    }
    low = _linear_hopper.builds("gelu")
    return [*low, Build.of("bf16-hopper", _kernel, types, _CONSTEXPRS, 8, "no-spill", "descriptors", num_stages=STAGES)]


def launch(x: Tensor, weight: Tensor, bias: Tensor, start: int, y: Tensor) -> None:
    """The Hopper kernel, whatever the number of tiles: x [B,S,K], weight [N,K], bias [N], y [B,S,N] dense rows on 16
    bytes, start a multiple of HALF."""
    programs = _hopper.programs(x, weight.shape[0])
    _kernel[(programs,)](
        descriptor(x, [1, BM, BK]),
        descriptor(weight, [BN, BK]),
        descriptor(y, [1, BM, HALF]),
        bias.contiguous(),
        x.shape[0],
        x.shape[1],
        weight.shape[0],
        x.shape[2],
        start,
        programs,
        **_CONSTEXPRS,
        num_warps=8,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )


def _make_ready(x: Tensor, weight: Tensor, start: int) -> None:
    small = x.new_zeros(1, 8, BK)
    launch(small, x.new_zeros(BN, BK), x.new_zeros(BN), HALF, x.new_empty(1, 8, BN))
    tail = x.new_zeros(1, 1, weight.shape[0] - start)
    gelu_tanh(tail, out=tail)


_TEXT: Final = rank((1, 512, 3072), 12288, 32)
_LAYER: Final = (T((2, 5, 64)), T((96, 64), std=0.1), T((96,)))
CASES = (
    Case("small", (T((2, 5, 64)), T((96, 64), std=0.1), T((96,)))),
    Case("rows", (T((7, 64)), T((96, 64), std=0.1), T((96,)))),
    Case("four-dimensions", (T((2, 3, 5, 64)), T((96, 64), std=0.1), T((96,)), 32)),
    Case("odd", (T((1, 3, 50)), T((35, 50), std=0.1), T((35,))), ("small", "odd")),
    Case("joint", (T((2, 5, 64), "joint"), T((96, 64), std=0.1), T((96,))), ("small", "strided")),
    Case("sliced", (T((2, 5, 64), "sliced"), T((96, 64), std=0.1), T((96,))), ("small", "strided")),
    Case("transposed", (T((2, 5, 64), "transposed"), T((96, 64), "gapped", std=0.1), T((96,))), ("small", "strided")),
    Case("tail", (T((2, 5, 64)), T((384, 64), std=0.1), T((384,)), 128)),
    Case("tail-rows", (T((7, 64), "sliced"), T((384, 64), std=0.1), T((384,)), 256), ("small", "strided")),
    Case("tail-odd", (T((1, 3, 50)), T((35, 50), std=0.1), T((35,)), 11), ("small", "odd")),
    Case("tail-joint", (T((2, 5, 64), "joint"), T((96, 64), std=0.1), T((96,)), 32), ("small", "strided")),
    Case("tail-all", (T((2, 5, 64)), T((96, 64), std=0.1), T((96,)), 96), ("small", "odd")),
    Case("low-rank", (*_LAYER, 0, *rank((2, 5, 64), 96, 8))),
    Case("low-rank-tail", (*_LAYER, 32, *rank((2, 5, 64), 96, 8, 3), 16)),
    Case("low-rank-odd", (*_LAYER, 7, *rank((2, 5, 64), 96, 3, 2), 11), ("small", "odd")),
    Case("empty", (T((2, 0, 64)), T((96, 64)), T((96,))), ("small", "empty")),
    Case("flux-image", (T((1, 4096, 3072), "joint"), T((12288, 3072), std=0.02), T((12288,))), ("real",)),
    Case("flux-text", (T((2, 512, 3072), "joint"), T((12288, 3072), std=0.02), T((12288,))), ("real",)),
    Case("flux-single", (T((1, 4608, 3072)), T((21504, 3072), std=0.02), T((21504,)), 9216), ("real",)),
    Case(
        "flux-single-lora",
        (T((1, 4608, 3072)), T((21504, 3072), std=0.02), T((21504,)), 9216, *rank((1, 4608, 3072), 21504, 32, 4), 3072),
        ("real",),
    ),
    Case("flux-text-lora", (T((1, 512, 3072)), T((12288, 3072), std=0.02), T((12288,)), 0, *_TEXT), ("real",)),
    Case("flux-single-512", (T((2, 1536, 3072)), T((21504, 3072), std=0.02), T((21504,)), 9216), ("real",)),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
    reads=reads,
)
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x[..., K] @ weight[N, K]^T + bias[N] -> [..., N], through gelu (tanh form) from column `start` on; with
    t[..., P R] @ up[N, R]^T part by part before that where given."""
    name = choose(x, weight, bias, start, t, up, part).name
    linear_gelu.ran[name] += 1
    if name == "plain":
        return plain(x, weight, bias, start, t, up, part, out=out)
    if t is not None:
        _linear_hopper.make_ready("gelu", x, bias)
    elif start and start % HALF == 0 and _hopper.first_time("linear_gelu", x, weight):
        _make_ready(x, weight, start)
    if name == "separate":
        return _separate(x, weight, bias, start, out, (t, up, part), gelu_tanh, add_low_rank)
    y = x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
    if name == "hopper":
        assert t is not None
        assert up is not None
        _linear_hopper.into("gelu", x, weight, bias, y, start, t, up, part)
        return y
    if name == "triton":
        return _hopper.into_dense(lambda x, y: launch(x, weight, bias, start, y), x, y)
    apart = x.ndim == 3 and (rows(x) is None or rows(y) is None)
    for x_item, y_item in zip(x, y, strict=True) if apart else [(x, y)]:
        matrix = x_item.reshape(-1, x_item.shape[-1])
        if y_item.is_contiguous():
            torch._addmm_activation(bias, matrix, weight.t(), use_gelu=True, out=y_item.view(-1, y_item.shape[-1]))
        else:
            made = torch._addmm_activation(bias, matrix, weight.t(), use_gelu=True)
            y_item.copy_(made.view(y_item.shape))
    return y


def _separate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: int,
    out: Tensor | None,
    low: tuple[Tensor | None, Tensor | None, int],
    activate: Callable[..., Tensor],
    add: Callable[..., Tensor],
) -> Tensor:
    """A product, the low-rank term and GELU in place on its last columns; into `out` without a copy where its columns
    are dense."""
    direct = out is not None and out.ndim in (2, 3) and out.stride(-1) == 1
    y = multiply(x, weight, bias, out if direct else None)
    if low[0] is not None:
        add(y, *low, out=y)
    tail = y[..., start:]
    if tail.shape[-1]:
        activate(tail, out=tail)
    return y if out is None or direct else out.copy_(y)
