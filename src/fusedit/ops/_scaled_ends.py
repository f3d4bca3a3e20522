"""What follows a product where no kernel holds both: activation and quantisation with given scales, in one pass.

    g[..., c] = e4m3(gelu_tanh(u[..., c]) / g_scale[...])                     u [..., C]
    g[..., c] = e4m3(silu(u[..., c]) u[..., C + c] / g_scale[...])            u [..., 2 C]

u of any floating dtype, g e4m3 [..., C], g_scale fp32 [...]. Computed in fp32, rounded once.
"""

from __future__ import annotations

from typing import Final

import torch

from fusedit.ops import _fp8, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._elementwise import places, sigmoid, tile
from fusedit.ops._fp8 import e4m3, to_e4m3
from fusedit.ops._rows import cdiv
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.gelu_tanh import gelu
from fusedit.ops.gelu_tanh import reference as gelu_reference

Tensor = torch.Tensor
BLOCK: Final = 2048


def activated(u: Tensor, pair: bool) -> Tensor:
    """What is quantised, in fp32 (fp64 for fp64): gelu(u), or silu(a) b of the two halves of u."""
    if not pair:
        return gelu_reference(u)
    whole: Tensor = wide(u)
    a, b = whole.chunk(2, dim=-1)
    return a / (1 + torch.exp(-a)) * b


def before_rounding(u: Tensor, g_scale: Tensor, pair: bool) -> Tensor:
    """activated(u) / g_scale, in fp32 (fp64 for fp64)."""
    made = activated(u, pair)
    return made * g_scale.to(made.dtype).reciprocal()[..., None]


def finish(u: Tensor, g_scale: Tensor, g: Tensor, pair: bool) -> None:
    """u [..., C] or [..., 2 C] into the codes g [..., C]; any strides."""
    usable, _ = _triton.status(u.device, u.dtype)
    if not usable or _fp8.limit(u) or u.ndim not in (2, 3) or u.shape[0] > 65535:
        g.copy_(to_e4m3(before_rounding(u, g_scale, pair)))
        return
    if g.stride(-1) != 1 and g.shape[-1] > 1:
        made = torch.empty_like(g, memory_format=torch.contiguous_format)
        finish(u, g_scale, made, pair)
        g.copy_(made)
        return
    if u.ndim == 2:
        u, g_scale, g = u[None], g_scale[None], g[None]
    u = _rows.inner(u)
    B, S, C = g.shape
    a, b = u[..., :C], u[..., u.shape[-1] - C :]
    vec = 8 if _rows.vector(C, a, b) == 8 and _rows.vector(C, g) == 16 else 1
    parts = cdiv(C, BLOCK)
    _kernel[(S * parts, B)](
        a,
        b,
        g_scale,
        g,
        S,
        C // vec,
        parts,
        *_rows.steps(a, vec),
        *_rows.steps(g, vec),
        g_scale.stride(0),
        g_scale.stride(1),
        PAIR=pair,
        BLOCK=BLOCK,
        VEC=vec,
        num_warps=4,
        enable_fp_fusion=True,
    )


@kernel
def _kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    g_ptr: tl.tensor,
    S: tl.tensor,
    C: tl.tensor,
    parts: tl.tensor,
    u_batch: tl.tensor,
    u_row: tl.tensor,
    g_batch: tl.tensor,
    g_row: tl.tensor,
    scale_batch: tl.tensor,
    scale_row: tl.tensor,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    b = tl.program_id(1).to(tl.int64)
    rows, start, cols, mask = tile(S, C, tl.program_id(0) % parts, parts, BLOCK, 1, VEC)
    u = tl.load(places(a_ptr, b, rows, start, cols, u_batch, u_row, VEC), mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + b * scale_batch + rows.to(tl.int64) * scale_row, mask=rows < S, other=1.0)
    if PAIR:
        other = tl.load(places(b_ptr, b, rows, start, cols, u_batch, u_row, VEC), mask=mask, other=0.0).to(tl.float32)
        v = u * sigmoid(u) * other
    else:
        v = gelu(u)
    g = e4m3(v * tl.div_rn(1.0, scale)[:, None])
    tl.store(places(g_ptr, b, rows, start, cols, g_batch, g_row, VEC), g, mask=mask)


def builds(pair: bool) -> list[Build]:
    made = []
    for name, vec in (("ends-bf16", 8), ("ends-bf16-unaligned", 1)):
        types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "scale_ptr": "*fp32", "g_ptr": "*fp8e4nv"}
        flags = {"PAIR": pair, "BLOCK": BLOCK, "VEC": vec}
        made.append(Build.of(name, _kernel, types, flags, 4, "no-spill", capability=_fp8.CAPABILITY))
    return made
