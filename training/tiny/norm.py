"""Norm, modulation, gated residual and rotary embedding in one pass each way.

    y = residual + shift + factor * norm(x), or shift + factor * norm(x) with each pair of it turned by an angle

These passes, not the matrix products, are what a step costs in models this narrow: stock makes up to ten of them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from diffusers.models.normalization import RMSNorm
from torch import nn

from tiny.column_sum import PROGRAMS, group_sums, runs_kernels

NONE, RMS, LAYER = 0, 1, 2  # kinds of norm
Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, fp32 [S, D / 2]


@triton.jit
def _normalise(x, eps, live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Return norm(x) [R, D] and 1 / its deviation [R, 1]."""
    scale = tl.full((x.shape[0], 1), 1.0, tl.float32)
    if KIND == 2:
        x = tl.where(live, x - tl.sum(x, axis=1, keep_dims=True) / WIDTH, 0.0)
    if KIND > 0:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    return x * scale, scale


@triton.jit
def _turn(x, cos, sin, token, live, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs of X [R, BLOCK] by the angles of its rows' tokens."""
    at = token[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None]
    c, s = tl.load(cos + at, mask=live, other=0.0), SIGN * tl.load(sin + at, mask=live, other=0.0)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], BLOCK // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (x.shape[0], BLOCK))


