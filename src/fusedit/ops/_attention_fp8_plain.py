"""What the kernels of _attention_fp8.py compute, in plain torch: codes, blocks in their order, weights as e4m3.

For devices without the kernels, and for tests of them. Results differ by the order of fp32 sums, and by the bits that
the chip's products keep of theirs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fusedit.ops._attention_fp8 import INT8_MAX, SAMPLES, TINY, Quantised, Variant, order
from fusedit.ops._attention_fp8_kernel import KEYS, QUERIES
from fusedit.ops._attention_fp8_weights import EXACT, QUADRATIC
from fusedit.ops._fp8 import E4M3_MAX, to_e4m3
from fusedit.ops._rows import cdiv

Tensor = torch.Tensor


def quantise(q: Tensor, k: Tensor, v: Tensor, scale: float, *, int8: bool) -> Quantised:
    """As _attention_fp8.quantise, for any dtype and head size."""
    (B, S, H, D), T = q.shape, k.shape[1]
    largest = INT8_MAX if int8 else E4M3_MAX
    rows, blocks = cdiv(S, QUERIES), cdiv(T, KEYS)
    q, k, v = (t.transpose(1, 2).flatten(0, 1).float() for t in (q, k, v))
    q = F.pad(q * (scale * math.log2(math.e)), (0, 0, 0, rows * QUERIES - S))
    q_scale = _scale(q.abs().amax(-1), largest)
    some = torch.arange(SAMPLES, device=k.device) * T // SAMPLES
    mean = v[:, some].mean(1)
    spare = (0, 0, 0, blocks * KEYS - T)
    k = F.pad(k - k[:, some].mean(1, keepdim=True), spare).view(B * H, blocks, KEYS, D)
    v = F.pad(v - mean[:, None], spare).view(B * H, blocks, KEYS, D)
    k_scale = _scale(k.abs().amax((-2, -1)), largest)
    v_scale = _scale(v.abs().amax((-2, -1)), E4M3_MAX)
    v_scale = torch.where(v_scale.isnan(), v_scale, torch.exp2(v_scale.log2().ceil()))
    v8 = to_e4m3(v * v_scale.reciprocal()[..., None, None]).reshape(B * H, blocks * KEYS, D)
    return Quantised(
        _codes(q * q_scale.reciprocal()[..., None], int8).reshape(B * H * rows, QUERIES, D),
        _codes(k * k_scale.reciprocal()[..., None, None], int8).reshape(B * H * blocks, KEYS, D),
        v8[:, columns(blocks, v8.device)].transpose(1, 2).contiguous(),
        q_scale,
        torch.stack((k_scale, v_scale), -1),
        mean,
    )


def columns(blocks: int, device: torch.device) -> Tensor:
    """Key of each column of v8."""
    return (torch.arange(0, blocks * KEYS, 16, device=device)[:, None] + order(device)).flatten()


def _scale(amax: Tensor, largest: float) -> Tensor:
    return torch.where(amax.isfinite(), amax / largest, torch.nan).masked_fill(amax < TINY, 1.0)


def _codes(x: Tensor, int8: bool) -> Tensor:
    return (x + 0.5).floor().nan_to_num(0.0).clamp(-INT8_MAX, INT8_MAX).to(torch.int8) if int8 else to_e4m3(x)


def attend(made: Quantised, T: int, o: Tensor, variant: Variant) -> None:
    """As _attention_fp8.attend, for any strides and dtype of o [B,S,H,D] and any head size."""
    B, S, H, D = o.shape
    heads, blocks = B * H, made.scales.shape[1]
    keys = columns(blocks, o.device)
    for head in range(heads):
        q = made.q8.view(heads, -1, D)[head].float()
        k = made.k8.view(heads, blocks, KEYS, D)[head].float()
        v = made.v8[head].float().t()
        v = torch.empty_like(v).index_copy_(0, keys, v).view(blocks, KEYS, D)
        most = torch.full((len(q), 1), -torch.inf, dtype=torch.float32, device=o.device)
        total = torch.zeros_like(most)
        y = torch.zeros(len(q), D, dtype=torch.float32, device=o.device)
        for block in (blocks - 1, *range(blocks - 1)):  # the one whose keys may end first, as in the kernel
            x = q @ k[block].t() * (made.q_scale[head, :, None] * made.scales[head, block, 0])
            if block == blocks - 1:
                x[:, T - block * KEYS :] = -torch.inf
            before, most = most, torch.maximum(most, x.amax(1, keepdim=True).clamp_min(0.0))
            alpha = torch.exp2(before - most)
            half = KEYS // 2
            p = torch.cat([_weights(x[:, :half], most, variant.left), _weights(x[:, half:], most, variant.right)], 1)
            total = total * alpha + p.sum(1, keepdim=True)
            y = y * alpha + to_e4m3(p).float() @ (v[block] * made.scales[head, block, 1])
        o[head // H, :, head % H] = (y / total + made.mean[head])[:S].to(o.dtype)


def _weights(x: Tensor, most: Tensor, kind: int) -> Tensor:
    """256 * 2^(x - most) by one of the three ways."""
    if kind == EXACT:
        return torch.exp2(x - most + 8)
    offset = 23.0 if kind == QUADRATIC else 22.9425
    bits = ((x - most + offset) * 1024).clamp(0.0).round()
    bits = torch.where(bits.isnan(), 0x7E00, bits).to(torch.int16)
    p = bits.view(torch.float16).float()
    if kind == QUADRATIC:
        f = ((bits & 0x3FF) | 0x3C00).view(torch.float16).float()
        p = (p * (1.435 - 0.667 * f + 0.226 * f * f)).half().float()
    return p
