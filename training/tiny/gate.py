"""SwiGLU's gate, silu(x) * y, in one pass each way: torch makes two and three."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import nn

from tiny.column_sum import runs_kernels

BLOCK = 1024  # 8 elements a thread: one 16-byte load of bf16


@triton.jit
def _forward(x, y, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < size).to(tl.float32)
    b = tl.load(y + at, mask=at < size).to(tl.float32)
    tl.store(out + at, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _backward(x, y, grad, into_x, into_y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < size).to(tl.float32)
    b = tl.load(y + at, mask=at < size).to(tl.float32)
    g = tl.load(grad + at, mask=at < size).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(into_x + at, (g * b * s * (1 + a * (1 - s))).to(into_x.dtype.element_ty), mask=at < size)
    tl.store(into_y + at, (g * a * s).to(into_y.dtype.element_ty), mask=at < size)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        _forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        into_x, into_y, grad = torch.empty_like(x), torch.empty_like(y), grad.contiguous()
        _backward[(triton.cdiv(x.numel(), BLOCK),)](x, y, grad, into_x, into_y, x.numel(), BLOCK=BLOCK)
        return into_x, into_y


def silu_gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return silu(x) * y."""
    if not runs_kernels(x):
        return nn.functional.silu(x) * y
    return cast(torch.Tensor, _SiluGate.apply(x, y))