@triton.jit
def _forward(
    x,
    factor,
    shift,
    residual,
    cos,
    sin,
    out,
    eps,
    rows,
    chunk,
    tokens,
    heads,
    batch_stride,
    token_stride,
    head_stride,
    factor_stride,
    shift_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SHIFT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TURN: tl.constexpr,
):
    part, group, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    f = tl.load(factor + group * factor_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None]
    if SHIFT:
        b = tl.load(shift + group * shift_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None]
    end = tl.minimum(part * chunk + chunk, rows)
    for first in range(part * chunk, end, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < end)[:, None] & (column < WIDTH)[None]
        row_of_all = group * rows + row
        token, batch = row_of_all // heads % tokens, row_of_all // (heads * tokens)
        at = batch * batch_stride + token * token_stride + row_of_all % heads * head_stride
        y, _ = _normalise(
            tl.load(x + at[:, None] + column[None], mask=live, other=0.0).to(tl.float32), eps, live, KIND, WIDTH
        )
        y = y * f
        if SHIFT:
            y += b
        to = row_of_all[:, None] * WIDTH + column[None]
        if RESIDUAL:
            y += tl.load(residual + to, mask=live, other=0.0).to(tl.float32)
        if TURN:
            y = _turn(y, cos, sin, token, (row < end)[:, None], 1, BLOCK)
        tl.store(out + to, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _backward(
    x,
    grad,
    factor,
    cos,
    sin,
    into,
    factor_parts,
    shift_parts,
    eps,
    rows,
    chunk,
    tokens,
    heads,
    batch_stride,
    token_stride,
    head_stride,
    grad_batch_stride,
    grad_token_stride,
    grad_head_stride,
    factor_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SHIFT: tl.constexpr,
    TURN: tl.constexpr,
):
    part, group, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    f = tl.load(factor + group * factor_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None]
    of_factor = tl.zeros((ROWS, BLOCK), tl.float32)
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    end = tl.minimum(part * chunk + chunk, rows)
    for first in range(part * chunk, end, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < end)[:, None] & (column < WIDTH)[None]
        row_of_all = group * rows + row
        token, batch, head = row_of_all // heads % tokens, row_of_all // (heads * tokens), row_of_all % heads
        at = batch * batch_stride + token * token_stride + head * head_stride
        y, scale = _normalise(
            tl.load(x + at[:, None] + column[None], mask=live, other=0.0).to(tl.float32), eps, live, KIND, WIDTH
        )
        at = batch * grad_batch_stride + token * grad_token_stride + head * grad_head_stride
        g = tl.load(grad + at[:, None] + column[None], mask=live, other=0.0).to(tl.float32)
        if TURN:
            g = _turn(g, cos, sin, token, (row < end)[:, None], -1, BLOCK)
        of_factor += g * y
        if SHIFT:
            of_shift += g
        g = g * f
        if KIND > 0:
            along = tl.sum(g * y, axis=1, keep_dims=True) / WIDTH
            if KIND == 2:
                g -= tl.sum(g, axis=1, keep_dims=True) / WIDTH
            g = scale * (g - y * along)
        tl.store(into + row_of_all[:, None] * WIDTH + column[None], g.to(into.dtype.element_ty), mask=live)
    to = (group * tl.num_programs(0) + part) * WIDTH + column
    tl.store(factor_parts + to, tl.sum(of_factor, axis=0), mask=column < WIDTH)
    if SHIFT:
        tl.store(shift_parts + to, tl.sum(of_shift, axis=0), mask=column < WIDTH)


def _split(x: torch.Tensor, groups: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the sizes for X [B, S, H, D], whose batch makes GROUPS."""
    batch, tokens, heads, width = x.shape
    block = triton.next_power_of_2(width)
    tile = max(1, 2048 // block)  # 16 elements a thread: two 16-byte loads of bf16 in flight
    rows = batch // groups * tokens * heads
    chunk = triton.cdiv(triton.cdiv(rows, max(1, PROGRAMS // groups)), tile) * tile
    sizes = {"rows": rows, "chunk": chunk, "tokens": tokens, "heads": heads}
    return (triton.cdiv(rows, chunk), groups), sizes | {"WIDTH": width, "BLOCK": block, "ROWS": tile}


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """X itself, or a copy where its last dimension has gaps, which the kernels do not read."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        factor: torch.Tensor,
        shift: torch.Tensor | None,
        residual: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kind: int,
        eps: float,
    ) -> torch.Tensor:
        x, factor = _dense_rows(x), _dense_rows(factor)
        shift = None if shift is None else _dense_rows(shift)
        residual, cos, sin = (None if t is None else t.contiguous() for t in (residual, cos, sin))
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        grid, sizes = _split(x, len(factor))
        flags = {"KIND": kind, "SHIFT": shift is not None, "TURN": cos is not None}
        strides = (*x.stride()[:3], factor.stride(0), 0 if shift is None else shift.stride(0))
        names = ("batch_stride", "token_stride", "head_stride", "factor_stride", "shift_stride")
        _forward[grid](
            *(x, factor, shift, residual, cos, sin, out, eps),
            **sizes,
            **flags,
            **dict(zip(names, strides, strict=True)),
            RESIDUAL=residual is not None,
        )
        ctx.save_for_backward(x, factor, cos, sin)
        ctx.eps, ctx.flags, ctx.has_residual = eps, flags, residual is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, factor, cos, sin = ctx.saved_tensors
        grad = _dense_rows(grad)
        into = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        grid, sizes = _split(x, len(factor))
        parts = [torch.empty(grid[1], grid[0], x.shape[-1], device=x.device) for _ in range(1 + ctx.flags["SHIFT"])]
        strides = (*x.stride()[:3], *grad.stride()[:3], factor.stride(0))
        names = ("batch_stride", "token_stride", "head_stride")
        names = (*names, *(f"grad_{name}" for name in names), "factor_stride")
        _backward[grid](
            *(x, grad, factor, cos, sin, into, parts[0], parts[-1], ctx.eps),
            **sizes,
            **ctx.flags,
            **dict(zip(names, strides, strict=True)),
        )
        sums = [group_sums(part, factor.dtype) for part in parts]
        of_shift = sums[1] if ctx.flags["SHIFT"] else None
        return into, sums[0], of_shift, grad if ctx.has_residual else None, None, None, None, None


def _plain(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor | None,
    residual: torch.Tensor | None,
    turn: Turn | None,
    kind: int,
    eps: float,
) -> torch.Tensor:
    norms = {NONE: lambda x: x, RMS: nn.functional.rms_norm, LAYER: nn.functional.layer_norm}
    y = norms[kind](x, x.shape[-1:], eps=eps) if kind else x
    y = y * factor[:, None, None]
    y = y if shift is None else y + shift[:, None, None]
    y = y if residual is None else residual + y
    if turn is None:
        return y
    cos, sin = (table[:, None] for table in turn)
    even, odd = y[..., 0::2], y[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def norm(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    turn: Turn | None = None,
    *,
    kind: int = RMS,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return residual + shift + factor * norm(x), or that without RESIDUAL turned, for X [B, S, D] or [B, S, H, D].

    FACTOR and SHIFT are [B, D], or [1, D] for all; RESIDUAL is as X. With TURN, D is a power of two.
    """
    if turn is not None and residual is not None:
        raise ValueError("norm: a residual is not turned, so residual and turn exclude each other")
    if turn is not None and x.shape[-1] & (x.shape[-1] - 1):
        raise ValueError(f"norm: with turn, the last dimension must be a power of two, not {x.shape[-1]}")
    if x.ndim != 4:
        flat = x.unsqueeze(2) if x.ndim == 3 else x.reshape(1, -1, 1, x.shape[-1])
        residual = None if residual is None else residual.reshape(flat.shape)
        return norm(flat, factor, shift, residual, turn, kind=kind, eps=eps).reshape(x.shape)
    if not runs_kernels(x):
        return _plain(x, factor, shift, residual, turn, kind, eps)
    cos, sin = turn if turn is not None else (None, None)
    return cast(torch.Tensor, _Norm.apply(x, factor, shift, residual, cos, sin, kind, eps))


def gated(residual: torch.Tensor, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return residual + gate * x for a gate [B, D]."""
    return norm(x, gate, residual=residual, kind=NONE)


class FastRMSNorm(nn.Module):
    """The RMSNorm of torch, diffusers or transformers whose place it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return weight * x / rms(x)."""
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return norm(x, self.weight[None], eps=eps)  # type: ignore[index,arg-type]


def use_fast_norms(model: nn.Module) -> None:
    """Make every RMSNorm in MODEL a FastRMSNorm; the weights and their names stay."""
    for module in model.modules():
        if isinstance(module, (RMSNorm, nn.RMSNorm)) or hasattr(module, "variance_epsilon"):
            module.__class__ = FastRMSNorm
