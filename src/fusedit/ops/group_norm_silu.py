"""GroupNorm, then SiLU, on channels_last memory: statistics split over the whole chip, then one pass that writes.

    y[n,c,h,w] = silu((x[n,c,h,w] - mean_g) / sqrt(var_g + eps) * weight[c] + bias[c]),  g = group of c
    silu(z) = z sigmoid(z);  with silu=False: y = the norm alone

N images, C channels in G groups, H, W pixels; mean_g and var_g over the C/G channels and H W pixels of a group. x and y
fp16, bf16 or fp32; weight and bias any of them. All in fp32, rounded once. Three kernels: (1) each program takes a run
of pixels and all channels, and finds every channel's mean and squared deviation, the sums being shifted by the mean
of its first pixels so that a large mean cancels nothing; (2) one program a group joins them (Chan, Golub and LeVeque
1983); (3) normalises, last pixels first, since the second-level cache still holds them.
Bytes: x read twice and y written, 3 numel itemsize, where x is larger than the cache. FLOPs: about 12 an element.
x in another layout than channels_last is converted first (a copy). The result is channels_last; plain torch on a CPU
keeps the layout of x.
Exactness: reordered.
Source: Wu and He 2018, as the residual blocks of AutoencoderKL use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _rows
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Build, Cost, op, wide
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: bool = True) -> Tensor:
    x, weight, bias = wide(x, weight, bias)
    N, C, H, W = x.shape
    g = x.reshape(N, groups, C // groups * H * W)
    g = g - g.mean(-1, keepdim=True)
    n = (g / torch.sqrt(g.square().mean(-1, keepdim=True) + eps)).view(N, C, H, W)
    n = n * weight[:, None, None] + bias[:, None, None]
    return n / (1 + torch.exp(-n)) if silu else n


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if x.is_cpu and x.dtype is torch.float32 and _format(x) is torch.channels_last:
        n = _normalised(x, weight, bias, groups, eps)
    else:
        n = F.group_norm(x, groups, weight, bias, eps)
    if out is not None:
        return torch.ops.aten.silu.out(n, out=out) if silu else out.copy_(n)
    if silu:
        n = F.silu(n, inplace=True)
    return n.contiguous(memory_format=_format(x))


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """GroupNorm of a channels_last x on a CPU, as near to fp64 as torch's on NCHW.

    torch's own for this layout sums x and x^2 in one fp32 chain: 1e-5 off at 256x256 where this is 8e-8.
    """
    N, C = x.shape[:2]
    mean = x.mean((2, 3)).view(N, groups, C // groups).mean(-1)
    d = x - mean.repeat_interleave(C // groups, 1)[:, :, None, None]
    variance = d.square().mean((2, 3)).view(N, groups, C // groups).mean(-1)
    scale = torch.rsqrt(variance + eps).repeat_interleave(C // groups, 1) * weight
    return torch.addcmul(bias[:, None, None], d, scale[:, :, None, None], out=d)


def _format(x: Tensor) -> torch.memory_format:
    """Layout of the result: channels_last; on a CPU the layout of x."""
    if x.device.type == "cpu" and not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def check(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: object = True
) -> tuple[torch.Size]:
    _check.activation("group_norm_silu", "x", x, "NCHW")
    C = x.shape[1]
    _check.vector("group_norm_silu", "weight", weight, x, (C,), "C")
    _check.vector("group_norm_silu", "bias", bias, x, (C,), "C")
    if type(groups) is not int:
        _check.kind("group_norm_silu", "groups", groups, "int")
    if groups < 1 or C % groups:
        shown = _check.show(groups).removeprefix("int ")
        raise OpError(f"group_norm_silu: groups must divide the channels of x {_check.show(x)}, not {shown}")
    _check.eps("group_norm_silu", eps)
    if type(silu) is not bool:
        _check.kind("group_norm_silu", "silu", silu, "bool")
    return (x.shape,)


def allocate(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=_format(x))


def cost(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-6, silu: bool = True) -> Cost:
    del groups, eps
    return Cost(3 * x.nbytes + weight.nbytes + bias.nbytes, x.numel() * (12 if silu else 8))


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
    mean_ptr: tl.tensor,
    square_ptr: tl.tensor,
    P: tl.tensor,
    x_batch: tl.tensor,
    x_pixel: tl.tensor,
    loops: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """mean[n, part, c] and square[n, part, c] = sum of (x - mean)^2 over the `loops * ROWS` pixels of one part."""
    part = tl.program_id(0)
    n = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = part * loops * ROWS
    count = tl.minimum(loops * ROWS, P - first).to(tl.float32)
    pixels = first + tl.arange(0, ROWS)
    mask = (pixels < P)[:, None] & (cols < C)[None, :]
    x = tl.load(_tile(x_ptr, n, pixels, cols, x_batch, x_pixel, VEC), mask=mask, other=0.0).to(tl.float32)
    shift = tl.sum(x, axis=0) / tl.minimum(ROWS, P - first).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    square = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    end = tl.minimum(P, first + loops * ROWS)
    at = first
    while at < end:  # not range(): triton 3.6's interpreter cannot count to a number that is an argument
        pixels = at + tl.arange(0, ROWS)
        mask = (pixels < P)[:, None] & (cols < C)[None, :]
        x = tl.load(_tile(x_ptr, n, pixels, cols, x_batch, x_pixel, VEC), mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, x - shift[None, :], 0.0)
        total += d
        square += d * d
        at += ROWS
    off = tl.sum(total, axis=0) / count
    to = (n * tl.num_programs(0) + part) * C + cols
    tl.store(mean_ptr + to, shift + off, mask=cols < C)
    tl.store(square_ptr + to, tl.sum(square, axis=0) - count * off * off, mask=cols < C)


@kernel
def _join(
    mean_ptr: tl.tensor,
    square_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    center_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    P: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """center[n, c] = mean of the group, factor[n, c] = weight / sqrt(var + eps), from parts of `size` pixels."""
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, CHANNELS)
    cols = g * (C // G) + channels
    shift = tl.load(mean_ptr + n * parts * C + g * (C // G))
    total = tl.zeros((PARTS, CHANNELS), dtype=tl.float32)
    start = parts * 0
    while start < parts:
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & (channels < C // G)[None, :]
        at = (n * parts + part)[:, None] * C + cols[None, :]
        pixels = tl.minimum(size, P - part * size).to(tl.float32)[:, None]
        total += tl.where(mask, tl.load(mean_ptr + at, mask=mask, other=0.0) - shift, 0.0) * pixels
        start += PARTS
    mean = shift + tl.sum(tl.sum(total, axis=1), axis=0) / (P.to(tl.float32) * (C // G))
    spread = tl.zeros((PARTS, CHANNELS), dtype=tl.float32)
    start = parts * 0
    while start < parts:
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & (channels < C // G)[None, :]
        at = (n * parts + part)[:, None] * C + cols[None, :]
        pixels = tl.minimum(size, P - part * size).to(tl.float32)[:, None]
        d = tl.load(mean_ptr + at, mask=mask, other=0.0) - mean
        spread += tl.where(mask, tl.load(square_ptr + at, mask=mask, other=0.0) + pixels * d * d, 0.0)
        start += PARTS
    variance = tl.sum(tl.sum(spread, axis=1), axis=0) / (P.to(tl.float32) * (C // G))
    mask = channels < C // G
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(center_ptr + n * C + cols, tl.zeros((CHANNELS,), dtype=tl.float32) + mean, mask=mask)
    tl.store(factor_ptr + n * C + cols, weight * tl.rsqrt(variance + eps), mask=mask)


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
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOOPS: tl.constexpr,
    VEC: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    n = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    center = tl.load(center_ptr + n * C + cols, mask=cols < C, other=0.0)[None, :]
    factor = tl.load(factor_ptr + n * C + cols, mask=cols < C, other=0.0)[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * (LOOPS * ROWS)  # the last pixels are in the cache still
    for loop in tl.static_range(LOOPS):
        pixels = first + loop * ROWS + tl.arange(0, ROWS)
        mask = (pixels < P)[:, None] & (cols < C)[None, :]
        x = tl.load(_tile(x_ptr, n, pixels, cols, x_batch, x_pixel, VEC), mask=mask, other=0.0).to(tl.float32)
        y = (x - center) * factor + bias
        if SILU:
            y = y * tl.sigmoid(y)
        to = _tile(out_ptr, n, pixels, cols, out_batch, out_pixel, VEC)
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)


_LOOPS = 4
_PARTS = 64


def _shape(C: int, tile: int) -> tuple[int, int]:
    """(BLOCK, ROWS): channels and pixels of one tile."""
    block = max(16, min(512, _rows.power_of_2(C)))
    return block, max(1, tile // block)


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def builds() -> list[Build]:
    made = []
    for name, dtype, C, aligned in (
        ("bf16", torch.bfloat16, 128, True),
        ("bf16-unaligned", torch.bfloat16, 96, False),
        ("fp32", torch.float32, 512, True),
    ):
        block, rows = _shape(C, 2048)
        vec = 16 // dtype.itemsize if aligned else 1
        pointer, fp32 = _rows.POINTERS[dtype], "*fp32"
        both: dict[str, Any] = {"C": C, "BLOCK": block, "ROWS": rows, "VEC": vec}
        traits = (["vector-stores"] if aligned else []) + ["no-spill"]
        types = {"x_ptr": pointer, "mean_ptr": fp32, "square_ptr": fp32}
        made.append(Build.of(f"statistics-{name}", _statistics, types, both, 4, "no-spill"))
        types = {"x_ptr": pointer, "out_ptr": pointer, "bias_ptr": pointer, "center_ptr": fp32, "factor_ptr": fp32}
        flags = {"LOOPS": _LOOPS, "SILU": True}
        made.append(Build.of(f"apply-{name}", _apply, types, both | flags, 4, *traits))
    types = dict.fromkeys(("mean_ptr", "square_ptr", "center_ptr", "factor_ptr"), "*fp32")
    types |= {"weight_ptr": "*bf16", "eps": "fp32"}
    constexprs: dict[str, Any] = {"C": 128, "G": 32, "CHANNELS": 4, "PARTS": _PARTS}
    made.append(Build.of("join-bf16", _join, types, constexprs, 4, "no-spill"))
    return made


def _fits(t: Tensor) -> bool:
    """channels_last, or a slice of it: channels dense, and one stride from pixel to pixel."""
    _, C, H, W = t.shape
    return (C == 1 or t.stride(1) == 1) and (H == 1 or W == 1 or t.stride(2) == W * t.stride(3))


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    N, _C, H, W = x.shape
    return f"{N} images of {H} x {W} are too many" if N > 65535 or H * W > 2**31 - 2**20 else ""


def _args(N: int, C: int, H: int, W: int, groups: int, layout: str = "channels_last", mean: float = 0.3) -> Any:
    return (T((N, C, H, W), layout, mean=mean), T((C,)), T((C,)), groups)


CASES = (
    Case("small", _args(2, 64, 4, 6, 4), alias=lambda x, *_: x),
    Case("groups-16", _args(1, 32, 3, 3, 16)),
    Case("no-silu", _args(1, 64, 5, 3, 4), kwargs=(("silu", False),)),
    Case("eps", _args(1, 32, 4, 4, 4), kwargs=(("eps", 0.5),)),
    Case("one-group", _args(1, 24, 5, 5, 1), ("small", "odd")),
    Case("instance", _args(1, 5, 5, 5, 5), ("small", "odd")),
    Case("three-a-group", _args(1, 12, 7, 5, 4), ("small", "odd")),
    Case("odd-channels", _args(2, 30, 7, 5, 3), ("small", "odd")),
    Case("many-pixels", _args(1, 16, 40, 40, 2)),
    Case("mean-50", _args(1, 32, 20, 20, 2, mean=50.0)),
    Case("blocks-of-channels", _args(1, 640, 3, 5, 2)),
    Case("nchw", _args(2, 64, 4, 6, 4, "dense"), ("small", "strided"), alias=lambda x, *_: x),
    Case("transposed", _args(2, 32, 4, 6, 2, "transposed"), ("small", "strided")),
    Case("offset", _args(2, 32, 4, 6, 2, "offset"), ("small", "strided")),
    Case("one-pixel", _args(2, 32, 1, 1, 2), ("small", "odd")),
    Case("empty-batch", _args(0, 32, 4, 4, 8), ("small", "empty")),
    Case("vae-128x1024", _args(1, 128, 1024, 1024, 32), ("real",)),
    Case("vae-256x512", _args(1, 256, 512, 512, 32), ("real",)),
    Case("vae-512x128", _args(2, 512, 128, 128, 32), ("real",)),
    Case("vae-mean-100", _args(1, 512, 128, 128, 32, mean=100.0), ("real",)),
    Case("vae-nchw", _args(1, 512, 128, 128, 32, "dense"), ("real",), kwargs=(("silu", False),)),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=limit,
    fits=lambda _: True,
    allocate=allocate,
)
def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-6,
    silu: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(GroupNorm(x[N,C,H,W])) -> [N,C,H,W] in channels_last (plain torch on a CPU: in the layout of x)."""
    assert out is not None
    if not _fits(out):
        dense = torch.empty_like(out, memory_format=torch.channels_last)
        return out.copy_(_three(x, weight, bias, groups, eps, silu, dense))
    return _three(x, weight, bias, groups, eps, silu, out)


