"""GroupNorm on channels_last memory in three kernels.

    s[n,c,h,w] = x[n,c,h,w] + pre_bias[c] + residual[n,c,h,w]     either may be missing
    y[n,c,h,w] = silu((s[n,c,h,w] - mean_g) / sqrt(var_g + eps) * weight[c] + bias[c]),  g = group of c

(1) Each program takes a run of pixels and all channels, and finds every channel's mean and squared deviation, the sums
being shifted by its first pixel so that a large mean cancels nothing; with a residual it writes s on the way. (2) One
program a group joins them (Chan, Golub and LeVeque 1983). (3) Normalises. The first takes the last pixels first and the
third the first ones, since the second-level cache still holds them. Without a residual, pre_bias is added nowhere: it
moves the means.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _rows
from fusedit.ops._build import Build
from fusedit.ops._elementwise import sigmoid
from fusedit.ops._transpose import foldable
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
_STAGES: Final = 3
"""Tiles of statistics in flight. H200, [1,128,1024,1024] in bf16: with one 1.96 TB/s, with three 3.25."""
_LOOPS: Final = 8
_JOINED: Final = 8192
"""Statistics that are joined at once, by 16 warps."""


@kernel
def _tile(
    base_ptr: tl.tensor,
    n: tl.tensor,
    pixels: tl.tensor,
    cols: tl.tensor,
    batch_step: tl.tensor,
    pixel_step: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    base = base_ptr + n * batch_step * VEC
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    return base + (pixels.to(tl.int64) * pixel_step * VEC)[:, None] + cols[None, :]


@kernel
def _statistics(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    square_ptr: tl.tensor,
    P: tl.tensor,
    x_batch: tl.tensor,
    x_pixel: tl.tensor,
    residual_batch: tl.tensor,
    residual_pixel: tl.tensor,
    sum_batch: tl.tensor,
    sum_pixel: tl.tensor,
    loops: tl.tensor,
    units: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    PRE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """mean[n, part, c] and square[n, part, c] = sum of (s - mean)^2 over the `loops * ROWS` pixels of one part.

    s is x; with RESIDUAL it is x + pre + residual, rounded and written to `sum`. C is units * VEC.
    """
    C = units * VEC
    columns = tl.cdiv(C, BLOCK)
    parts = tl.num_programs(0) // columns
    part = parts - 1 - tl.program_id(0) // columns  # what was written last is in the second-level cache still
    n = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    first = part * loops * ROWS
    count = tl.minimum(loops * ROWS, P - first)
    pre = tl.zeros((1, BLOCK), dtype=tl.float32)
    if PRE:
        pre = tl.load(pre_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    one = first + tl.arange(0, 1)
    inside = (cols < C)[None, :]
    shift = tl.load(_tile(x_ptr, n, one, cols, x_batch, x_pixel, VEC), mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        other = _tile(residual_ptr, n, one, cols, residual_batch, residual_pixel, VEC)
        shift += pre + tl.load(other, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    square = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for loop in tl.range(0, tl.cdiv(count, ROWS), num_stages=STAGES):
        pixels = first + loop * ROWS + tl.arange(0, ROWS)
        mask = (pixels < P)[:, None] & inside
        s = tl.load(_tile(x_ptr, n, pixels, cols, x_batch, x_pixel, VEC), mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            at = _tile(residual_ptr, n, pixels, cols, residual_batch, residual_pixel, VEC)
            s += pre + tl.load(at, mask=mask, other=0.0).to(tl.float32)
            rounded = s.to(sum_ptr.dtype.element_ty)
            tl.store(_tile(sum_ptr, n, pixels, cols, sum_batch, sum_pixel, VEC), rounded, mask=mask)
            s = rounded.to(tl.float32)
        d = tl.where(mask, s - shift, 0.0)
        total += d
        square += d * d
    off = tl.sum(total, axis=0) / count.to(tl.float32)
    to = (n * parts + part) * C + cols
    tl.store(mean_ptr + to[None, :], shift + off[None, :], mask=inside)
    tl.store(square_ptr + to, tl.sum(square, axis=0) - count.to(tl.float32) * off * off, mask=cols < C)


@kernel
def _join(
    mean_ptr: tl.tensor,
    square_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    center_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    P: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    each: tl.tensor,
    moved: tl.tensor,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """center[n, c] = mean of the group - pre[c], factor[n, c] = weight / sqrt(var + eps), from parts of `size` pixels
    of a tensor to which pre[c] is still to be added if `moved` is 1, not 0; `each` group has so many channels."""
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    C = tl.num_programs(0) * each
    channels = tl.arange(0, CHANNELS)
    cols = g * each + channels
    inside = channels < each
    pre = tl.load(pre_ptr + cols, mask=channels < each * moved, other=0.0).to(tl.float32)
    shift = tl.load(mean_ptr + n * parts * C + g * each)
    total = tl.zeros((PARTS, CHANNELS), dtype=tl.float32)
    start = parts * 0
    while start < parts:
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        at = (n * parts + part)[:, None] * C + cols[None, :]
        pixels = tl.minimum(size, P - part * size).to(tl.float32)[:, None]
        total += tl.where(mask, tl.load(mean_ptr + at, mask=mask, other=0.0) - shift + pre[None, :], 0.0) * pixels
        start += PARTS
    mean = shift + tl.sum(tl.sum(total, axis=1), axis=0) / (P.to(tl.float32) * each)
    spread = tl.zeros((PARTS, CHANNELS), dtype=tl.float32)
    start = parts * 0
    while start < parts:
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        at = (n * parts + part)[:, None] * C + cols[None, :]
        pixels = tl.minimum(size, P - part * size).to(tl.float32)[:, None]
        d = tl.load(mean_ptr + at, mask=mask, other=0.0) + pre[None, :] - mean
        spread += tl.where(mask, tl.load(square_ptr + at, mask=mask, other=0.0) + pixels * d * d, 0.0)
        start += PARTS
    variance = tl.sum(tl.sum(spread, axis=1), axis=0) / (P.to(tl.float32) * each)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(center_ptr + n * C + cols, mean - pre, mask=inside)
    tl.store(factor_ptr + n * C + cols, weight * tl.rsqrt(variance + eps), mask=inside)


@kernel
def _apply(
    x_ptr: tl.tensor,
    center_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    P: tl.tensor,
    x_batch: tl.tensor,
    x_pixel: tl.tensor,
    out_batch: tl.tensor,
    out_pixel: tl.tensor,
    units: tl.tensor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOOPS: tl.constexpr,
    VEC: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    C = units * VEC
    columns = tl.cdiv(C, BLOCK)
    n = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    center = tl.load(center_ptr + n * C + cols, mask=cols < C, other=0.0)[None, :]
    factor = tl.load(factor_ptr + n * C + cols, mask=cols < C, other=0.0)[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) // columns * (LOOPS * ROWS)
    for loop in tl.static_range(LOOPS):
        pixels = first + loop * ROWS + tl.arange(0, ROWS)
        mask = (pixels < P)[:, None] & (cols < C)[None, :]
        x = tl.load(_tile(x_ptr, n, pixels, cols, x_batch, x_pixel, VEC), mask=mask, other=0.0).to(tl.float32)
        y = (x - center) * factor + bias
        if SILU:
            y = y * sigmoid(y)
        to = _tile(out_ptr, n, pixels, cols, out_batch, out_pixel, VEC)
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)


def _shape(C: int, tile: int) -> tuple[int, int]:
    """(BLOCK, ROWS): channels and pixels of one tile. From 128 channels on there is one variant, on an H200 as fast as
    tiles of whole pixels."""
    block = max(16, min(128, _rows.power_of_2(C)))
    return block, max(1, tile // block)


def builds(residual: bool) -> list[Build]:
    """The kernels of an op with or without a residual."""
    made = []
    for name, dtype, C, aligned in (
        ("bf16", torch.bfloat16, 128, True),
        ("bf16-unaligned", torch.bfloat16, 96, False),
        ("fp32", torch.float32, 512, True),
    ):
        vec = 16 // dtype.itemsize if aligned else 1
        pointer, fp32 = _rows.POINTERS[dtype], "*fp32"
        types = dict.fromkeys(("x_ptr", "residual_ptr", "sum_ptr", "pre_ptr"), pointer)
        types |= {"mean_ptr": fp32, "square_ptr": fp32}
        block, rows = _shape(C, 2048)
        both: dict[str, Any] = {"BLOCK": block, "ROWS": rows, "VEC": vec}
        flags: dict[str, Any] = {"PRE": residual, "RESIDUAL": residual, "STAGES": _STAGES}
        made.append(Build.of(f"statistics-{name}", _statistics, types, both | flags, 4, "no-spill"))
        if residual:
            continue  # the others are those of the op without
        types = {"x_ptr": pointer, "out_ptr": pointer, "bias_ptr": pointer, "center_ptr": fp32, "factor_ptr": fp32}
        both = {"BLOCK": block, "ROWS": rows, "VEC": vec, "LOOPS": _LOOPS, "SILU": True}
        traits = (["vector-stores"] if aligned else []) + ["no-spill"]
        made.append(Build.of(f"apply-{name}", _apply, types, both, 4, *traits))
    if not residual:
        types = dict.fromkeys(("mean_ptr", "square_ptr", "center_ptr", "factor_ptr"), "*fp32")
        types |= {"weight_ptr": "*bf16", "pre_ptr": "*bf16", "eps": "fp32"}
        constexprs: dict[str, Any] = {"CHANNELS": 4, "PARTS": _JOINED // 4}
        made.append(Build.of("join-bf16", _join, types, constexprs, 16, "no-spill"))
    return made


def fits(t: Tensor) -> bool:
    """channels_last, or a slice of it: channels dense, and one stride from pixel to pixel."""
    return (t.shape[1] == 1 or t.stride(1) == 1) and foldable(t)


def _flat(t: Tensor) -> Tensor:
    """[N, P, C] of a tensor that `fits`."""
    N, C, H, W = t.shape
    pixel = t.stride(3) if W > 1 else t.stride(2) if H > 1 else C
    return t.as_strided((N, H * W, C), (t.stride(0), pixel, 1))


def moments(
    x: Tensor,
    residual: Tensor | None,
    pre_bias: Tensor | None,
    weight: Tensor,
    groups: int,
    eps: float,
    summed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """centers and factors, each [N, C] in fp32: the norm without its bias is (x - center) * factor, of `summed` where
    there is a residual. x and residual `fit`, and so does `summed`, which is written."""
    N, C, H, W = x.shape
    P = H * W
    source = _flat(x)
    other = source if residual is None else _flat(residual)
    made = source if summed is None else _flat(summed)
    pre = weight if pre_bias is None else _rows.inner(pre_bias)
    vec = _rows.vector(C, source, other, made)
    parameters = _rows.launch(x.device)
    block, rows = _shape(C, parameters.tile)
    columns = _rows.cdiv(C, block)
    # Half as many programs as could be resident: each has several tiles in flight.
    resident = parameters.programs // 2 * (_rows.multiprocessors(x.device.index) if x.is_cuda else 1)
    loops = max(_LOOPS, _rows.cdiv(P * columns * N, rows * resident))
    parts = _rows.cdiv(P, loops * rows)
    means, squares = torch.empty((2, N, parts, C), dtype=torch.float32, device=x.device)
    steps = (*_rows.steps(source, vec), *_rows.steps(other, vec), *_rows.steps(made, vec))
    _statistics[(parts * columns, N)](
        source,
        other,
        pre,
        made,
        means,
        squares,
        P,
        *steps,
        loops,
        C // vec,
        BLOCK=block,
        ROWS=rows,
        VEC=vec,
        PRE=pre_bias is not None and residual is not None,  # else it is the next kernel's
        RESIDUAL=residual is not None,
        STAGES=_STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )
    before = pre_bias if residual is None else None  # else it is in the sum
    return joined(means, squares, before, weight, groups, eps, P, loops * rows)


def joined(
    means: Tensor,
    squares: Tensor,
    pre_bias: Tensor | None,
    weight: Tensor,
    groups: int,
    eps: float,
    pixels: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """centers and factors, as `moments`, from those of parts of `size` out of so many pixels: [N, parts, C] in fp32."""
    N, parts, C = means.shape
    centers, factors = torch.empty((2, N, C), dtype=torch.float32, device=means.device)
    weight = _rows.inner(weight)
    pre = weight if pre_bias is None else _rows.inner(pre_bias)
    channels = _rows.power_of_2(C // groups)
    _join[(groups, N)](
        means,
        squares,
        pre,
        weight,
        centers,
        factors,
        pixels,
        parts,
        size,
        eps,
        C // groups,
        int(pre_bias is not None),
        CHANNELS=channels,
        PARTS=max(1, _JOINED // channels),
        num_warps=16,
        enable_fp_fusion=True,
    )
    return centers, factors


def lying(t: Tensor) -> Tensor:
    """t where it `fits`, else a channels_last copy."""
    return t if fits(t) else t.contiguous(memory_format=torch.channels_last)


def launch(
    x: Tensor,
    residual: Tensor | None,
    pre_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    silu: bool,
    summed: Tensor | None,
    out: Tensor,
) -> None:
    """All three kernels; with a residual the sum goes to `summed`."""
    if not fits(out) or not (summed is None or fits(summed)):  # by way of tensors that fit
        direct = None if summed is None else torch.empty_like(summed, memory_format=torch.channels_last)
        dense = torch.empty_like(out, memory_format=torch.channels_last)
        launch(x, residual, pre_bias, weight, bias, groups, eps, silu, direct, dense)
        if summed is not None and direct is not None:
            summed.copy_(direct)
        out.copy_(dense)  # last: where both are one tensor it is the norm that stays
        return
    x, residual = lying(x), None if residual is None else lying(residual)
    centers, factors = moments(x, residual, pre_bias, weight, groups, eps, summed)
    normalise(x if summed is None else summed, centers, factors, bias, silu, out)


def normalise(x: Tensor, centers: Tensor, factors: Tensor, bias: Tensor, silu: bool, out: Tensor) -> None:
    """out = silu((x - center) * factor + bias); x and out `fit`, and out may lie on x."""
    N, C, H, W = x.shape
    source, target = _flat(x), _flat(out)
    vec = _rows.vector(C, source, target)
    block, rows = _shape(C, _rows.launch(x.device).tile)
    _apply[(_rows.cdiv(H * W, rows * _LOOPS) * _rows.cdiv(C, block), N)](
        source,
        centers,
        factors,
        _rows.inner(bias),
        target,
        H * W,
        *_rows.steps(source, vec),
        *_rows.steps(target, vec),
        C // vec,
        BLOCK=block,
        ROWS=rows,
        LOOPS=_LOOPS,
        VEC=vec,
        SILU=silu,
        num_warps=4,
        enable_fp_fusion=True,
    )
