"""Attention as two products of the library and a softmax between them, for head sizes that no fused kernel takes.

So many queries at a time that the products are large. Logits in fp32 as the product leaves them, softmax in fp32, its
result rounded to the dtype as every fused kernel rounds it. H200, one head of 512 and 16,384 tokens in bf16: 1.50 ms,
of which the products are 0.9; the memory-efficient kernel 3.66. A tile of a fused kernel would have to hold 512 columns
of the result besides the logits, and would read keys and values once for every 64 queries: 64 operations a byte, where
the second-level cache gives no more than about 350 TFLOP/s, so 1.6 ms at best.
"""

from __future__ import annotations

from typing import Final

import torch

from fusedit.ops._op import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
_LOGITS: Final = 2**26
"""Logits at a time: 256 MiB, and 128 for what the softmax makes of them. H200, ms: 2^23 (which the second-level cache
holds) 2.04, 2^24 1.77, 2^25 1.63, 2^26 1.50, 2^27 1.48: larger products are worth more than the cache."""
_BLOCK: Final = 4096


@kernel
def _softmax(
    x_ptr: tl.tensor, y_ptr: tl.tensor, T: tl.tensor, x_row: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """y[row, :T] = softmax(scale * x[row, :T]): the maximum and the sum in one pass, the result in a second."""
    x_ptr += tl.program_id(0).to(tl.int64) * x_row
    y_ptr += tl.program_id(0).to(tl.int64) * x_row
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, tl.cdiv(T, BLOCK)):
        at = start * BLOCK + lane
        x = tl.load(x_ptr + at, mask=at < T, other=float("-inf")) * scale
        above = tl.maximum(most, x)
        # A lane that has seen nothing yet has -inf: 0 stands in for it, since -inf - -inf is NaN.
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = above
    highest = tl.max(most, axis=0)
    inverse = 1.0 / tl.sum(total * tl.exp(most - highest), axis=0)
    for start in tl.range(0, tl.cdiv(T, BLOCK)):
        at = start * BLOCK + lane
        x = tl.load(x_ptr + at, mask=at < T, other=float("-inf")) * scale
        tl.store(y_ptr + at, (tl.exp(x - highest) * inverse).to(y_ptr.dtype.element_ty), mask=at < T)


def softmax(x: Tensor, scale: float, y: Tensor) -> None:
    """softmax(scale * x) over the last dimension of x[rows, T] in fp32, dense, into y of any dtype, dense."""
    rows, T = x.shape
    _softmax[(rows,)](x, y, T, T, scale, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True)


def products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for q[B,S,H,D], k, v[B,T,H,D] of half precision -> [B,S,H,D] dense."""
    B, S, H, _ = q.shape
    T = k.shape[1]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = max(1, min(S, max(128, _LOGITS // T // 128 * 128)))
    p = torch.empty((step, T), dtype=q.dtype, device=q.device)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, :, h].t(), v[b, :, h]
            for start in range(0, S, step):
                rows = slice(start, min(S, start + step))
                logits = torch.mm(q[b, rows, h], keys, out_dtype=torch.float32)
                weights = p[: logits.shape[0]]
                softmax(logits, scale, weights)
                torch.mm(weights, values, out=o[b, rows, h])
    return o


def builds() -> list[Build]:
    types = {"x_ptr": "*fp32", "y_ptr": "*bf16", "scale": "fp32"}
    return [Build.of("softmax-bf16", _softmax, types, {"BLOCK": _BLOCK}, 8, "no-spill")]
