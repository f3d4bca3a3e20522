"""What follows a library's convolution, in one pass in place: bias, activation and residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedit.ops import _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._conv import ACTIVATIONS, activate, countable, pixels, places, vector
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor


@kernel
def _kernel(
    x_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    P: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    x_n: tl.tensor,
    x_h: tl.tensor,
    x_w: tl.tensor,
    residual_n: tl.tensor,
    residual_h: tl.tensor,
    residual_w: tl.tensor,
    y_n: tl.tensor,
    y_h: tl.tensor,
    y_w: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """y[p, c] = act(x[p, c] + bias[c]) + residual[p, c] for ROWS pixels; steps are in units of VEC."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, h, w = (p // (H * W)).to(tl.int64), p // W % H, p % W
    mask = (p < P)[:, None] & (c < C)[None, :]
    u = tl.load(places(x_ptr, n, h, w, c, x_n, x_h, x_w, VEC), mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    u = activate(u, ACT)
    if RESIDUAL:
        from_ = places(residual_ptr, n, h, w, c, residual_n, residual_h, residual_w, VEC)
        u += tl.load(from_, mask=mask, other=0.0).to(tl.float32)
    tl.store(places(y_ptr, n, h, w, c, y_n, y_h, y_w, VEC), u.to(y_ptr.dtype.element_ty), mask=mask)


def epilogue(x: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor) -> Tensor:
    """act(x + bias) + residual into y, which may lie on x or residual; all [N,C,H,W] in any layout."""
    usable = _triton.INTERPRETING or _triton.status(x.device, x.dtype)[0]
    pictures = [t for t in (x, residual, y) if t is not None]
    usable = usable and countable(x) and x.dtype != torch.float64
    if not usable or any(t.stride(1) != 1 for t in pictures):
        return in_torch(x, bias, residual, act, y)
    N, C, H, W = x.shape
    vec = vector(C, *pictures)
    other = y if residual is None else residual
    tile = _rows.launch(x.device).tile
    block = max(16, min(512, _rows.power_of_2(C)))
    rows = max(1, tile // block)
    steps = (step for t in (x, other, y) for step in pixels(t, vec))
    _kernel[(_rows.cdiv(N * H * W, rows), _rows.cdiv(C, block))](
        x,
        x if bias is None else bias.contiguous(),
        other,
        y,
        N * H * W,
        H,
        W,
        *steps,
        C=C,
        BLOCK=block,
        ROWS=rows,
        VEC=vec,
        ACT=ACTIVATIONS.index(act),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return y


def in_torch(x: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor | None) -> Tensor:
    """The same in plain torch; a new tensor where y is None."""
    u = x if bias is None else x + bias[:, None, None]
    u = F.silu(u) if act == "silu" else F.relu(u) if act == "relu" else u
    if residual is None:
        return u if y is None else y.copy_(u)
    return u + residual if y is None else torch.add(u, residual, out=y)


def builds() -> list[Build]:
    types: dict[str, str] = dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "y_ptr"), "*bf16")
    sizes: dict[str, Any] = {"C": 128, "BLOCK": 128, "ROWS": 16, "VEC": 8}
    flags = {"ACT": 0, "BIAS": True, "RESIDUAL": True}
    return [Build.of("epilogue-bf16", _kernel, types, sizes | flags, 4, "no-spill")]