def _three(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, out: Tensor) -> Tensor:
    """Launches the three kernels; `out` is channels_last."""
    N, C, H, W = x.shape
    P = H * W
    x = x if _fits(x) else x.contiguous(memory_format=torch.channels_last)
    weight, bias = _rows.inner(weight), _rows.inner(bias)
    source, target = (t.as_strided((N, P, C), (t.stride(0), _pixel(t), 1)) for t in (x, out))
    parameters = _rows.launch(x.device)
    block, rows = _shape(C, parameters.tile)
    vec = _rows.vector(C, source, target)
    columns = _rows.cdiv(C, block)
    resident = parameters.programs * (_multiprocessors(x.device.index) if x.is_cuda else 1)
    loops = max(_LOOPS, _rows.cdiv(P * columns * N, rows * resident))
    parts = _rows.cdiv(P, loops * rows)
    means, squares = torch.empty((2, N, parts, C), dtype=torch.float32, device=x.device)
    centers, factors = torch.empty((2, N, C), dtype=torch.float32, device=x.device)
    tile: dict[str, Any] = {"C": C, "BLOCK": block, "ROWS": rows, "VEC": vec}
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
    _statistics[(parts, columns, N)](source, means, squares, P, *_rows.steps(source, vec), loops, **tile, **options)
    channels = _rows.power_of_2(C // groups)
    joined = {"C": C, "G": groups, "CHANNELS": channels, "PARTS": max(1, min(_PARTS, 4096 // channels))}
    _join[(groups, N)](means, squares, weight, centers, factors, P, parts, loops * rows, eps, **joined, **options)
    grid = (_rows.cdiv(P, rows * _LOOPS), columns, N)
    steps = (*_rows.steps(source, vec), *_rows.steps(target, vec))
    _apply[grid](source, centers, factors, bias, target, P, *steps, **tile, LOOPS=_LOOPS, SILU=silu, **options)
    return out


def _pixel(t: Tensor) -> int:
    """Stride from pixel to pixel of a tensor that `fits`."""
    return t.stride(3) if t.shape[3] > 1 else t.stride(2) if t.shape[2] > 1 else t.shape[1]
