"""LayerNorm without affine, then the modulation of an adaptive norm, in one pass.

    n[b,s,c] = (x[b,s,c] - mean_c x[b,s,:]) / sqrt(var_c x[b,s,:] + eps) * (1 + scale[b,c]) + shift[b,c]

B batch, S tokens, C channels. x and the result fp16, bf16 or fp32; scale and shift any of them. Mean, variance and
modulation in fp32 in registers (two passes over the registers, not E[x^2] - E[x]^2), rounded once at the store.
Bytes: x read, result written, 2 S C itemsize B, and the B C of scale and shift. FLOPs: about 8 an element.
Exactness: reordered; stock rounds after the norm, after 1 + scale, after the product and after the sum, this once.
Source: AdaLayerNormZero, AdaLayerNormZeroSingle and AdaLayerNormContinuous of the diffusion transformers (DiT,
Peebles and Xie 2022, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._fp8 import store_rows
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import layer_norm, load_vector, places
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> Tensor:
    x, scale, shift = wide(x, scale, shift)
    d = x - x.mean(-1, keepdim=True)
    n = d / torch.sqrt(d.square().mean(-1, keepdim=True) + eps) * (1 + scale[:, None])
    return n if shift is None else n + shift[:, None]


def plain(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    C = x.shape[-1]
    if x.shape[0] == 1:  # one row of weights: layer_norm's own affine, one pass
        n = F.layer_norm(x, (C,), *_affine(x, scale, shift), eps)
        return n if out is None else out.copy_(n)
    n = F.layer_norm(x, (C,), eps=eps)
    if shift is None:
        return torch.mul(n, 1 + scale[:, None], out=n if out is None else out)
    return torch.addcmul(shift[:, None], n, 1 + scale[:, None], out=n if out is None else out)


def _affine(x: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """1 + scale and shift as weight and bias of layer_norm: in fp32, which only the CPU kernel takes beside bf16."""
    row, bias = scale[0], None if shift is None else shift[0]
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return row.float() + 1, torch.zeros_like(row, dtype=torch.float32) if bias is None else bias.float()
    return row + 1, bias


def check(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> tuple[torch.Size]:
    accept("layer_norm_modulate", x, scale, shift, eps)
    return (x.shape,)


def accept(name: str, x: Tensor, scale: Tensor, shift: Tensor | None, eps: float) -> None:
    _check.activation(name, "x", x, "BSC")
    B, _S, C = x.shape
    _check.vector(name, "scale", scale, x, (B, C), "BC")
    if shift is not None:
        _check.vector(name, "shift", shift, x, (B, C), "BC")
    _check.eps(name, eps)


def cost(x: Tensor, scale: Tensor, shift: Tensor | None, *_: Any, **__: Any) -> Cost:
    rows = scale.nbytes + (0 if shift is None else shift.nbytes)
    return Cost(2 * x.nbytes + rows, x.numel() * (7 if shift is None else 8))


@kernel
def _kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    out_ptr: tl.tensor,
    s_ptr: tl.tensor,
    length_ptr: tl.tensor,
    S: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    scale_batch: tl.tensor,
    shift_batch: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    s_batch: tl.tensor,
    length_batch: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    SHIFT: tl.constexpr,
    QUANT: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols < C)[None, :]
    x = tl.load(places(x_ptr, b, rows, cols, x_batch, x_row, VEC), mask=mask, other=0.0).to(tl.float32)
    scale = load_vector(scale_ptr, b, cols, scale_batch, C, VEC)
    n = layer_norm(x, mask, eps, C) * (1.0 + scale)
    if SHIFT:
        n += load_vector(shift_ptr, b, cols, shift_batch, C, VEC)
    if QUANT:
        q = (out_ptr, out_batch, out_row, s_ptr, s_batch, length_ptr, length_batch)
        store_rows(n, mask, b, rows, cols, S, *q, VEC)
    else:
        tl.store(places(out_ptr, b, rows, cols, out_batch, out_row, VEC), n.to(out_ptr.dtype.element_ty), mask=mask)


def builds() -> list[Build]:
    return _rows.row_builds(_kernel, flags={"SHIFT": True, "QUANT": False})


_X, _V = (2, 5, 96), (2, 96)
CASES = (
    Case("small", (T((2, 5, 64)), T((2, 64)), T((2, 64))), alias=lambda x, *_: x),
    Case("no-shift", (T((1, 7, 64)), T((1, 64)), None)),
    Case("eps", (T((1, 3, 64), std=1e-3), T((1, 64)), T((1, 64))), kwargs=(("eps", 1e-2),)),
    Case("mean-100", (T((1, 3, 256), mean=100.0), T((1, 256)), T((1, 256)))),
    Case("odd-channels", (T((2, 3, 75)), T((2, 75)), T((2, 75))), ("small", "odd")),
    Case("wide", (T((1, 3, 2304)), T((1, 2304)), T((1, 2304)))),
    Case("sliced", (T(_X, "sliced"), T(_V, "sliced"), T(_V, "sliced")), ("small", "strided"), alias=lambda x, *_: x),
    Case("joint", (T(_X, "joint"), T(_V), T(_V)), ("small", "strided"), alias=lambda x, *_: x),
    Case("offset", (T(_X, "offset"), T(_V, "offset"), T(_V)), ("small", "strided")),
    Case("transposed", (T(_X, "transposed"), T(_V, "transposed"), T(_V, "gapped")), ("small", "strided")),
    Case("fp32-vectors", (T(_X), T(_V, dtype=torch.float32), T(_V, dtype=torch.float32)), ("small", "mixed")),
    Case("empty-tokens", (T((2, 0, 64)), T((2, 64)), T((2, 64))), ("small", "empty")),
    Case("empty-batch", (T((0, 5, 64)), T((0, 64)), T((0, 64))), ("small", "empty")),
    Case("flux-joint", (T((1, 4608, 3072)), T((1, 3072)), T((1, 3072))), ("real",)),
    Case("flux-text", (T((2, 512, 3072)), T((2, 3072), "sliced"), T((2, 3072), "sliced")), ("real",)),
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
def layer_norm_modulate(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """LN(x[B,S,C]) * (1 + scale[B,C]) + shift[B,C] -> [B,S,C]; `out` may lie on x."""
    assert out is not None
    run(x, scale, shift, eps, out)
    return out


def run(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, out: Tensor, s: Tensor | None = None, length: Any = None
) -> None:
    """Launches the kernel; with `s` and `length` the result is e4m3 rows."""
    B, S, C = x.shape
    x, scale, offset = _rows.inner(x), _rows.inner(scale), _rows.inner(scale if shift is None else shift)
    vec = _rows.vector(C, x, scale, offset, out)
    tile = _rows.row_tile(C, _rows.launch(x.device))
    _kernel[(_rows.cdiv(S, tile.ROWS), B)](
        x,
        scale,
        offset,
        out,
        x if s is None else s,
        x if s is None else length,
        S,
        *_rows.steps(x, vec),
        *_rows.steps(scale, vec),
        *_rows.steps(offset, vec),
        *_rows.steps(out, vec),
        0 if s is None else s.stride(0),
        0 if s is None else length.stride(0),
        eps,
        C=C,
        BLOCK=tile.BLOCK,
        ROWS=tile.ROWS,
        VEC=vec,
        SHIFT=shift is not None,
        QUANT=s is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
