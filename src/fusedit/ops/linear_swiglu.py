"""Both input layers of a gated feed-forward layer and SwiGLU, in one kernel.

    u[..., n] = sum_k x[..., k] weight[n, k] (+ low[..., n])
    y[..., f] = a sigmoid(a) b,   a = u[..., f],   b = u[..., F + f]

x[..., K], weight[2 F, K] (both layers, one after the other), y[..., F], one dtype. The products are accumulated in fp32
and never rounded before the gate; neither is written to memory.
On Hopper: a persistent kernel, TMA loads, 128 x 256 tiles of wgmma of which one half is a and the other b of the same
columns, so that the gate needs nothing but a thread's own registers. Everywhere else, and where the tiles would leave
the last wave of multiprocessors mostly idle, the library's product and swiglu; `linear_swiglu.backend(...)` says which.
Measured on an H200, sustained, [4320,3840] x [20480,3840] in bf16: 1.038 ms, against 1.068 for cuBLAS and swiglu and
1.008 for cuBLAS alone; at 1248 rows, whose last wave is half empty, both take 0.318.
With a low-rank term (what LoRA adds: t[..., P R], up[2 F, R], see _low_rank.py) in bf16 on Hopper the kernel of
_linear_hopper.py, of which the term is more steps; else add_low_rank between the two.
Bytes: x, weight read, y written. FLOPs: 4 M F K. Exactness: reordered.
Source: Shazeer 2020, as the feed-forward of Z-Image uses it (a = w1 x, b = w3 x).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _hopper, _linear_hopper, _low_rank
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._elementwise import sigmoid
from fusedit.ops._hopper import BK, BM, BN, STAGES, descriptor, place
from fusedit.ops._low_rank import rank
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.add_low_rank import add_low_rank
from fusedit.ops.swiglu import swiglu

Tensor = torch.Tensor
BF: Final = BN // 2
"""Columns of y in a tile."""


def reference(x: Tensor, weight: Tensor, t: Tensor | None = None, up: Tensor | None = None, part: int = 0) -> Tensor:
    x, weight, t, up = wide(x, weight, t, up)
    u = x @ weight.T
    if t is not None and up is not None:
        u = u + _low_rank.low_rank(t, up, part)
    a, b = u.chunk(2, dim=-1)
    return a / (1 + torch.exp(-a)) * b


def plain(
    x: Tensor,
    weight: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    u = F.linear(x, weight)
    if t is not None and up is not None:
        u += _low_rank.low_rank(t, up, part)
    a, b = u.chunk(2, dim=-1)
    return swiglu.unchecked(a, b, out=out)


def check(
    x: Tensor, weight: Tensor, t: Tensor | None = None, up: Tensor | None = None, part: int = 0
) -> tuple[tuple[int, ...]]:
    _check.activation("linear_swiglu", "x", x, "." * max(2, getattr(x, "ndim", 2)))
    _check.activation("linear_swiglu", "weight", weight, "NK")
    _check.like("linear_swiglu", "weight", weight, x, (weight.shape[0], x.shape[-1]))
    if weight.shape[0] % 2:
        raise OpError(f"linear_swiglu: weight must have an even number of rows, not {_check.show(weight)}")
    _low_rank.check("linear_swiglu", x, weight.shape[0], t, up, part, x.dtype)
    return ((*x.shape[:-1], weight.shape[0] // 2),)


def cost(x: Tensor, weight: Tensor, t: Tensor | None = None, up: Tensor | None = None, part: int = 0) -> Cost:
    del part
    rows = x.numel() // max(1, x.shape[-1])
    written = rows * weight.shape[0] // 2 * x.element_size()
    flops = 2 * rows * weight.numel() + _low_rank.flops(x, up)
    return Cost(_low_rank.nbytes(x, weight, t, up) + written, flops)


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # the result may lie on none


def choose(x: Tensor, weight: Tensor, t: Tensor | None = None, up: Tensor | None = None, part: int = 0) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    if t is not None:
        return _linear_hopper.choose("swiglu", x, weight, t, up, part, 0)
    chosen = _hopper.choose(x, weight, weight.shape[0])
    if chosen.name == "triton" and weight.shape[0] % BN:
        return Backend("separate", f"needs multiples of {BF} columns, not {weight.shape[0] // 2}")
    return chosen


@kernel
def _kernel(
    x_d: tl.tensor,
    weight_d: tl.tensor,
    y_d: tl.tensor,
    B: tl.tensor,
    S: tl.tensor,
    F: tl.tensor,
    K: tl.tensor,
    programs: tl.tensor,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    per_item = tl.cdiv(S, BM)
    rows = per_item * B
    columns = tl.cdiv(F, BF)
    # flatten: loads of the next tile start while this one's gate is computed (9 % on an H200).
    for tile in tl.range(tl.program_id(0), rows * columns, programs, flatten=True):
        r, c = place(tile, rows, columns, GROUP)
        c *= BF
        acc = tl.zeros((BM, 2 * BF), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_d.load([r // per_item, r % per_item * BM, k * BK]).reshape(BM, BK)
            w = weight_d.load([0, c, k * BK]).reshape(2 * BF, BK)
            acc = tl.dot(x, w.T, acc)
        a, b = acc.reshape(BM, 2, BF).permute(0, 2, 1).split()
        y = a * sigmoid(a) * b
        y_d.store([r // per_item, r % per_item * BM, c], y.to(y_d.dtype).reshape(1, BM, BF))


_CONSTEXPRS: Final = {"BM": BM, "BF": BF, "BK": BK, "GROUP": 8}


def builds() -> list[Build]:
    types = {
        "x_d": f"tensordesc<bf16[1,{BM},{BK}]>",
        "weight_d": f"tensordesc<bf16[2,{BF},{BK}]>",
        "y_d": f"tensordesc<bf16[1,{BM},{BF}]>",
    }
    low = _linear_hopper.builds("swiglu")
    return [*low, Build.of("bf16-hopper", _kernel, types, _CONSTEXPRS, 8, "no-spill", "descriptors", num_stages=STAGES)]


def launch(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """The Hopper kernel, whatever the number of tiles: x [B,S,K], weight [2F,K], y [B,S,F] dense rows on 16 bytes."""
    programs = _hopper.programs(x, weight.shape[0])
    _kernel[(programs,)](
        descriptor(x, [1, BM, BK]),
        descriptor(weight.view(2, weight.shape[0] // 2, -1), [2, BF, BK]),
        descriptor(y, [1, BM, BF]),
        x.shape[0],
        x.shape[1],
        weight.shape[0] // 2,
        x.shape[2],
        programs,
        **_CONSTEXPRS,
        num_warps=8,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )


def _make_ready(x: Tensor) -> None:
    small, weight = x.new_zeros(1, 8, BK), x.new_zeros(BN, BK)
    launch(small, weight, x.new_empty(1, 8, BF))
    swiglu(small, small)


CASES = (
    Case("small", (T((2, 5, 64)), T((256, 64), std=0.1))),
    Case("rows", (T((7, 64)), T((64, 64), std=0.1))),
    Case("odd", (T((1, 3, 50)), T((34, 50), std=0.1)), ("small", "odd")),
    Case("joint", (T((2, 5, 64), "joint"), T((256, 64), std=0.1)), ("small", "strided")),
    Case("sliced", (T((2, 5, 64), "sliced"), T((256, 64), std=0.1)), ("small", "strided")),
    Case("transposed", (T((2, 5, 64), "transposed"), T((96, 64), "gapped", std=0.1)), ("small", "strided")),
    Case("low-rank", (T((2, 5, 64)), T((96, 64), std=0.1), *rank((2, 5, 64), 96, 8))),
    Case("low-rank-parts", (T((7, 64)), T((96, 64), std=0.1), *rank((7, 64), 96, 8, 2), 48)),
    Case("empty", (T((2, 0, 64)), T((96, 64))), ("small", "empty")),
    Case("z-image", (T((1, 4320, 3840)), T((20480, 3840), std=0.016)), ("real",)),
    Case(
        "z-image-lora",
        (T((1, 4320, 3840)), T((20480, 3840), std=0.016), *rank((1, 4320, 3840), 20480, 64)),
        ("real",),
    ),
    Case("z-image-joint", (T((2, 4128, 3840), "joint"), T((20480, 3840), std=0.016)), ("real",)),
    Case("z-image-512", (T((1, 1248, 3840)), T((20480, 3840), std=0.016)), ("real",)),
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
def linear_swiglu(
    x: Tensor,
    weight: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(x[..., K] @ w1^T) * (x @ w3^T) -> [..., F], weight[2F, K] holding w1 and then w3; with t[..., P R] @
    up[2F, R]^T part by part added to both products where given."""
    name = choose(x, weight, t, up, part).name
    linear_swiglu.ran[name] += 1
    if name == "plain":
        return plain(x, weight, t, up, part, out=out)
    y = x.new_empty((*x.shape[:-1], weight.shape[0] // 2)) if out is None else out
    if t is not None:
        _linear_hopper.make_ready("swiglu", x, None)
    elif _hopper.first_time("linear_swiglu", x, weight):
        _make_ready(x)
    if name == "hopper":
        assert t is not None
        assert up is not None
        _linear_hopper.into("swiglu", x, weight, None, y, 0, t, up, part)
        return y
    if name == "separate":
        u = F.linear(x, weight)
        if t is not None and up is not None:
            add_low_rank(u, t, up, part, out=u)
        return swiglu(*u.chunk(2, dim=-1), out=y)
    return _hopper.into_dense(lambda x, y: launch(x, weight, y), x, y)
