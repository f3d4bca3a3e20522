"""RMSNorm with weight, then the scale of an adaptive norm, in one pass.

    n[b,s,c] = x[b,s,c] / sqrt(mean_c x[b,s,:]^2 + eps) * weight[c] * (1 + scale[b,c])

B batch, S tokens, C channels. x and the result fp16, bf16 or fp32; weight and scale any of them; None leaves the factor
out. Mean of squares and products in fp32 in registers, rounded once at the store.
Bytes: 2 B S C itemsize, and weight and scale. FLOPs: about 5 an element.
Exactness: reordered; stock rounds after the norm, after the weight, after 1 + scale and after the product, this once.
Source: RMSNorm (Zhang and Sennrich 2019) as the Z-Image transformer uses it before attention and feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import store_rows
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import load_vector, places, plain_rms, rms_norm
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> Tensor:
    x, weight, scale = wide(x, weight, scale)
    n = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    n = n if weight is None else n * weight
    return n if scale is None else n * (1 + scale[:, None])


def plain(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    row = weight
    if scale is not None:
        row = (1 + (scale.float() if scale.dtype in (torch.float16, torch.bfloat16) else scale))[:, None]
        row = row if weight is None else row.mul_(weight)
    n = plain_rms(x, row, eps, out)
    return n.to(x.dtype) if out is None else out if n is out else out.copy_(n)


def check(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> tuple[torch.Size]:
    accept("rms_norm_modulate", x, weight, scale, eps)
    return (x.shape,)


def accept(name: str, x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float) -> None:
    _check.activation(name, "x", x, "BSC")
    B, _S, C = x.shape
    if weight is not None:
        _check.vector(name, "weight", weight, x, (C,), "C")
    if scale is not None:
        _check.vector(name, "scale", scale, x, (B, C), "BC")
    _check.eps(name, eps)


def cost(x: Tensor, weight: Tensor | None, scale: Tensor | None, *_: Any, **__: Any) -> Cost:
    rows = sum(t.nbytes for t in (weight, scale) if t is not None)
    return Cost(2 * x.nbytes + rows, x.numel() * (3 + (weight is not None) + (scale is not None)))


@kernel
def _kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    s_ptr: tl.tensor,
    length_ptr: tl.tensor,
    S: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    scale_batch: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    s_batch: tl.tensor,
    length_batch: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    QUANT: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    n = rms_norm(x, eps, C)
    if WEIGHT:
        n *= load_vector(weight_ptr, b, cols, 0, C, VEC)
    if SCALE:
        n *= 1.0 + load_vector(scale_ptr, b, cols, scale_batch, C, VEC)
    if QUANT:
        q = (out_ptr, out_batch, out_row, s_ptr, s_batch, length_ptr, length_batch)
        store_rows(n, mask, b, rows, cols, S, *q, VEC)
    else:
        tl.store(places(out_ptr, b, rows, cols, out_batch, out_row, VEC), n.to(out_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel, flags={"WEIGHT": True, "SCALE": True, "QUANT": False}, C=3840)


_X, _W, _V = (2, 5, 96), (96,), (2, 96)
CASES = (
    Case("small", (T((2, 5, 64)), T((64,)), T((2, 64))), alias=lambda x, *_: x),
    Case("no-weight", (T((1, 7, 64)), None, T((1, 64)))),
    Case("no-scale", (T((2, 7, 64)), T((64,)), None)),
    Case("bare", (T((1, 7, 64)), None, None), alias=lambda x, *_: x),
    Case("eps", (T((1, 3, 64), std=1e-3), T((64,)), T((1, 64))), kwargs=(("eps", 1e-2),)),
    Case("odd-channels", (T((2, 3, 75)), T((75,)), T((2, 75))), ("small", "odd")),
    Case("wide", (T((1, 3, 2560)), T((2560,)), T((1, 2560)))),
    Case("sliced", (T(_X, "sliced"), T(_W), T(_V, "sliced")), ("small", "strided"), alias=lambda x, *_: x),
    Case("joint", (T(_X, "joint"), T(_W), T(_V)), ("small", "strided")),
    Case("offset", (T(_X, "offset"), T(_W, "offset"), T(_V)), ("small", "strided")),
    Case("transposed", (T(_X, "transposed"), T(_W, "gapped"), T(_V, "transposed")), ("small", "strided")),
    Case("fp32-weight", (T(_X), T(_W, dtype=torch.float32), T(_V)), ("small", "mixed")),
    Case("empty-tokens", (T((2, 0, 64)), T((64,)), T((2, 64))), ("small", "empty")),
    Case("z-image", (T((1, 4320, 3840)), T((3840,)), T((1, 3840))), ("real",)),
    Case("z-image-caption", (T((2, 224, 2560)), T((2560,)), None), ("real",)),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=_rows.limit,
)
def rms_norm_modulate(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """RMS(x[B,S,C]) * weight[C] * (1 + scale[B,C]) -> [B,S,C]; `out` may lie on x."""
    assert out is not None
    run(x, weight, scale, eps, out)
    return out


def run(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    out: Tensor,
    s: Tensor | None = None,
    length: Any = None,
) -> None:
    """Launches the kernel; with `s` and `length` the result is e4m3 rows."""
    B, S, C = x.shape
    x = _rows.inner(x)
    w, v = (x[0, 0] if weight is None else _rows.inner(weight)), (x[:, 0] if scale is None else _rows.inner(scale))
    vec = _rows.vector(C, x, w, v, out)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        w,
        v,
        out,
        x if s is None else s,
        x if s is None else length,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(v, vec),
        *_rows.steps(out, vec),
        0 if s is None else s.stride(0),
        0 if s is None else length.stride(0),
        eps,
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        WEIGHT=weight is not None,
        SCALE=scale is not None,
        QUANT=s is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
