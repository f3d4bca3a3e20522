"""The device side of _conv_hopper.py: a warp that copies, two groups of four warps that multiply, all through barriers.

A tile is two picture rows of TW pixels by BN = 2 * BK outputs. Products are outputs x pixels (weights [outputs, BK]
times pixels [BK, TW]), so that a thread's accumulators belong to two outputs and many pixels: its bias is two numbers,
and sums over pixels need two shuffles. Each group has BK outputs and both rows.

`rows` is a ring of four pairs of input rows. A step takes BK input channels of the four rows h - 1 to h + 2, all moved
by dx - 1 pixels, from two pairs; the tap dy of picture rows h and h + 1 reads rows dy and dy + 1 of them, so four rows
serve three taps. The copy engine gives zeros for what lies outside of the picture. `taps` is a ring of S weights
[BN, BK]. A full barrier ends its phase when a copy has come, a free one when both groups have done with the slot.

The residual comes through `rows` as well, two pairs of BK of its channels, and is added by a product with the identity,
exact for finite numbers. Results go through `out` to the copy engine, which leaves out what lies outside.
"""

from __future__ import annotations

from typing import Final

from fusedit.ops._gluon import copy_in, copy_out, gl, hopper, kernel, sync, view

PIXELS: Final = 128
OUTPUTS: Final = 128
CHANNELS: Final = 64
TAPS: Final = 4
"""Weights in flight: with four pairs of input rows and two buffers a group of warps, 224 KiB of shared memory."""
if hopper is not None:
    TW, BN, BK, S = map(gl.constexpr, (PIXELS, OUTPUTS, CHANNELS, TAPS))
    mbarrier, tma = hopper.mbarrier, hopper.tma
    fence_async_shared, warpgroup_mma = hopper.fence_async_shared, hopper.warpgroup_mma
    warpgroup_mma_wait = hopper.warpgroup_mma_wait


@kernel
def _locate(tile: gl.tensor, sizes: gl.tuple) -> gl.tuple:
    """Picture, row, pixel and output where a tile begins, and its number among the tiles of pixels."""
    _, H, W, _, K, _ = sizes
    across = gl.cdiv(W, TW)
    down = gl.cdiv(H, 2)
    columns = K // BN
    part = tile // columns
    return part // (down * across), part // across % down * 2, part % across * TW, tile % columns * BN, part


