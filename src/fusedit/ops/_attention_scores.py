"""Weights of attention for Hopper: the product of queries and keys whose epilogue takes the exponentials.

    x[s, t] = log2(e) scale sum_d q[s, d] k[t, d]
    level[s] = STEP * round(max_t x[s, t] / STEP)                                over the 128 keys of a tile
    p[s, t] = 2^(x[s, t] - level[s]), between 0 and 2^(STEP / 2)

No maximum of a whole row is known while its tiles are computed, and none is needed: bf16 has the exponents of fp32, so
any level will do that lies within 2^60 of it, and p is as precise as with the maximum. With steps of 2^120 nearly all
rows have one level in all their tiles: 0, where the largest logit lies between -41 and 41. What had another level is
brought to the highest one of its row by a second kernel, with a factor of 1, 2^-120 (which rounds nothing but weights
below 2^-66 of the largest) or 0; it reads and writes nothing else of p, and gives each row's 1 / sum p.
Sums are those of the unrounded p, in fp32, but for each tile's largest: as with the maximum, where it is 1, a key that
outweighs all others has the same p in the sum and in the product. Bytes: q, k read, p written, 8 for 128 weights
beside. FLOPs: 2 S T D. H200, 4096 x 16,384 and 512 channels: 0.124 ms, the library's product with fp32 logits 0.139.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from fusedit.ops import _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._hopper import BK, BM, descriptor, place
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
BN: Final = 128
"""Keys of a tile, so that two programs fit a multiprocessor and one multiplies while the other takes exponentials:
8 % faster than one program with tiles of 256."""
_TOGETHER: Final = 2
_STAGES: Final = 3
STEP: Final = 120.0
"""Levels lie this far apart: p, its factor and the sums of p v (262,144 keys, v up to 2^49) are all normal numbers."""
_CONSTEXPRS: Final = {"BM": BM, "BN": BN, "BK": BK, "HALF": BN // 2, "STEP": STEP, "GROUP": 32}
_ROWS: Final = 16
_LEVELLING: Final = {"BN": BN, "STEP": STEP, "ROWS": _ROWS, "MANY": 64, "FEW": 4, "VEC": 8}


@kernel
def _scores(
    q_d: tl.tensor,
    k_d: tl.tensor,
    p_d: tl.tensor,
    level_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    S: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    scale: tl.tensor,
    programs: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # Tiles whose keys end inside in a loop of their own: to ask in all of them would slow down every epilogue.
    height = tl.cdiv(S, BM)
    whole = T // BN
    first = height * whole
    tiles = height * tl.cdiv(T, BN)
    pid = tl.program_id(0)
    # flatten: loads of the next tile start while this one's epilogue is computed.
    for tile in tl.range(pid, first, programs, flatten=True):
        r, c = place(tile, height, whole, GROUP)
        _tile(q_d, k_d, p_d, level_ptr, sum_ptr, r * BM, c, S, T, D, scale, False, BM, BN, BK, HALF, STEP)
    for tile in tl.range(pid + tl.cdiv(tl.maximum(first - pid, 0), programs) * programs, tiles, programs, flatten=True):
        r = (tile - first) * BM
        _tile(q_d, k_d, p_d, level_ptr, sum_ptr, r, whole, S, T, D, scale, True, BM, BN, BK, HALF, STEP)


@kernel
def _tile(
    q_d: tl.tensor,
    k_d: tl.tensor,
    p_d: tl.tensor,
    level_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row: tl.tensor,
    c: tl.tensor,
    S: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    scale: tl.tensor,
    ENDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    column = c * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for d in range(tl.cdiv(D, BK)):
        acc = tl.dot(q_d.load([row, d * BK]), k_d.load([column, d * BK]).T, acc)
    if ENDS:
        acc = tl.where((column + tl.arange(0, BN) < T)[None, :], acc, float("-inf"))
    top = tl.max(acc, axis=1)
    level = tl.floor(top * (scale / STEP) + 0.5) * STEP
    most = tl.exp2(top * scale - level)
    total = most.to(p_d.dtype).to(tl.float32) - most
    # In two halves, since a whole tile of the result would cost a stage its shared memory.
    left, right = acc.reshape(BM, 2, HALF).permute(0, 2, 1).split()
    left = tl.exp2(left * scale - level[:, None])
    p_d.store([row, column], left.to(p_d.dtype))
    total += tl.sum(left, axis=1)
    right = tl.exp2(right * scale - level[:, None])
    p_d.store([row, column + HALF], right.to(p_d.dtype))
    total += tl.sum(right, axis=1)
    at = row + tl.arange(0, BM)
    tl.store(level_ptr + c * S + at, level, mask=at < S)
    tl.store(sum_ptr + c * S + at, total, mask=at < S)


@kernel
def _factor(below: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """2^below for a level so far below its row's highest; two steps are 2^-240, and 0."""
    return tl.where(below > -STEP / 2, 1.0, tl.where(below > -1.5 * STEP, 2.0**-STEP, 0.0))


