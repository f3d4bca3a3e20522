"""A linear layer on codes: rows in e4m3 with a scale each, and a weight in e4m3 with a scale an output.

    y[..., n] = x_scale[...] * weight_scale[n] * (sum_k x[..., k] weight[n, k] + low[..., n]) + bias[n]

x[..., K], weight[N, K] e4m3; x_scale[...], weight_scale[N] fp32; bias[N] of any floating dtype; y[..., N] in `dtype`.
`low`, what LoRA adds, is t[..., P R] up[N, R]^T part by part, as ops/_scaled.py says. Accumulated in fp32 (with about
14 bits in the tensor cores of compute capability 8.9 and 9.0), scaled before it is narrowed.
- `hopper`: with a low-rank term, bf16, on Hopper where tiles fill the chip: the term is one more step of the product.
- `rowwise`, `tensorwise`, `dequantised`: the libraries, in this order; add_low_rank adds a term behind the product.
- `plain`: dequantised and multiplied in fp32, rounded once; on other devices than CUDA.
`scaled_linear.backend(...)` says which, and why. Into rows of a wider or longer buffer without a copy where the library
can.
Bytes: x, weight, vectors read, y written. FLOPs: 2 M N K. Exactness: lossy, as codes are; against the exact product of
the codes only sums and y are rounded.
Source: row-wise scaled products (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _scaled, _scaled_hopper, _scaled_library
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._scaled import DTYPES, arguments, rank
from fusedit.ops.add_low_rank import add_low_rank

Tensor = torch.Tensor


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Tensor:
    del dtype
    return _scaled.product(x, x_scale, weight, weight_scale, bias, t, up, part)


def plain(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    made = _scaled.product(x, x_scale, weight, weight_scale, bias, t, up, part)
    return made.to(DTYPES[dtype]) if out is None else out.copy_(made)


def check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> tuple[tuple[int, ...]]:
    N = _scaled.operands("scaled_linear", x, x_scale, weight, weight_scale, bias, t, up, part)
    _scaled.output("scaled_linear", dtype)
    return ((*x.shape[:-1], N),)


def cost(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Cost:
    del weight_scale, bias, t, part
    return _scaled.cost(x, weight, x_scale.numel() * weight.shape[0] * DTYPES[dtype].itemsize, up)


def dtypes(*args: Any, dtype: str = "bfloat16", **_: Any) -> tuple[torch.dtype]:
    return (DTYPES[args[5] if len(args) > 5 else dtype],)


def reads(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x[:0], x, *(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))  # the result may lie on none


def choose(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> Backend:
    """The implementation that serves this call, and why no faster one does."""
    del x_scale, weight_scale, bias
    if not x.is_cuda:
        return Backend("plain", f"emulated on {x.device.type}")
    library = _scaled_library.choose(x, weight, DTYPES[dtype])
    if t is None:
        return library
    reason = _scaled_hopper.reason(x, weight) or _scaled_hopper.low_reason(t, up, part, pair=False)
    if not reason and dtype != "bfloat16":
        reason = f"gives bfloat16, not {dtype}"
    reason = reason or _scaled_hopper.idle(x, weight.shape[0])
    if not reason:
        return Backend("hopper", "")
    return Backend(library.name, "; ".join(filter(None, (f"hopper: {reason}", library.reason))))


def builds() -> list[Build]:
    return _scaled_hopper.builds("none")


_REAL = ("real",)
CASES = (
    Case("small", (*arguments((2, 5, 64), 96), T((96,)))),
    Case("rows", (*arguments((7, 64), 96), None)),
    Case("four-dimensions", (*arguments((2, 3, 5, 64), 96), T((96,)))),
    Case("fp16", (*arguments((2, 5, 64), 96), T((96,)), "float16")),
    Case("fp32", (*arguments((2, 5, 64), 96), T((96,), dtype=torch.float32), "float32")),
    Case("odd", (*arguments((1, 3, 50), 35), T((35,))), ("small", "odd")),
    Case("one-input", (*arguments((1, 3, 1), 35), None), ("small", "odd")),
    Case("joint", (*arguments((2, 5, 64), 96, "joint"), T((96,), "gapped")), ("small", "strided")),
    Case("sliced", (*arguments((2, 5, 64), 96, "sliced"), T((96,))), ("small", "strided")),
    Case("offset", (*arguments((2, 5, 64), 96, "offset", "offset"), T((96,))), ("small", "strided")),
    Case("transposed", (*arguments((2, 5, 64), 96, "transposed", "transposed"), T((96,))), ("small", "strided")),
    Case("low-rank", (*arguments((2, 5, 64), 96), T((96,)), "bfloat16", *rank((2, 5, 64), 96, 8))),
    Case("low-rank-parts", (*arguments((2, 5, 64), 96), T((96,)), "bfloat16", *rank((2, 5, 64), 96, 8, 3), 16)),
    Case("low-rank-odd", (*arguments((7, 50), 35), None, "float32", *rank((7, 50), 35, 3, 2), 11), ("small", "odd")),
    Case("empty", (*arguments((2, 0, 64), 96), T((96,))), ("small", "empty")),
    Case("flux-qkv", (*arguments((1, 4096, 3072), 9216), T((9216,))), _REAL),
    Case("flux-text", (*arguments((2, 512, 3072), 3072, "joint"), T((3072,))), _REAL),
    Case("flux-mlp-out", (*arguments((1, 512, 12288), 3072), T((3072,))), _REAL),
    Case("flux-single-out", (*arguments((1, 4608, 15360), 3072), T((3072,))), _REAL),
    Case("z-image-qkv", (*arguments((1, 4320, 3840), 11520), None), _REAL),
    Case("z-image-out", (*arguments((2, 1248, 10240), 3840), None), _REAL),
    Case(
        "flux-qkv-lora",
        (*arguments((1, 4096, 3072), 9216), T((9216,)), "bfloat16", *rank((1, 4096, 3072), 9216, 32, 3), 3072),
        _REAL,
    ),
    Case(
        "z-image-lora-joint",
        (*arguments((2, 4128, 3840), 3840, "joint"), None, "bfloat16", *rank((2, 4128, 3840), 3840, 72)),
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
    slack=(_scaled.SLACK,),
    mixed=True,
)
def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: str = "bfloat16",
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """(x[..., K] * x_scale[...]) @ (weight[N, K] * weight_scale[N])^T + bias[N] -> [..., N] in `dtype`."""
    backend = choose(x, x_scale, weight, weight_scale, bias, dtype, t, up, part)
    if backend.name == "plain":
        scaled_linear.ran["plain"] += 1
        return plain(x, x_scale, weight, weight_scale, bias, dtype, t, up, part, out=out)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=DTYPES[dtype]) if out is None else out
    if t is not None:
        _scaled_hopper.make_ready("none", x, weight, bias)
    if backend.name == "hopper":
        scaled_linear.ran["hopper"] += 1
        _scaled_hopper.into("none", x, x_scale, weight, weight_scale, bias, y, None, None, 0, t, up, part)
        return y
    name = _scaled_library.run(x, x_scale, weight, weight_scale, bias, y, backend.name)
    scaled_linear.ran[name] += 1
    if t is not None and up is not None:
        add_low_rank(y, t, up, part, x_scale, weight_scale, out=y)
    return y
