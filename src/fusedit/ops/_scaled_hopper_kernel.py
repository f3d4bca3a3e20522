"""The device side of _scaled_hopper.py: a warp that copies, two groups of four that multiply, two that finish.

A tile is BM = 128 rows by BN = 256 columns of u = (x . weight^T) * x_scale * weight_scale + bias, of e4m3; or of bf16,
without scales and with results in bf16. `xs` and `ws` are rings of S steps of BK bytes of x and weight. Each
multiplying group has 64 rows; when its sums are complete it scales them by x_scale, rounds them to bf16 into its half
of `u`, and goes on with the next tile. Two warps take them from there: weight_scale, bias, activation, quantisation and
the way to memory cost the tensor cores no time while a tile's products take longer than its end. A low-rank term
t . up^T is more steps of the same ring, 64 ranks each, in bf16.

A full barrier ends its phase when data have come, a free one when all who read the slot have done with it.
"""

from __future__ import annotations

from typing import Final

from fusedit.ops._gluon import copy_in, copy_out, gl, hopper, kernel, sync, view

ROWS: Final = 128
COLUMNS: Final = 256
STEP: Final = 128
RANKS: Final = 32
"""Of a low-rank term beside codes, in a step of it: half the memory of others."""
STEPS: Final = 3
"""Steps in flight: 144 KiB, beside 64 KiB of sums on their way."""
if hopper is not None:
    BM, BN, BK, S = map(gl.constexpr, (ROWS, COLUMNS, STEP, STEPS))
    HALF = gl.constexpr(ROWS // 2)
    mbarrier, tma = hopper.mbarrier, hopper.tma
    fence_async_shared, warpgroup_mma = hopper.fence_async_shared, hopper.warpgroup_mma
    warpgroup_mma_wait = hopper.warpgroup_mma_wait


@kernel
def _next(place: gl.tensor, phase: gl.tensor, COUNT: gl.constexpr) -> gl.tuple:
    """The next place of a ring of COUNT, and the phase of its barriers."""
    place += 1
    if place == COUNT:
        place = 0
        phase ^= 1
    return place, phase


@kernel
def _tiles(sizes: gl.tuple) -> gl.tensor:
    B, L, N, _, _, _, _ = sizes
    return B * gl.cdiv(L, BM) * gl.cdiv(N, BN)


@kernel
def _locate(tile: gl.tensor, sizes: gl.tuple, GROUP: gl.constexpr) -> gl.tuple:
    """Item, row and column of tiles where a tile begins: GROUP tiles of rows share weights before the next columns.

    Columns before `start` come first, so that the tiles that are worked on together end alike.
    """
    B, L, N, _, _, start, _ = sizes
    down = gl.cdiv(L, BM)
    height = down * B
    width = start // BN
    plain = height * width
    begin = 0
    if tile >= plain:
        tile -= plain
        begin = width
        width = gl.cdiv(N, BN) - width
    first = tile // (GROUP * width) * GROUP
    tall = gl.minimum(height - first, GROUP)
    r = first + tile % (GROUP * width) % tall
    c = begin + tile % (GROUP * width) // tall
    return r // down, r % down * BM, c


@kernel
def _copy_step(
    x_d: gl.tensor,
    weight_d: gl.tensor,
    left: gl.tensor,
    right: gl.tensor,
    full: gl.tensor,
    item: gl.tensor,
    row: gl.tensor,
    c: gl.tensor,
    x_at: gl.tensor,
    weight_at: gl.tensor,
    ACT: gl.constexpr,
) -> None:
    """A block of x and of weight, whatever their dtype."""
    WIDE: gl.constexpr = x_d.block_shape[2]
    copy_in(x_d, [item, row, x_at], full, view(left, x_d.dtype, [1, BM, WIDE], x_d.layout))
    if ACT == 2:
        to = view(right, weight_d.dtype, [2, BN // 2, WIDE], weight_d.layout)
        copy_in(weight_d, [0, c * (BN // 2), weight_at], full, to)
    else:
        copy_in(weight_d, [c * BN, weight_at], full, view(right, weight_d.dtype, [BN, WIDE], weight_d.layout))


@kernel
def _copies(
    x_d: gl.tensor,
    weight_d: gl.tensor,
    t_d: gl.tensor,
    up_d: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    part: gl.tensor,
    last: gl.tensor,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    xs, ws, _ = memory
    full, free, _, _ = barriers
    _, _, _, K, R, _, programs = sizes
    WIDE: gl.constexpr = x_d.block_shape[2]
    LOW: gl.constexpr = t_d.block_shape[2]
    steps = gl.cdiv(K, WIDE)
    all_steps = steps + gl.cdiv(R, LOW)
    place = 0
    phase = 1  # a barrier not yet used counts as having ended its phase 1
    for tile in range(gl.program_id(0), _tiles(sizes), programs):
        item, row, c = _locate(tile, sizes, GROUP)
        for step in range(all_steps):
            mbarrier.wait(free.index(place), phase)
            left, right = xs.index(place), ws.index(place)
            if step < steps:
                mbarrier.expect(full.index(place), (BM + BN) * BK)
                at = step * WIDE
                _copy_step(x_d, weight_d, left, right, full.index(place), item, row, c, at, at, ACT)
            else:
                # What of t lies beyond its part meets the zeros that the copy engine gives beyond the ranks of up.
                mbarrier.expect(full.index(place), (BM + BN) * LOW * 2)
                at = (step - steps) * LOW
                own = gl.minimum(c * BN // part, last) * R + at
                _copy_step(t_d, up_d, left, right, full.index(place), item, row, c, own, at, ACT)
            place, phase = _next(place, phase, S)


@kernel
def _products(
    x_scale_ptr: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    LOW: gl.constexpr,
) -> None:
    """A group of warps: rows WHICH * HALF and on of every tile."""
    xs, ws, u = memory
    CODES: gl.constexpr = xs.dtype.primitive_bitwidth == 8
    WIDE: gl.constexpr = BK if CODES else BK // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32 if CODES else 16])
    HALVES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SWIZZLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, LOW], gl.bfloat16)
    full, free, u_full, u_free = barriers
    _, L, _, K, R, _, programs = sizes
    steps = gl.cdiv(K, WIDE)
    if not CODES:  # the term is multiplied as all else is
        steps += gl.cdiv(R, LOW)
    place = 0
    phase = 0
    turn = 1
    for tile in range(gl.program_id(0), _tiles(sizes), programs):
        item, row, _ = _locate(tile, sizes, GROUP)
        if CODES:
            rows = row + WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ACC))
            x_scale = gl.load(x_scale_ptr + item.to(gl.int64) * L + rows, mask=rows < L, other=0.0)
        acc = gl.zeros([HALF, BN], gl.float32, ACC)
        last = 0
        for step in range(steps):
            mbarrier.wait(full.index(place), phase)
            left = xs.index(place).slice(WHICH * HALF, HALF)
            acc = warpgroup_mma(left, ws.index(place).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            sync()  # the step before is done, in all four warps
            mbarrier.arrive(free.index(last), count=1, pred=step > 0)
            last = place
            place, phase = _next(place, phase, S)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if CODES:
            low = gl.convert_layout(acc, HALVES, assert_trivial=True)
            for _ in range(gl.cdiv(R, LOW)):
                mbarrier.wait(full.index(place), phase)
                left = view(xs.index(place), gl.bfloat16, [BM * BK // 2 // LOW, LOW], SWIZZLE)
                right = view(ws.index(place), gl.bfloat16, [BN * BK // 2 // LOW, LOW], SWIZZLE)
                left, right = left.slice(WHICH * HALF, HALF), right.slice(0, BN)
                low = warpgroup_mma(left, right.permute((1, 0)), low, is_async=True)
                low = warpgroup_mma_wait(num_outstanding=1, deps=(low,))
                sync()
                mbarrier.arrive(free.index(last), count=1)
                last = place
                place, phase = _next(place, phase, S)
            low = warpgroup_mma_wait(num_outstanding=0, deps=(low,))
            acc = gl.convert_layout(low, ACC, assert_trivial=True)
        mbarrier.wait(u_free.index(WHICH), turn)
        if CODES:
            acc *= x_scale[:, None]
        u.index(WHICH).store(_rounded(acc))
        sync()
        mbarrier.arrive(free.index(last), count=1)
        mbarrier.arrive(u_full.index(WHICH), count=1)
        turn ^= 1


@kernel
def _rounded(u: gl.tensor) -> gl.tensor:
    """Two numbers at once to bf16."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [u], gl.bfloat16, is_pure=True, pack=2)


@kernel
def _e4m3(u: gl.tensor) -> gl.tensor:
    """Four numbers at once; saturates at +-448, NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        "=r,r,r,r,r",
        [u],
        gl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@kernel
def _tanh(x: gl.tensor) -> gl.tensor:
    """By the special function unit, to 2^-11: an eighth of what e4m3 keeps."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@kernel
def _column(ptr: gl.tensor, at: gl.tensor, N: gl.tensor) -> gl.tensor:
    return gl.load(ptr + at, mask=at < N, other=0.0).to(gl.float32)


@kernel
def _ends(
    y_d: gl.tensor,
    g_d: gl.tensor,
    weight_scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    g_scale_ptr: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """The warps that finish tiles, [HALF, 64] at a time."""
    WIDE: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDE], gl.bfloat16)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDE], gl.float8e4nv)
    xs, _, u = memory
    CODES: gl.constexpr = xs.dtype.primitive_bitwidth == 8
    _, _, u_full, u_free = barriers
    _, L, N, _, _, start, programs = sizes
    turn = 0
    for tile in range(gl.program_id(0), _tiles(sizes), programs):
        item, row, c = _locate(tile, sizes, GROUP)
        for which in range(2):
            first = row + which * HALF
            rows = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
            inverse = gl.full([HALF], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
            if CODES and ACT != 0:
                inverse /= gl.load(g_scale_ptr + item.to(gl.int64) * L + rows, mask=rows < L, other=1.0)
            blocks = view(u.index(which), gl.bfloat16, [4, HALF, WIDE], BLOCK)
            mbarrier.wait(u_full.index(which), turn)
            if ACT == 2:
                F = N // 2
                for j in gl.static_range(2):
                    column = c * (BN // 2) + j * WIDE
                    if CODES:
                        at = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))
                        a_scale = _column(weight_scale_ptr, at, F)
                        b_scale = _column(weight_scale_ptr + F, at, F)
                        h = blocks.index(j).load(LAYOUT).to(gl.float32) * (0.5 * a_scale)[None, :]
                        b = blocks.index(j + 2).load(LAYOUT).to(gl.float32) * b_scale[None, :]
                        g = (h + h * _tanh(h)) * b * inverse[:, None]
                        to = view(blocks.index(j), gl.float8e4nv, [2 * HALF, WIDE], NARROW).slice(0, HALF)
                        _send(_e4m3(g), to, g_d, item, first, column)
                    else:
                        h = blocks.index(j).load(LAYOUT).to(gl.float32) * 0.5
                        g = (h + h * _tanh(h)) * blocks.index(j + 2).load(LAYOUT).to(gl.float32)
                        _send(_rounded(g), blocks.index(j), g_d, item, first, column)
            else:
                for j in gl.static_range(4):
                    column = c * BN + j * WIDE
                    at = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))
                    v = blocks.index(j).load(LAYOUT).to(gl.float32)
                    if CODES:
                        v *= _column(weight_scale_ptr, at, N)[None, :]
                    if BIAS:
                        v += _column(bias_ptr, at, N)[None, :]
                    if ACT == 0:  # noqa: SIM114  known when this is compiled, which the next is not
                        _send(_rounded(v), blocks.index(j), y_d, item, first, column)
                    elif column < start:
                        _send(_rounded(v), blocks.index(j), y_d, item, first, column)
                    else:
                        h = 0.5 * v
                        g = h + h * _tanh(v * (0.7978845608028654 + 0.03567740814183427 * v * v))
                        if CODES:
                            to = view(blocks.index(j), gl.float8e4nv, [2 * HALF, WIDE], NARROW).slice(0, HALF)
                            _send(_e4m3(g * inverse[:, None]), to, g_d, item, first, column - start)
                        else:
                            _send(_rounded(g), blocks.index(j), y_d, item, first, column)
            tma.store_wait(0)
            sync()
            mbarrier.arrive(u_free.index(which), count=1)
        turn ^= 1


@kernel
def _send(v: gl.tensor, to: gl.tensor, out_d: gl.tensor, item: gl.tensor, row: gl.tensor, column: gl.tensor) -> None:
    """A block of a result by way of the memory that its sums were in."""
    sync()  # all have read them
    to.store(v)
    fence_async_shared()
    sync()
    copy_out(out_d, [item, row, column], view(to, v.dtype, [1, HALF, 64], out_d.layout))


@kernel
def product(
    x_d: gl.tensor,
    weight_d: gl.tensor,
    t_d: gl.tensor,
    up_d: gl.tensor,
    y_d: gl.tensor,
    g_d: gl.tensor,
    x_scale_ptr: gl.tensor,
    weight_scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    g_scale_ptr: gl.tensor,
    B: gl.tensor,
    L: gl.tensor,
    N: gl.tensor,
    K: gl.tensor,
    R: gl.tensor,
    part: gl.tensor,
    last: gl.tensor,
    start: gl.tensor,
    programs: gl.tensor,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """ACT: 0 y = u; 1 gelu from column `start` on, a multiple of BN; 2 swiglu of columns n and N / 2 + n, start 0.

    Of bf16, y [B, L, N] holds the results of 0 and 1, with GELU where it is, and g those of 2; no scale is read.
    R ranks in t [B, L, P R] and up [N, R]; columns n of u take part min(n // part, last) of t, where `part` is a
    multiple of BN or last = P - 1 is 0. R = 0: no low-rank term.
    """
    dtype: gl.constexpr = x_d.dtype
    WIDE: gl.constexpr = x_d.block_shape[2]
    LOW: gl.constexpr = t_d.block_shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, WIDE], dtype)
    SUMS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BN], gl.bfloat16)
    xs = gl.allocate_shared_memory(dtype, [S, BM, WIDE], LAYOUT)
    ws = gl.allocate_shared_memory(dtype, [S, BN, WIDE], LAYOUT)
    u = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], SUMS)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    u_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    u_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(u_full.index(i), count=1)
        mbarrier.init(u_free.index(i), count=1)
    fence_async_shared()
    sync()
    memory = (xs, ws, u)
    barriers = (full, free, u_full, u_free)
    sizes = (B, L, N, K, R, start, programs)
    gl.warp_specialize(
        [
            (_products, (x_scale_ptr, memory, barriers, sizes, 0, GROUP, LOW)),
            (_products, (x_scale_ptr, memory, barriers, sizes, 1, GROUP, LOW)),
            (
                _ends,
                (y_d, g_d, weight_scale_ptr, bias_ptr, g_scale_ptr, memory, barriers, sizes, ACT, BIAS, GROUP),
            ),
            (_copies, (x_d, weight_d, t_d, up_d, memory, barriers, sizes, part, last, ACT, GROUP)),
        ],
        [4, 2, 1],
        [168, 168, 24],
    )