@kernel
def _tiles(sizes: gl.tuple) -> gl.tensor:
    N, H, W, _, K, _ = sizes
    return N * gl.cdiv(H, 2) * gl.cdiv(W, TW) * (K // BN)


@kernel
def _next(place: gl.tensor, phase: gl.tensor, COUNT: gl.constexpr) -> gl.tuple:
    """The next place of a ring of COUNT, and the phase of its barriers."""
    place += 1
    if place == COUNT:
        place = 0
        phase ^= 1
    return place, phase


@kernel
def _copies(
    x_d: gl.tensor,
    weight_d: gl.tensor,
    residual_d: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    residual: gl.tensor,
) -> None:
    rows, taps, _ = memory
    rows_full, rows_free, taps_full, taps_free = barriers
    _, _, _, C, _, programs = sizes
    q = 0  # which half of the ring of rows
    phase = 1  # a barrier not yet used counts as having ended its phase 1
    t = 0
    turn = 1
    for tile in range(gl.program_id(0), _tiles(sizes), programs):
        n, h, w, column, _ = _locate(tile, sizes)
        if residual != 0:
            for i in gl.static_range(2):
                full = rows_full.index(2 * q + i)
                mbarrier.wait(rows_free.index(2 * q + i), phase)
                mbarrier.expect(full, 4 * TW * BK)
                to = view(rows.index(2 * q + i), x_d.dtype, [1, 2, TW, BK], residual_d.layout)
                copy_in(residual_d, [n, h, w, column + i * BK], full, to)
            q, phase = _next(q, phase, 2)
        dx = 0
        channel = 0
        for _ in range(3 * gl.cdiv(C, BK)):
            for dy in gl.static_range(3):
                if dy < 2:
                    full = rows_full.index(2 * q + dy)
                    mbarrier.wait(rows_free.index(2 * q + dy), phase)
                    mbarrier.expect(full, 4 * TW * BK)
                    to = view(rows.index(2 * q + dy), x_d.dtype, [1, 2, TW, BK], x_d.layout)
                    copy_in(x_d, [n, h + (2 * dy - 1), w + dx - 1, channel], full, to)
                full = taps_full.index(t)
                mbarrier.wait(taps_free.index(t), turn)
                mbarrier.expect(full, 2 * BN * BK)
                copy_in(weight_d, [column, (3 * dy + dx) * C + channel], full, taps.index(t))
                t, turn = _next(t, turn, S)
            q, phase = _next(q, phase, 2)
            dx += 1
            if dx == 3:
                dx = 0
                channel += BK


@kernel
def _multiply(
    acc0: gl.tensor,
    acc1: gl.tensor,
    left: gl.tensor,
    rows: gl.tensor,
    q: gl.tensor,
    ROW: gl.constexpr,
) -> gl.tuple:
    """acc0 + left times row ROW, acc1 + left times row ROW + 1 of the four of half q; asynchronous."""
    row0 = view(rows.index(2 * q + ROW // 2), rows.dtype, [2, TW, BK], rows.layout).index(ROW % 2)
    row1 = view(rows.index(2 * q + (ROW + 1) // 2), rows.dtype, [2, TW, BK], rows.layout).index((ROW + 1) % 2)
    acc0 = warpgroup_mma(left, row0.permute((1, 0)), acc0, is_async=True)
    acc1 = warpgroup_mma(left, row1.permute((1, 0)), acc1, is_async=True)
    return acc0, acc1


@kernel
def _activated(u: gl.tensor, ACT: gl.constexpr) -> gl.tensor:
    """ACT: 0 nothing, 1 SiLU, 2 ReLU."""
    if ACT == 1:
        u = u / (1.0 + gl.exp(-u))
    if ACT == 2:
        u = gl.where(u <= 0.0, 0.0, u)  # NaN stays NaN
    return u


@kernel
def _rounded(u: gl.tensor, BF16: gl.constexpr) -> gl.tensor:
    """u in half precision, two numbers at once: one by one takes 2048 cycles a tile, a tenth of its time with 128
    channels."""
    if BF16:
        v = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [u], gl.bfloat16, is_pure=True, pack=2)
    else:
        v = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [u], gl.float16, is_pure=True, pack=2)
    return v


@kernel
def _send(v: gl.tensor, to: gl.tensor, y_d: gl.tensor, n: gl.tensor, h: gl.tensor, w: gl.tensor, c: gl.tensor) -> None:
    """Half a row of a result, [BK, TW / 2], by way of the buffer `to`, one of two in turn."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TW // 2, 16])
    tma.store_wait(1)
    sync()  # the last copy from this buffer has read it
    to.permute((1, 0)).store(gl.convert_layout(v, LAYOUT, assert_trivial=True))
    fence_async_shared()
    sync()
    copy_out(y_d, [n, h, w, c], view(to, v.dtype, [1, 1, TW // 2, BK], y_d.layout))


@kernel
def _moments(u0: gl.tensor, u1: gl.tensor, mean_ptr: gl.tensor, square_ptr: gl.tensor, at: gl.tensor) -> None:
    """Mean and sum of squared deviations of each output over two whole rows of a tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TW, 16])
    mean = gl.sum(u0 + u1, axis=1) / (2 * TW)
    u0 -= mean[:, None]
    u1 -= mean[:, None]
    square = gl.sum(u0 * u0 + u1 * u1, axis=1)
    at += gl.arange(0, BK, layout=gl.SliceLayout(1, LAYOUT))
    gl.store(mean_ptr + at, mean)
    gl.store(square_ptr + at, square)


@kernel
def _products(
    y_d: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    vectors: gl.tuple,
    sizes: gl.tuple,
    WHICH: gl.constexpr,
    residual: gl.tensor,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """A group of warps: outputs WHICH * BK and on of every tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TW, 16])
    EYE: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    HALF: gl.constexpr = TW // 2
    rows, taps, out = memory
    rows_full, rows_free, taps_full, taps_free = barriers
    bias_ptr, mean_ptr, square_ptr, moments = vectors
    _, _, _, C, K, programs = sizes
    dtype: gl.constexpr = rows.dtype
    q = 0
    phase = 0
    t = 0
    turn = 0
    for tile in range(gl.program_id(0), _tiles(sizes), programs):
        n, h, w, column, part = _locate(tile, sizes)
        column += WHICH * BK
        bias = gl.zeros([BK], gl.float32, gl.SliceLayout(1, ACC))
        if BIAS:
            bias = gl.load(bias_ptr + column + gl.arange(0, BK, layout=gl.SliceLayout(1, ACC))).to(gl.float32)
        acc0 = gl.zeros([BK, TW], gl.float32, ACC)
        acc1 = gl.zeros([BK, TW], gl.float32, ACC)
        if residual != 0:
            i = gl.arange(0, BK, layout=gl.SliceLayout(1, EYE))
            j = gl.arange(0, BK, layout=gl.SliceLayout(0, EYE))
            eye = gl.where(i[:, None] == j[None, :], 1.0, 0.0).to(dtype)
            mbarrier.wait(rows_full.index(2 * q + WHICH), phase)
            acc0, acc1 = _multiply(acc0, acc1, eye, rows, q, 2 * WHICH)
            acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1))
            # The other pair too: a slot may only be filled again when both groups have passed it.
            mbarrier.wait(rows_full.index(2 * q + 1 - WHICH), phase)
            sync()
            mbarrier.arrive(rows_free.index(2 * q), count=1)
            mbarrier.arrive(rows_free.index(2 * q + 1), count=1)
            q, phase = _next(q, phase, 2)
        last = 0
        for step in range(3 * gl.cdiv(C, BK)):
            for dy in gl.static_range(3):
                if dy < 2:
                    mbarrier.wait(rows_full.index(2 * q + dy), phase)
                mbarrier.wait(taps_full.index(t), turn)
                left = taps.index(t).slice(WHICH * BK, BK)
                acc0, acc1 = _multiply(acc0, acc1, left, rows, q, dy)
                acc0, acc1 = warpgroup_mma_wait(num_outstanding=2, deps=(acc0, acc1))
                # The tap before is done: give back its weights, and the input rows that it was the last to use.
                sync()
                if dy == 0:
                    mbarrier.arrive(taps_free.index(last), count=1, pred=step > 0)
                    mbarrier.arrive(rows_free.index(2 * (q ^ 1) + 1), count=1, pred=step > 0)
                else:
                    mbarrier.arrive(taps_free.index(last), count=1)
                    if dy == 2:
                        mbarrier.arrive(rows_free.index(2 * q), count=1)
                last = t
                t, turn = _next(t, turn, S)
            q, phase = _next(q, phase, 2)
        acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1))
        sync()
        mbarrier.arrive(taps_free.index(last), count=1)
        mbarrier.arrive(rows_free.index(2 * (q ^ 1) + 1), count=1)
        u0 = _activated(acc0 + bias[:, None], ACT)
        u1 = _activated(acc1 + bias[:, None], ACT)
        v00, v01 = _rounded(u0, dtype == gl.bfloat16).reshape([BK, 2, HALF]).permute((0, 2, 1)).split()
        v10, v11 = _rounded(u1, dtype == gl.bfloat16).reshape([BK, 2, HALF]).permute((0, 2, 1)).split()
        _send(v00, out.index(2 * WHICH), y_d, n, h, w, column)
        _send(v01, out.index(2 * WHICH + 1), y_d, n, h, w + HALF, column)
        if moments != 0:  # while the buffers are read
            _moments(u0, u1, mean_ptr, square_ptr, part * K + column)
        _send(v10, out.index(2 * WHICH), y_d, n, h + 1, w, column)
        _send(v11, out.index(2 * WHICH + 1), y_d, n, h + 1, w + HALF, column)
    tma.store_wait(0)


@kernel
def conv(
    x_d: gl.tensor,
    weight_d: gl.tensor,
    residual_d: gl.tensor,
    y_d: gl.tensor,
    bias_ptr: gl.tensor,
    mean_ptr: gl.tensor,
    square_ptr: gl.tensor,
    N: gl.tensor,
    H: gl.tensor,
    W: gl.tensor,
    C: gl.tensor,
    K: gl.tensor,
    programs: gl.tensor,
    residual: gl.tensor,
    moments: gl.tensor,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """y = act(conv(x) + bias); unless `residual` is 0, y = conv(x) + bias + residual, with ACT 0.

    Unless `moments` is 0, means and squares of tiles too.
    """
    dtype: gl.constexpr = x_d.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TW, BK], dtype)
    rows = gl.allocate_shared_memory(dtype, [4, 2 * TW, BK], LAYOUT)
    taps = gl.allocate_shared_memory(dtype, [S, BN, BK], LAYOUT)
    out = gl.allocate_shared_memory(dtype, [4, TW // 2, BK], LAYOUT)
    rows_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    rows_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    taps_full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    taps_free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(rows_full.index(i), count=1)
        mbarrier.init(rows_free.index(i), count=2)
    for i in gl.static_range(S):
        mbarrier.init(taps_full.index(i), count=1)
        mbarrier.init(taps_free.index(i), count=2)
    fence_async_shared()
    sync()
    memory = (rows, taps, out)
    barriers = (rows_full, rows_free, taps_full, taps_free)
    sizes = (N, H, W, C, K, programs)
    vectors = (bias_ptr, mean_ptr, square_ptr, moments)
    gl.warp_specialize(
        [
            (_products, (y_d, memory, barriers, vectors, sizes, 0, residual, ACT, BIAS)),
            (_products, (y_d, memory, barriers, vectors, sizes, 1, residual, ACT, BIAS)),
            (_copies, (x_d, weight_d, residual_d, memory, barriers, sizes, residual)),
        ],
        [4, 1],
        [240, 24],
    )
