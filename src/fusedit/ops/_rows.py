"""What the ops on rows of C channels share: launch table, alignment, and the device functions of norms and gates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch

from fusedit.ops import _triton
from fusedit.ops._build import Build
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
POINTERS: Final[Mapping[torch.dtype, str]] = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


class Launch(NamedTuple):
    """Parameters of one capability.

    Attributes:
        elements: of one row that a thread holds in registers, for rows of up to 128 * elements channels.
        tile: elements of a program where rows are shorter (several rows) or the op is elementwise (a part of a row).
        programs: resident programs of 4 warps a multiprocessor, for grids that are sized to the chip.
    """

    elements: int
    tile: int
    programs: int


_DEFAULT: Final = Launch(elements=32, tile=2048, programs=16)
_TABLE: Final[Mapping[tuple[int, int], Launch]] = {
    (8, 6): Launch(elements=32, tile=2048, programs=12),
    (8, 9): Launch(elements=32, tile=2048, programs=12),
    (12, 0): Launch(elements=32, tile=2048, programs=12),
}
WIDEST: Final = 32768
"""The longest row that one program holds in registers."""


def launch(device: torch.device) -> Launch:
    return _TABLE.get(_triton.capability(device.index or 0), _DEFAULT) if device.type == "cuda" else _DEFAULT


class Tile(NamedTuple):
    """A program's part of [S, C]: ROWS whole rows, each padded to BLOCK."""

    ROWS: int
    BLOCK: int
    num_warps: int


@lru_cache(maxsize=1024)
def row_tile(C: int, parameters: Launch = _DEFAULT) -> Tile:
    """Whole rows in one program: 4 warps up to 128 * elements channels, then more warps."""
    block = max(16, power_of_2(C))
    rows = max(1, parameters.tile // block)
    return Tile(rows, block, max(4, block // (32 * parameters.elements)))


@cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def inner(t: Tensor) -> Tensor:
    """The same values with the last dimension dense; a copy only where it is not."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def vector(C: int, *tensors: Tensor) -> int:
    """VEC: elements of the first tensor in 16 bytes, where every row of every tensor starts on 16 bytes; else 1.

    Strides go to kernels in units of VEC, so that the compiler can prove the alignment of every row without the value
    being specialised: two variants at most, both independent of lengths.
    """
    vec = 16 // tensors[0].element_size()
    if C % vec:
        return 1
    for t in tensors:
        if t.data_ptr() % 16:
            return 1
        size = t.element_size()
        for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            if n > 1 and (stride % vec or stride * size % 16):
                return 1
    return vec


def steps(t: Tensor, vec: int) -> tuple[int, ...]:
    """Strides of all dimensions but the last in units of VEC; 0 where the dimension has one element."""
    return tuple(s // vec if n > 1 else 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    """Why the kernels on rows cannot take x[B, S, C]."""
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} channels are wider than {WIDEST}"
    return f"batch {x.shape[0]} is larger than 65535" if x.shape[0] > 65535 else ""


def too_many(N: int, H: int, W: int) -> str:
    """Why a kernel with one program axis for N images and 32-bit numbers for pixels cannot take them, or nothing."""
    return f"{N} images of {H} x {W} are too many" if N > 65535 or H * W > 2**31 - 2**20 else ""


def row_builds(kernel: Any, flags: Mapping[str, bool] | None = None, C: int = 3072) -> list[Build]:
    """Variants of a kernel on rows that the models need: bf16 aligned and not, fp32, and narrow rows."""
    made = []
    for name, channels, dtype, aligned in (
        ("bf16", C, torch.bfloat16, True),
        ("bf16-unaligned", C, torch.bfloat16, False),
        ("fp32", C, torch.float32, True),
        ("fp16-narrow", 256, torch.float16, True),
    ):
        tile = row_tile(channels)
        types = {p: POINTERS[dtype] for p in kernel.arg_names if p.endswith("_ptr")}
        constexprs = {
            "C": channels,
            "BLOCK": tile.BLOCK,
            "ROWS": tile.ROWS,
            "VEC": 16 // dtype.itemsize if aligned else 1,
            **(flags or {}),
        }
        traits = ([] if not aligned else ["vector"] if channels == C else ["vector-stores"]) + ["no-spill"]
        made.append(Build.of(name, kernel, {**types, "eps": "fp32"}, constexprs, tile.num_warps, *traits))
    return made


def plain_rms(x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension in plain torch, in fp32 (fp64 for fp64): written into `out` where it is of that
    dtype, else a new tensor. Two passes over memory instead of the five of the usual formulation."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    target = wide if wide is not x else out
    n = torch.mul(wide, inverse, out=target)
    return n if weight is None else n.mul_(weight)


# -- device functions ----------------------------------------------------------------------------------------------


@kernel
def places(
    base_ptr: tl.tensor,
    b: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    batch_step: tl.tensor,
    row_step: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Addresses of a tile [ROWS, BLOCK] of one batch item; steps are in units of VEC elements."""
    base = base_ptr + b * batch_step * VEC
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    return base + (rows.to(tl.int64) * row_step * VEC)[:, None] + cols[None, :]


@kernel
def load_vector(
    base_ptr: tl.tensor, b: tl.tensor, cols: tl.tensor, batch_step: tl.tensor, C: tl.constexpr, VEC: tl.constexpr
) -> tl.tensor:
    """One row of a [B, C] tensor (batch_step 0: of a [C] tensor) in fp32, as [1, BLOCK]."""
    at = base_ptr + b * batch_step * VEC + cols
    if VEC > 1:
        at = tl.multiple_of(at, 16)
    return tl.load(at, mask=cols < C, other=0.0).to(tl.float32)[None, :]


@kernel
def layer_norm(x: tl.tensor, mask: tl.tensor, eps: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(x - mean) / sqrt(var + eps) over a row that lies in registers: two exact passes; masked lanes give junk."""
    mean = tl.sum(x, axis=1) * (1.0 / C)
    d = tl.where(mask, x - mean[:, None], 0.0)
    return d * tl.rsqrt(tl.sum(d * d, axis=1) * (1.0 / C) + eps)[:, None]


@kernel
def rms_norm(x: tl.tensor, eps: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """x / sqrt(mean(x^2) + eps); masked lanes must be 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / C) + eps)[:, None]


@kernel
def tanh(x: tl.tensor) -> tl.tensor:
    """tanh in fp32 to about 2 ulp: a series near 0, where 1 - exp(-2|x|) would cancel."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-0.33333333333 + s * (0.13333333333 + s * (-0.05396825397 + s * 0.02186948854))))
    return tl.where(a < 0.25, near, tl.where(x < 0, -far, far))
