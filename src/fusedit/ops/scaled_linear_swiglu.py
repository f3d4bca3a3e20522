"""Both input layers of a gated feed-forward layer on codes, SwiGLU, and codes of that with given scales.

    u[..., n] = x_scale[...] * weight_scale[n] * (sum_k x[..., k] weight[n, k] + low[..., n])
    g[..., f] = e4m3(a sigmoid(a) b / g_scale[...]),   a = u[..., f], b = u[..., F + f]

x[..., K], weight[2 F, K] e4m3 (both layers, one after the other); x_scale[...], weight_scale[2 F], g_scale[...] fp32;
g e4m3[..., F]. `low` and accumulation: see scaled_linear. g_scale must be known before the product (row_bounds); what
does not fit saturates at 448 of it.
- `hopper`: one kernel, in Gluon, on Hopper where tiles of 128 columns of a and the same of b fill the chip; sums pass
  through bf16 on their way to the gate, whose tanh is the hardware's, good to 2^-11.
- `separate`: scaled_linear, then SwiGLU and quantisation in one pass.
- `plain`: in fp32, on other devices than CUDA.
`scaled_linear_swiglu.backend(...)` says which, and why.
Bytes: x, weight, vectors read, g written. FLOPs: 4 M F K. Exactness: lossy.
Source: Shazeer 2020, as the feed-forward of Z-Image uses it; row-wise scaled products (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _scaled, _scaled_ends, _scaled_hopper
from fusedit.ops._build import Build
from fusedit.ops._cases import Case
from fusedit.ops._fp8 import to_e4m3
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._scaled import arguments, positive, rank
from fusedit.ops.scaled_linear import scaled_linear

Tensor = torch.Tensor


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Tensor:
    u = _scaled.product(x, x_scale, weight, weight_scale, None, t, up, part)
    return _scaled_ends.before_rounding(u, g_scale, pair=True)


def plain(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    g = to_e4m3(reference(x, x_scale, weight, weight_scale, g_scale, t, up, part))
    return g if out is None else out.copy_(g)


def check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> tuple[tuple[int, ...]]:
    N = _scaled.operands("scaled_linear_swiglu", x, x_scale, weight, weight_scale, None, t, up, part)
    _scaled.scales("scaled_linear_swiglu", x, g_scale)
    if N % 2:
        raise OpError(f"scaled_linear_swiglu: weight must have an even number of rows, not {_check.show(weight)}")
    return ((*x.shape[:-1], N // 2),)


def cost(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Cost:
    del weight_scale, g_scale, t, part
    return _scaled.cost(x, weight, x_scale.numel() * (weight.shape[0] // 2 + 4), up)


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # the result may lie on none


def choose(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del x_scale, weight_scale, g_scale
    if not x.is_cuda:
        return Backend("plain", f"emulated on {x.device.type}")
    reason = _scaled_hopper.reason(x, weight, pair=True) or _scaled_hopper.low_reason(t, up, part, pair=True)
    reason = reason or _scaled_hopper.idle(x, weight.shape[0], t)
    return Backend("separate", reason) if reason else Backend("hopper", "")


def builds() -> list[Build]:
    return [*_scaled_hopper.builds("swiglu"), *_scaled_ends.builds(pair=True)]


_SMALL, _REAL = (2, 5, 64), ("real",)
_S = positive(2, 5, std=0.03)
CASES = (
    Case("small", (*arguments(_SMALL, 256), _S)),
    Case("rows", (*arguments((7, 64), 64), positive(7, std=0.03))),
    Case("four-dimensions", (*arguments((2, 3, 5, 64), 64), positive(2, 3, 5, std=0.03))),
    Case("saturates", (*arguments(_SMALL, 64), positive(2, 5, std=0.001))),
    Case("odd", (*arguments((1, 3, 50), 34), positive(1, 3, std=0.03)), ("small", "odd")),
    Case("joint", (*arguments(_SMALL, 256, "joint"), positive(2, 5, layout="joint", std=0.03)), ("small", "strided")),
    Case("sliced", (*arguments(_SMALL, 256, "sliced"), _S), ("small", "strided")),
    Case("transposed", (*arguments(_SMALL, 96, "transposed", "gapped"), _S), ("small", "strided")),
    Case("low-rank", (*arguments(_SMALL, 96), _S, *rank(_SMALL, 96, 8))),
    Case("low-rank-parts", (*arguments(_SMALL, 96), _S, *rank(_SMALL, 96, 8, 2), 48)),
    Case("empty", (*arguments((2, 0, 64), 96), positive(2, 0)), ("small", "empty")),
    Case("z-image", (*arguments((1, 4320, 3840), 20480), positive(1, 4320, std=0.03)), _REAL),
    Case("z-image-joint", (*arguments((2, 4128, 3840), 20480, "joint"), positive(2, 4128, std=0.03)), _REAL),
    Case("z-image-512", (*arguments((1, 1248, 3840), 20480), positive(1, 1248, std=0.03)), _REAL),
    Case(
        "z-image-lora",
        (*arguments((1, 4320, 3840), 20480), positive(1, 4320, std=0.03), *rank((1, 4320, 3840), 20480, 64)),
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
    slack=(_scaled.GATED,),
    mixed=True,
)
def scaled_linear_swiglu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    g_scale: Tensor,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(first half) * second half of the product's columns -> g e4m3[..., F], as codes with the scales g_scale[...];
    weight[2F, K] holds both layers, one after the other."""
    name = choose(x, x_scale, weight, weight_scale, g_scale, t, up, part).name
    scaled_linear_swiglu.ran[name] += 1
    if name == "plain":
        return plain(x, x_scale, weight, weight_scale, g_scale, t, up, part, out=out)
    _scaled_hopper.make_ready("swiglu", x, weight, None)
    g = x.new_empty((*x.shape[:-1], weight.shape[0] // 2)) if out is None else out
    if name == "hopper":
        _scaled_hopper.into("swiglu", x, x_scale, weight, weight_scale, None, None, g, g_scale, 0, t, up, part)
        return g
    u = scaled_linear(x, x_scale, weight, weight_scale, None, "bfloat16", t, up, part)
    _scaled_ends.finish(u, g_scale, g, pair=True)
    return g
