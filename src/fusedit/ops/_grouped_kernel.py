"""The kernel of grouped_linear, and the tables that tell its programs where their layers lie."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from fusedit.ops._fp8 import from_e4m3
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
BLOCK: Final = 128
"""Outputs of one program."""


@kernel
def grouped(
    x_ptr: tl.tensor,
    address_ptr: tl.tensor,
    place_ptr: tl.tensor,
    key_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hit_ptr: tl.tensor,
    R: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    J: tl.tensor,
    Q: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    hit_step: tl.tensor,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    VEC: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    # K and x_row come in units of VEC, so that the compiler can prove the alignment of every row.
    # place: for each program its layer, its first output within the layer, N of the layer, its first column of y.
    layer = tl.load(place_ptr + tl.program_id(0) * 4)
    first = tl.load(place_ptr + tl.program_id(0) * 4 + 1)
    width = tl.load(place_ptr + tl.program_id(0) * 4 + 2)
    column = tl.load(place_ptr + tl.program_id(0) * 4 + 3)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < R
    # All entries at once: one after the other, their loads alone took 0.3 ms on an H200.
    entries = tl.arange(0, ENTRIES)
    same = (entries < J)[:, None] & inside[None, :]
    for q in range(Q):
        at = (entries[:, None] * R + rows[None, :]) * Q + q
        known = tl.load(keys_ptr + at, mask=same, other=0.0)
        same = same & (known == tl.load(key_ptr + rows * Q + q, mask=inside, other=0.0)[None, :])
    found = tl.max(tl.where(same, entries[:, None], -1), axis=0)
    outputs = first + tl.arange(0, BLOCK)
    mask = inside[:, None] & (outputs < width)[None, :]
    columns = column + tl.arange(0, BLOCK)
    y = tl.zeros((ROWS, BLOCK), tl.float32)
    element = x_ptr.dtype.element_ty
    if tl.min(tl.where(inside, found, 0)) < 0:
        address = tl.load(address_ptr + 3 * layer)
        if CODES:
            weight = address.to(tl.pointer_type(tl.float8e4nv))
        else:
            weight = address.to(tl.pointer_type(element))
        if VEC > 1:
            weight = tl.multiple_of(weight, 16)
        bias = tl.load(address_ptr + 3 * layer + 1).to(tl.pointer_type(element))
        x_at = x_ptr + (rows.to(tl.int64) * x_row * VEC)[:, None]
        w_at = weight + (outputs.to(tl.int64) * K * VEC)[None, :]
        for k in range(0, K * VEC, STEP):
            inputs = k + tl.arange(0, STEP)
            known = inputs < K * VEC
            x = tl.load(x_at + inputs[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            w = tl.load(w_at + inputs[:, None], mask=(outputs < width)[None, :] & known[:, None], other=0.0)
            if CODES:
                w = from_e4m3(w).to(element)  # exact: bf16 and fp16 hold every code
            if STEP > 32:
                y = tl.dot(x, w, y)
            else:
                # fp32: sums of STEP terms, then the sum of these, lose less than one chain of K. The condition, which
                # always holds where it matters, keeps the compiler from making the chain of it after all.
                part = tl.dot(x, w, input_precision="ieee")
                y += tl.where(inside[:, None], part, 0.0)
        if CODES:
            scale = tl.load(address_ptr + 3 * layer + 2).to(tl.pointer_type(tl.float32))
            y *= tl.load(scale + outputs, mask=outputs < width, other=0.0)[None, :]
        y += tl.load(bias + outputs, mask=outputs < width, other=0.0).to(tl.float32)[None, :]
    at = (found.to(tl.int64) * R + rows)[:, None] * N + columns[None, :]
    kept = tl.load(table_ptr + at, mask=mask & (found >= 0)[:, None], other=0.0)
    y = tl.where((found >= 0)[:, None], kept.to(tl.float32), y)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :], y.to(element), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(hit_ptr + rows.to(tl.int64) * hit_step, tl.where(found >= 0, 1.0, 0.0).to(element), mask=inside)


@lru_cache(maxsize=64)
def places(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [programs, 4] for `grouped`."""
    made, column = [], 0
    for layer, width in enumerate(widths):
        made += [(layer, first, width, column + first) for first in range(0, width, BLOCK)]
        column += width
    return torch.tensor(made, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses of weight, bias and scales (or 0) of each layer, int64 [3 L]: what is kept is the key itself, so it
    cannot be stale."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)
