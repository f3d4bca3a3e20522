"""What the elementwise ops share: any number of dimensions folded to [B, S, C], and a grid over parts of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedit.ops import _rows
from fusedit.ops._build import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor


def run(kernel: Any, out: Tensor, *inputs: Tensor) -> Tensor:
    """Launches a kernel whose parameters are the inputs, out, S, C and parts, two steps of each tensor, constexprs."""
    tensors = fold(*inputs, out)
    vec = _rows.vector(tensors[0].shape[-1], tensors[-1], *tensors[:-1])
    made = plan(vec, tensors[0].shape, out.shape[-1], _rows.launch(out.device))
    steps = [step for t in tensors for step in _rows.steps(t, vec)]
    kernel[made.grid](*tensors, *made.numbers, *steps, **made.constexprs, num_warps=4, enable_fp_fusion=True)
    return out


class Plan(NamedTuple):
    """How to launch: the grid, the numbers a kernel gets (rows S, columns C in units of VEC, parts of a row), and the
    constexprs."""

    grid: tuple[int, int]
    numbers: tuple[int, int, int]
    constexprs: dict[str, int]


def fold(*tensors: Tensor) -> list[Tensor]:
    """Views [B, S, C] of tensors of one shape, where all allow it: one long row if all are dense, else as few rows as
    can be. Where they do not (four or more dimensions in disorder), the first is made dense and fold tried again: so
    the result may be a copy, for inputs only; the caller keeps outputs foldable with `foldable`."""
    shape = tensors[0].shape
    dims: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(shape):
        strides = [t.stride(axis) for t in tensors]
        last = axis == len(shape) - 1
        if size == 1 and not last:
            continue
        if dims and all(before == size * now for before, now in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    if any(s != 1 for s in dims[-1][1]) and dims[-1][0] > 1:
        return fold(*(t.contiguous() if t.stride(-1) != 1 else t for t in tensors))
    if len(dims) > 3:
        return fold(*(t.contiguous() for t in tensors))
    while len(dims) < 3:
        dims.insert(0, (1, [0] * len(tensors)))
    sizes = [size for size, _ in dims]
    return [t.as_strided(sizes, [strides[i] for _, strides in dims]) for i, t in enumerate(tensors)]


def foldable(t: Tensor) -> bool:
    """Whether an output can be written as it lies: dense last dimension, at most two strides before it."""
    return t.is_contiguous() or (t.ndim <= 3 and t.stride(-1) == 1)


def plan(vec: int, folded: torch.Size, channels: int, parameters: _rows.Launch) -> Plan:
    """`channels` is the last dimension before folding: tiles depend on it alone, so that no length changes them."""
    B, S, C = folded
    block = parameters.tile if channels < C else max(16, min(parameters.tile, _rows.power_of_2(C)))
    rows = max(1, parameters.tile // block)
    parts = _rows.cdiv(C, block)
    return Plan((_rows.cdiv(S, rows) * parts, B), (S, C // vec, parts), {"BLOCK": block, "ROWS": rows, "VEC": vec})


@kernel
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) in fp32 to about 2^-21: the square of a reciprocal root is less work than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@kernel
def tile(
    S: tl.tensor,
    C: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """This program's rows, first column (int64), columns and mask of part PART of [S, C]; C in units of VEC."""
    rows = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    start = part.to(tl.int64) * BLOCK
    cols = tl.arange(0, BLOCK)
    mask = (rows < S)[:, None] & (cols.to(tl.int64) < C.to(tl.int64) * VEC - start)[None, :]
    return rows, start, cols, mask


@kernel
def places(
    base_ptr: tl.tensor,
    b: tl.tensor,
    rows: tl.tensor,
    start: tl.tensor,
    cols: tl.tensor,
    batch_step: tl.tensor,
    row_step: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Addresses of a tile [ROWS, BLOCK]; steps are in units of VEC elements, `start` is a multiple of BLOCK."""
    base = base_ptr + b * batch_step * VEC + start
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    return base + (rows.to(tl.int64) * row_step * VEC)[:, None] + cols[None, :]


def builds(kernel: Any) -> list[Build]:
    made = []
    for name, dtype, aligned, block in (
        ("bf16", torch.bfloat16, True, 2048),
        ("bf16-unaligned", torch.bfloat16, False, 2048),
        ("fp32", torch.float32, True, 2048),
        ("fp16-narrow", torch.float16, True, 256),
    ):
        types = {p: _rows.POINTERS[dtype] for p in kernel.arg_names if p.endswith("_ptr")}
        constexprs = {"BLOCK": block, "ROWS": 2048 // block, "VEC": 16 // dtype.itemsize if aligned else 1}
        traits = (["vector"] if aligned else []) + ["no-spill"]
        made.append(Build.of(name, kernel, types, constexprs, 4, *traits))
    return made