@kernel
def _level(
    p_ptr: tl.tensor,
    level_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    S: tl.tensor,
    T: tl.tensor,
    p_row: tl.tensor,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Brings the rows of p[S, T], in rows of p_row * VEC elements, to one level each; inverse[row] = 1 / their sum."""
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    tiles = tl.cdiv(T, BN)
    many = tl.arange(0, MANY)
    highest = tl.full((MANY, ROWS), float("-inf"), tl.float32)
    lowest = tl.full((MANY, ROWS), float("inf"), tl.float32)
    total = tl.zeros((MANY, ROWS), tl.float32)
    for start in range(0, tiles, MANY):
        mask = (start + many < tiles)[:, None] & (rows < S)[None, :]
        at = (start + many)[:, None] * S + rows[None, :]
        level = tl.load(level_ptr + at, mask=mask, other=0.0)
        highest = tl.maximum(highest, tl.where(mask, level, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(mask, level, float("inf")))
        total += tl.load(sum_ptr + at, mask=mask, other=0.0)
    top = tl.max(highest, axis=0)
    if tl.max(tl.where(rows < S, top - tl.min(lowest, axis=0), 0.0), axis=0) > 0.0:
        total = tl.zeros((MANY, ROWS), tl.float32)
        for start in range(0, tiles, MANY):
            mask = (start + many < tiles)[:, None] & (rows < S)[None, :]
            at = (start + many)[:, None] * S + rows[None, :]
            factor = _factor(tl.load(level_ptr + at, mask=mask, other=0.0) - top[None, :], STEP)
            total += tl.load(sum_ptr + at, mask=mask, other=0.0) * factor
        few, key = tl.arange(0, FEW), tl.arange(0, BN)
        p = tl.multiple_of(p_ptr + first.to(tl.int64) * p_row * VEC, 16)
        p = p + (tl.arange(0, ROWS).to(tl.int64) * p_row * VEC)[None, :, None] + key[None, None, :]
        for start in range(0, tiles, FEW):
            tile = (start + few)[:, None]
            mask = (tile < tiles) & (rows < S)[None, :]
            level = tl.load(level_ptr + tile * S + rows[None, :], mask=mask, other=0.0)
            factor = _factor(tl.where(mask, level - top[None, :], 0.0), STEP)[:, :, None]
            keys = (start + few)[:, None, None] * BN + key[None, None, :]
            changed = (factor != 1.0) & (keys < p_row * VEC)
            at = p + (start + few)[:, None, None] * BN
            # Not times 0: what lies behind the last key may be anything.
            made = tl.where(factor == 0.0, 0.0, tl.load(at, mask=changed, other=0.0).to(tl.float32) * factor)
            tl.store(at, made.to(p_ptr.dtype.element_ty), mask=changed)
    tl.store(inverse_ptr + rows, 1.0 / tl.sum(total, axis=0), mask=rows < S)


def reason(q: Tensor, k: Tensor, scale: float) -> str:
    """Why the kernels cannot take queries q[B,S,H,D] and keys k[B,T,H,D], or nothing."""
    if q.device.type != "cuda":
        return f"no kernels for device type {q.device.type}"
    if _triton.capability(q.device.index or 0) != (9, 0):
        return f"written for compute capability 9.0, not {_triton.capability(q.device.index or 0)}"
    if q.dtype is not torch.bfloat16:
        return f"needs the exponents of bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if not scale > 0:
        return f"the largest product is the largest logit with a scale above 0 alone, not {scale}"
    if q.stride(-1) != 1 or k.stride(-1) != 1 or _rows.vector(q.shape[-1], q, k) == 1:
        return "needs rows on 16 bytes"
    return ""


def scores(q: Tensor, k: Tensor, scale: float, p: Tensor, levels: Tensor, sums: Tensor) -> None:
    """q[S,D], k[T,D] and p[S,T] with dense rows on 16 bytes; levels and sums dense [tiles,S], in fp32."""
    (S, D), T = q.shape, k.shape[0]
    tiles = _rows.cdiv(S, BM) * _rows.cdiv(T, BN)
    programs = min(_TOGETHER * _rows.multiprocessors(q.device.index or 0) if q.is_cuda else 4, tiles)
    _scores[(programs,)](
        descriptor(q, [BM, BK]),
        descriptor(k, [BN, BK]),
        descriptor(p, [BM, BN // 2]),
        levels,
        sums,
        S,
        T,
        D,
        scale * math.log2(math.e),
        programs,
        **_CONSTEXPRS,
        num_warps=4,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )


def level(p: Tensor, levels: Tensor, sums: Tensor, inverse: Tensor) -> None:
    """What `scores` left in p[S,T] brought to one level a row, and inverse[S] of their sums; p's rows hold eights."""
    S, T = p.shape
    _level[(_rows.cdiv(S, _ROWS),)](
        p, levels, sums, inverse, S, T, p.stride(0) // 8, **_LEVELLING, num_warps=8, enable_fp_fusion=True
    )


def weights(q: Tensor, k: Tensor, scale: float, p: Tensor, inverse: Tensor) -> None:
    """softmax(q k^T * scale) = p[S,T] * inverse[S,1] for q[S,D] and k[T,D]."""
    levels, sums = torch.empty((2, _rows.cdiv(p.shape[1], BN), p.shape[0]), dtype=torch.float32, device=q.device)
    scores(q, k, scale, p, levels, sums)
    level(p, levels, sums, inverse)


def builds() -> list[Build]:
    types = {"q_d": f"tensordesc<bf16[{BM},{BK}]>", "k_d": f"tensordesc<bf16[{BN},{BK}]>"}
    types |= {"p_d": f"tensordesc<bf16[{BM},{BN // 2}]>", "scale": "fp32"}
    floats = dict.fromkeys(("level_ptr", "sum_ptr", "inverse_ptr"), "*fp32")
    traits = ("no-spill", "descriptors")
    return [
        Build.of("scores-bf16-hopper", _scores, types | floats, _CONSTEXPRS, 4, *traits, num_stages=_STAGES),
        Build.of("level-bf16", _level, {"p_ptr": "*bf16"} | floats, _LEVELLING, 8, "no-spill"),
    ]
