"""A linear layer on codes, GELU in its tanh form from one of its outputs on, and codes of that with given scales.

    u[..., n] = x_scale[...] * weight_scale[n] * (sum_k x[..., k] weight[n, k] + low[..., n]) + bias[n]
    y[..., n] = u[..., n] for n < start
    g[..., n - start] = e4m3(gelu_tanh(u[..., n]) / g_scale[...]) from there on

x[..., K], weight[N, K] e4m3; x_scale[...], weight_scale[N], g_scale[...] fp32; bias[N] of any floating dtype;
y[..., start] in `dtype`, g e4m3[..., N - start]. `low` and accumulation: see scaled_linear. g_scale must be known
before the product (row_bounds); what does not fit saturates at 448 of it.
- `hopper`: one kernel, in Gluon, on Hopper where tiles fill the chip and `start` is a multiple of 256; sums pass
  through bf16 on their way to GELU, whose tanh is the hardware's, good to 2^-11.
- `separate`: scaled_linear for each side of `start`, then GELU and quantisation in one pass.
- `plain`: in fp32, on other devices than CUDA.
`scaled_linear_gelu.backend(...)` says which, and why.
Bytes: x, weight, vectors read, y and g written. FLOPs: 2 M N K. Exactness: lossy.
Source: the feed-forward of FLUX (Hendrycks and Gimpel 2016), row-wise scaled products (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _low_rank, _scaled, _scaled_ends, _scaled_hopper
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import E4M3, to_e4m3
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._scaled import DTYPES, arguments, positive, rank
from fusedit.ops._scaled_hopper_kernel import COLUMNS
from fusedit.ops.scaled_linear import scaled_linear

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Pair:
    del dtype
    u = _scaled.product(x, x_scale, weight, weight_scale, bias, t, up, part)
    return u[..., :start], _scaled_ends.before_rounding(u[..., start:], g_scale, pair=False)


def plain(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Pair | None = None,
) -> Pair:
    y, g = reference(x, x_scale, weight, weight_scale, bias, g_scale, start, dtype, t, up, part)
    made = (y.new_empty(y.shape, dtype=DTYPES[dtype]), y.new_empty(g.shape, dtype=E4M3)) if out is None else out
    return made[0].copy_(y), made[1].copy_(to_e4m3(g))


def check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    N = _scaled.operands("scaled_linear_gelu", x, x_scale, weight, weight_scale, bias, t, up, part)
    _scaled.scales("scaled_linear_gelu", x, g_scale)
    _scaled.output("scaled_linear_gelu", dtype)
    if type(start) is not int or not 0 <= start <= N:
        shown = _check.show(start).removeprefix("int ")
        raise OpError(f"scaled_linear_gelu: start must be an integer from 0 to {N}, the outputs of weight, not {shown}")
    return (*x.shape[:-1], start), (*x.shape[:-1], N - start)


def cost(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Cost:
    del weight_scale, bias, g_scale, t, part
    row = start * DTYPES[dtype].itemsize + weight.shape[0] - start + 4
    return _scaled.cost(x, weight, x_scale.numel() * row, up)


def dtypes(*args: Any, dtype: str = "bfloat16", **_: Any) -> tuple[torch.dtype, torch.dtype]:
    return DTYPES[args[7] if len(args) > 7 else dtype], E4M3


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # results lie on none


def choose(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del x_scale, weight_scale, bias, g_scale
    if not x.is_cuda:
        return Backend("plain", f"emulated on {x.device.type}")
    N = weight.shape[0]
    reason = _scaled_hopper.reason(x, weight) or _scaled_hopper.low_reason(t, up, part, pair=False)
    if not reason and start == N:
        reason = "activates nothing"
    if not reason and start % COLUMNS:
        reason = f"start {start} is no multiple of {COLUMNS}"
    if not reason and start and dtype != "bfloat16":
        reason = f"gives bfloat16, not {dtype}"
    reason = reason or _scaled_hopper.idle(x, N, t)
    return Backend("separate", reason) if reason else Backend("hopper", "")


def builds() -> list[Build]:
    return [*_scaled_hopper.builds("gelu"), *_scaled_ends.builds(pair=False)]


_SMALL, _REAL = (2, 5, 64), ("real",)
_S = positive(2, 5, std=0.03)
CASES = (
    Case("small", (*arguments(_SMALL, 96), T((96,)), _S)),
    Case("tail", (*arguments(_SMALL, 384), T((384,)), _S, 128)),
    Case("rows", (*arguments((7, 64), 96), None, positive(7, std=0.03), 32)),
    Case("four-dimensions", (*arguments((2, 3, 5, 64), 96), T((96,)), positive(2, 3, 5, std=0.03), 32)),
    Case("all", (*arguments(_SMALL, 96), T((96,)), _S, 96), ("small", "odd")),
    Case("saturates", (*arguments(_SMALL, 96), T((96,)), positive(2, 5, std=0.001), 32)),
    Case("fp32", (*arguments(_SMALL, 96), T((96,)), _S, 32, "float32")),
    Case("odd", (*arguments((1, 3, 50), 35), T((35,)), positive(1, 3, std=0.03), 11), ("small", "odd")),
    Case(
        "joint",
        (*arguments(_SMALL, 96, "joint"), T((96,)), positive(2, 5, layout="joint", std=0.03), 32),
        ("small", "strided"),
    ),
    Case("sliced", (*arguments(_SMALL, 96, "sliced"), T((96,)), _S, 32), ("small", "strided")),
    Case("transposed", (*arguments(_SMALL, 96, "transposed", "gapped"), T((96,)), _S), ("small", "strided")),
    Case("low-rank", (*arguments(_SMALL, 96), T((96,)), _S, 32, "bfloat16", *rank(_SMALL, 96, 8, 2), 32)),
    Case("empty", (*arguments((2, 0, 64), 96), T((96,)), positive(2, 0)), ("small", "empty")),
    Case("flux-image", (*arguments((1, 4096, 3072), 12288), T((12288,)), positive(1, 4096, std=0.03)), _REAL),
    Case("flux-text", (*arguments((2, 512, 3072), 12288, "joint"), T((12288,)), positive(2, 512, std=0.03)), _REAL),
    Case(
        "flux-single",
        (*arguments((1, 4608, 3072), 21504), T((21504,)), positive(1, 4608, std=0.03), 9216),
        _REAL,
    ),
    Case(
        "flux-single-512-lora",
        (
            *arguments((2, 1536, 3072), 21504),
            T((21504,)),
            positive(2, 1536, std=0.03),
            9216,
            "bfloat16",
            *rank((2, 1536, 3072), 21504, 32, 4),
            3072,
        ),
        _REAL,
    ),
)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
    reads=reads,
    dtypes=dtypes,
    slack=(_scaled.SLACK, _scaled.CODES),
    mixed=True,
)
def scaled_linear_gelu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    g_scale: Tensor,
    start: int = 0,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The product's columns before `start` -> y[..., start] in `dtype`; gelu of the rest -> g e4m3[..., N - start], as
    codes with the scales g_scale[...]."""
    name = choose(x, x_scale, weight, weight_scale, bias, g_scale, start, dtype, t, up, part).name
    scaled_linear_gelu.ran[name] += 1
    if name == "plain":
        return plain(x, x_scale, weight, weight_scale, bias, g_scale, start, dtype, t, up, part, out=out)
    _scaled_hopper.make_ready("gelu", x, weight, bias)
    N = weight.shape[0]
    if out is None:
        y = x.new_empty((*x.shape[:-1], start), dtype=DTYPES[dtype])
        out = y, x.new_empty((*x.shape[:-1], N - start))
    y, g = out
    if name == "hopper":
        _scaled_hopper.into("gelu", x, x_scale, weight, weight_scale, bias, y, g, g_scale, start, t, up, part)
        return out
    low: list[tuple[Any, ...]] = [(t, up, part)] * 2
    if t is not None and up is not None:
        low = [_low_rank.side(t, up, part, 0, start), _low_rank.side(t, up, part, start, N)]
    if start:
        head = None if bias is None else bias[:start]
        scaled_linear(x, x_scale, weight[:start], weight_scale[:start], head, dtype, *low[0], out=y)
    if start < N:
        tail = None if bias is None else bias[start:]
        u = scaled_linear(x, x_scale, weight[start:], weight_scale[start:], tail, dtype, *low[1])
        _scaled_ends.finish(u, g_scale, g, pair=False)
    return out
