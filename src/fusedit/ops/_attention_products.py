"""Attention as two products of the library and exponentials between them, for head sizes that no fused kernel takes.

Logits in fp32 as the first product leaves them; their exponentials rounded to the dtype, as every fused kernel rounds
them, and divided by the sum of the unrounded ones behind the second product. H200, one head of 512 and 16,384 tokens
in bf16: TODO ms, of which the products are 0.87; the memory-efficient kernel 3.66. A tile of a fused kernel would have
to hold 512 columns of the result besides the logits, and would read keys and values once for every 64 queries: 64
operations a byte, where the second-level cache gives no more than about 350 TFLOP/s, so 1.6 ms at best.
"""

from __future__ import annotations

from typing import Final

import torch

from fusedit.ops._op import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
_QUERIES: Final = 4096
"""Queries at a time, so that the second product fills the chip: with 1024 of them it has 32 tiles for 132
multiprocessors. An H200 takes 1.75, 1.61, 1.50 and 1.45 ms with 1024, 2048, 4096 and 8192 of 16,384."""
_BLOCK: Final = 4096


@kernel
def _exponentials(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """y[row, :T] = exp(scale * x[row, :T] - its maximum) and inverse[row] = 1 / their sum."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * T
    y_ptr += row * T
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, tl.cdiv(T, BLOCK)):
        at = start * BLOCK + lane
        most = tl.maximum(most, tl.load(x_ptr + at, mask=at < T, other=float("-inf")) * scale)
    highest = tl.max(most, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, tl.cdiv(T, BLOCK)):
        at = start * BLOCK + lane
        y = tl.exp(tl.load(x_ptr + at, mask=at < T, other=float("-inf")) * scale - highest)
        total += y
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < T)
    tl.store(inverse_ptr + row, 1.0 / tl.sum(total, axis=0))


def exponentials(x: Tensor, scale: float, y: Tensor, inverse: Tensor) -> None:
    """exp(scale * x - maximum of its row) for x[rows, T] in fp32 into y of any dtype, both dense; inverse[rows] of
    their sums, in fp32."""
    rows, T = x.shape
    _exponentials[(rows,)](x, y, inverse, T, scale, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True)


def products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for q[B,S,H,D], k, v[B,T,H,D] of half precision -> [B,S,H,D] dense."""
    B, S, H, _ = q.shape
    T = k.shape[1]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = min(S, _QUERIES)
    kept = torch.empty((step, T), dtype=q.dtype, device=q.device)
    inverses = torch.empty((step, 1), dtype=torch.float32, device=q.device)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, :, h].t(), v[b, :, h]
            for start in range(0, S, step):
                rows = slice(start, min(S, start + step))
                logits = torch.mm(q[b, rows, h], keys, out_dtype=torch.float32)
                weights, inverse = kept[: logits.shape[0]], inverses[: logits.shape[0]]
                exponentials(logits, scale, weights, inverse)
                del logits
                torch.mul(torch.mm(weights, values, out_dtype=torch.float32), inverse, out=o[b, rows, h])
    return o


def builds() -> list[Build]:
    types = {"x_ptr": "*fp32", "y_ptr": "*bf16", "inverse_ptr": "*fp32", "scale": "fp32"}
    return [Build.of("exponentials-bf16", _exponentials, types, {"BLOCK": _BLOCK}, 8, "no-spill")]
