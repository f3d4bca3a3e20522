"""The device side of _attention_fp8.py for Hopper: a warp that copies, two groups of four warps, each with 64 queries.

A tile is 128 queries of one head. Keys come in blocks of 128 through a ring of slots that hold a block of k [KEYS, D] and
of v transposed [D, KEYS] (8-bit products take both operands along their sum), each full barrier by itself, since the
first product needs k alone. The last block, whose keys may end inside, comes first: no loop asks where the keys end.

In a step a group starts s = q k^T of a block and o = p v of the block before, takes the weights of s while the second
product runs, and its codes when that has ended: ptxas runs the products one by one where a register of an operand is
written while one is under way. It also lets a wait for products rise above all arithmetic up to the last branch, so
there is one, of a barrier, in front of the second wait. The groups take turns in starting their products, so that one's
weights are taken under the other's products.

Weights 2^x, per half of a block's columns, by one of
    EXACT      the special function unit: 8 cycles a warp, as many as both products together
    LINEAR     the bits of 32 (x + 15) of a number in [0, 1] as those of an f16: 2^floor(x) (1 + x - floor(x)), off by
               a factor with a deviation of 1.8 %, before e4m3 rounds them with one of 2.6 %; on the other units
    QUADRATIC  that times a polynomial of its mantissa: 0.2 %
A thread has its weights of 32 keys where the operand of the second product wants those of four other lanes; v's columns
are ordered so that it does not matter (see `order` in _attention_fp8.py).
"""

from __future__ import annotations

from typing import Final

from fusedit.ops._gluon import copy_in, gl, hopper, kernel, sync

QUERIES: Final = 128
KEYS: Final = 128
HEAD: Final = 128
EXACT, LINEAR, QUADRATIC = 0, 1, 2
if hopper is not None:
    BM, BN, D = map(gl.constexpr, (QUERIES // 2, KEYS, HEAD))
    mbarrier = hopper.mbarrier
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
def _copies(
    q_d: gl.tensor,
    k_d: gl.tensor,
    v_d: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    STAGES: gl.constexpr,
) -> None:
    queries, keys, values = memory
    q_full, q_free, k_full, v_full, free, _ = barriers
    heads, rows, blocks, programs = sizes
    u = 0
    q_phase = 1  # a barrier not yet used counts as having ended its phase 1
    t = 0
    phase = 1
    for tile in range(gl.program_id(0), heads * rows, programs):
        head = tile // rows
        for group in gl.static_range(2):
            slot = 2 * u + group
            mbarrier.wait(q_free.index(slot), q_phase)
            mbarrier.expect(q_full.index(slot), BM * D)
            copy_in(q_d, [(2 * tile + group) * BM, 0], q_full.index(slot), queries.index(slot))
        u, q_phase = _next(u, q_phase, 2)
        block = blocks - 1
        for i in range(blocks):
            mbarrier.wait(free.index(t), phase)
            mbarrier.expect(k_full.index(t), BN * D)
            copy_in(k_d, [(head * blocks + block) * BN, 0], k_full.index(t), keys.index(t))
            mbarrier.expect(v_full.index(t), BN * D)
            copy_in(v_d, [head * D, block * BN], v_full.index(t), values.index(t))
            block = i
            t, phase = _next(t, phase, STAGES)


@kernel
def _exp2(x: gl.tensor) -> gl.tensor:
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@kernel
def _larger(x: gl.tensor, y: gl.tensor) -> gl.tensor:
    """The maximum, NaN if one is: a scale that is NaN must show."""
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1)


@kernel
def _by_row(x: gl.tensor, like: gl.tensor) -> gl.tensor:
    """x[M] as [M, 1], lying as the rows of `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@kernel
def _halves(x: gl.tensor) -> gl.tuple:
    """The left and the right half of the columns of [M, N]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()


@kernel
def _even_odd(x: gl.tensor) -> gl.tuple:
    """Of every 8 columns in [M, 4 n] the first 4 and the last 4, [M, n / 2, 4]: a lane of an accumulator has one of
    each, and they are neighbours in an operand."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, N // 8, 2, 4]).permute((0, 1, 3, 2)).split()


@kernel
def _added(h: gl.tensor) -> gl.tensor:
    """Pairs of f16: left half of the columns plus right half."""
    left, right = _halves(h)
    return gl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, is_pure=True, pack=1
    )


@kernel
def _taken(s: gl.tensor, scale: gl.tensor, most: gl.tensor, KIND: gl.constexpr) -> gl.tuple:
    """256 * 2^(s * scale - most) of s[BM, 64]: as fp32 [BM, 64], or as pairs of f16 [BM, 32]; and its sums [BM, 4]."""
    if KIND == 0:
        p = _exp2(s * scale[:, None] - (most - 8.0)[:, None])
        total = gl.sum(gl.sum(p.reshape([BM, 8, 4, 2]), axis=1), axis=2)
    else:
        left, right = s.reshape([BM, 32, 2]).split()
        # Both kinds have the mean of the exact one: LINEAR is too large by 2^0.0575.
        offset = 23.0 if KIND == 2 else 22.9425
        left, times = gl.broadcast(left, _by_row(scale * (1.0 / 32), left))
        left, plus = gl.broadcast(left, _by_row((offset - most) * (1.0 / 32), left))
        p = gl.inline_asm_elementwise(
            "{ .reg .f32 x, y; fma.rn.sat.f32 x, $1, $3, $4; fma.rn.sat.f32 y, $2, $3, $4;"
            " add.rn.f32 x, x, 0f43800000; add.rn.f32 y, y, 0f43800000; prmt.b32 $0, x, y, 0x5410; }",
            "=r,f,f,f,f",
            [left, right, times, plus],
            gl.int32,
            is_pure=True,
            pack=1,
        )
        if KIND == 2:
            # 2^(f - 1) / f of a mantissa f in [1, 2), about 1.435 - 0.667 f + 0.226 f^2.
            p = gl.inline_asm_elementwise(
                "{ .reg .b32 f, a, b, c; lop3.b32 f, $1, 0x03ff03ff, 0x3c003c00, 0xea; mov.b32 a, 0x333b333b;"
                " mov.b32 b, 0xb956b956; mov.b32 c, 0x3dbd3dbd; fma.rn.f16x2 a, a, f, b; fma.rn.f16x2 a, a, f, c;"
                " mul.rn.f16x2 $0, $1, a; }",
                "=r,r",
                [p],
                gl.int32,
                is_pure=True,
                pack=1,
            )
        total = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, $1; cvt.f32.f16 x, a; cvt.f32.f16 y, b;"
            " add.rn.f32 $0, x, y; }",
            "=f,r",
            [_added(_added(_added(p)))],
            gl.float32,
            is_pure=True,
            pack=1,
        )
    return p, total


@kernel
def _weights(s: gl.tensor, scale: gl.tensor, before: gl.tensor, LEFT: gl.constexpr, RIGHT: gl.constexpr) -> gl.tuple:
    """Weights of the left and the right half, the new maximum, sums [BM, 4] that are still to be added up."""
    most = _larger(before, gl.max(s, axis=1) * scale)
    left, right = _halves(s)
    times = gl.convert_layout(scale, gl.SliceLayout(1, left.type.layout), assert_trivial=True)
    top = gl.convert_layout(most, gl.SliceLayout(1, left.type.layout), assert_trivial=True)
    left, total = _taken(left, times, top, LEFT)
    right, more = _taken(right, times, top, RIGHT)
    return left, right, most, total + gl.convert_layout(more, total.type.layout, assert_trivial=True)


@kernel
def _coded(p: gl.tensor, KIND: gl.constexpr) -> gl.tensor:
    """What _taken made of 64 columns, as e4m3, four codes a word, [BM, 16]."""
    if KIND == 0:
        first, second = p.reshape([BM, 32, 2]).split()
        a, c = _even_odd(first)
        b, d = _even_odd(second)
        words = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f",
            [a, b, c, d],
            gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a, b = _even_odd(p)
        words = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f16x2 a, $1; cvt.rn.satfinite.e4m3x2.f16x2 b, $2;"
            " mov.b32 $0, {a, b}; }",
            "=r,r,r",
            [a, b],
            gl.int32,
            is_pure=True,
            pack=1,
        )
    return words.reshape([BM, 16])


@kernel
def _all_coded(left: gl.tensor, right: gl.tensor, LEFT: gl.constexpr, RIGHT: gl.constexpr) -> gl.tensor:
    """Codes of all columns, four a word, [BM, 32]."""
    first = _coded(left, LEFT)
    second = gl.convert_layout(_coded(right, RIGHT), first.type.layout, assert_trivial=True)
    return gl.join(first, second).permute((0, 2, 1)).reshape([BM, 32])


@kernel
def _operand(words: gl.tensor, LAYOUT: gl.constexpr) -> gl.tensor:
    """The same registers as the left operand of a product, e4m3 [BM, BN]."""
    words = gl.join(words, words)
    words = gl.convert_layout(gl.join(words, words).reshape([BM, BN]), LAYOUT, assert_trivial=True)
    # Not pure, so that it stays in front of the first product.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], gl.float8e4nv, is_pure=False, pack=4)


@kernel
def _products(
    memory: gl.tuple,
    barriers: gl.tuple,
    vectors: gl.tuple,
    result: gl.tuple,
    sizes: gl.tuple,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    TURNS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """A group of warps: 64 queries of every tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ACC)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    queries, keys, values = memory
    q_full, q_free, k_full, v_full, free, turns = barriers
    q_scale_ptr, scale_ptr, mean_ptr, ends = vectors
    o_ptr, H, S, o_batch, o_row = result
    heads, rows, blocks, programs = sizes
    KIND: gl.constexpr = gl.int32 if queries.dtype == gl.int8 else gl.float32
    column = gl.arange(0, BN, layout=COLUMNS)
    nothing = gl.zeros([BM, BN], KIND, ACC)
    empty = gl.zeros([BM, D], gl.float32, ACC)
    u = 0
    q_phase = 0
    t = 0
    phase = 0
    turn = 1 - GROUP  # the first of the first group is free
    for tile in range(gl.program_id(0), heads * rows, programs):
        head = tile // rows
        q_scale = gl.load(q_scale_ptr + (2 * tile + GROUP) * BM + gl.arange(0, BM, layout=ROWS))
        scales = scale_ptr + 2 * head * blocks
        k_scale = gl.load(scales + 2 * blocks - 2)
        v_scale = gl.load(scales + 2 * blocks - 1)
        q = queries.index(2 * u + GROUP)
        mbarrier.wait(q_full.index(2 * u + GROUP), q_phase)
        mbarrier.wait(k_full.index(t), phase)
        if TURNS:
            mbarrier.wait(turns.index(GROUP), turn)
            turn ^= 1
        s = warpgroup_mma(q, keys.index(t).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,)).to(gl.float32)
        s = gl.where((column < ends)[None, :], s, float("-inf"))
        start = gl.full([BM], float("-inf"), gl.float32, ROWS)
        left, right, most, total = _weights(s, q_scale * k_scale, start, LEFT, RIGHT)
        words = _all_coded(left, right, LEFT, RIGHT)
        o = empty
        factor = gl.zeros([BM], gl.float32, ROWS)  # of o, to the level and the scale of what is added next
        mbarrier.wait(v_full.index(t), phase)
        last = t
        t, phase = _next(t, phase, STAGES)
        for i in range(blocks - 1):
            k_scale = gl.load(scales + 2 * i)
            next_scale = gl.load(scales + 2 * i + 1)
            p = _operand(words, OPERAND)
            mbarrier.wait(k_full.index(t), phase)
            if TURNS:
                mbarrier.wait(turns.index(GROUP), turn)
                turn ^= 1
            s = warpgroup_mma(q, keys.index(t).permute((1, 0)), nothing, use_acc=False, is_async=True)
            value = values.index(last).permute((1, 0))
            if APART:
                part = warpgroup_mma(p, value, empty, use_acc=False, is_async=True)
            else:
                part = warpgroup_mma(p, value, o, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - GROUP), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,)).to(gl.float32)
            before = most
            left, right, most, more = _weights(s, q_scale * k_scale, before, LEFT, RIGHT)
            mbarrier.wait(v_full.index(t), phase)
            part, left, right, more = warpgroup_mma_wait(num_outstanding=0, deps=(part, left, right, more))
            words = _all_coded(left, right, LEFT, RIGHT)
            sync()
            mbarrier.arrive(free.index(last), count=1)
            alpha = _exp2(before - most)
            total = total * _by_row(alpha, total) + more
            if APART:
                o = o * factor[:, None] + part
                factor = alpha * (v_scale / next_scale)
            else:
                o = part * (alpha * (v_scale / next_scale))[:, None]
            v_scale = next_scale
            last = t
            t, phase = _next(t, phase, STAGES)
        sync()
        mbarrier.arrive(q_free.index(2 * u + GROUP), count=1)
        u, q_phase = _next(u, q_phase, 2)
        p = _operand(words, OPERAND)
        if TURNS:
            mbarrier.wait(turns.index(GROUP), turn)
            turn ^= 1
        value = values.index(last).permute((1, 0))
        if APART:
            part = warpgroup_mma(p, value, empty, use_acc=False, is_async=True)
        else:
            part = warpgroup_mma(p, value, o, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        mean = gl.load(mean_ptr + head * D + column)
        weight = gl.convert_layout(gl.sum(total, axis=1), ROWS, assert_trivial=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        sync()
        mbarrier.arrive(free.index(last), count=1)
        if APART:
            part = o * factor[:, None] + part
        o = part * (v_scale / weight)[:, None] + mean[None, :]
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [o], gl.bfloat16, is_pure=True, pack=2)
        y = gl.convert_layout(y, STORE)
        row = (2 * (tile % rows) + GROUP) * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
        at = o_ptr + (head // H).to(gl.int64) * o_batch * 8 + head % H * D
        at = at + (row.to(gl.int64) * o_row * 8)[:, None] + gl.arange(0, D, layout=gl.SliceLayout(0, STORE))[None, :]
        gl.store(at, y, mask=(row < S)[:, None])


@kernel
def attention(
    q_d: gl.tensor,
    k_d: gl.tensor,
    v_d: gl.tensor,
    q_scale_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    mean_ptr: gl.tensor,
    o_ptr: gl.tensor,
    heads: gl.tensor,
    H: gl.tensor,
    S: gl.tensor,
    rows: gl.tensor,
    blocks: gl.tensor,
    ends: gl.tensor,
    o_batch: gl.tensor,
    o_row: gl.tensor,
    programs: gl.tensor,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    TURNS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """o[b, s, h, :] of q [heads * rows * 128, D], k [heads * blocks * 128, D], v [heads * D, blocks * 128] in 8 bits.

    `heads` B H; `rows` and `blocks` of 128 queries and keys; `ends` keys of the last block count. Scales of q by row, in
    the base 2; of k and v by block, side by side. `mean` [heads, D] is added to o. Strides of o in units of 8 elements.
    With APART each block's p v is added to o in fp32: the sums inside a product keep 14 bits.
    """
    queries = gl.allocate_shared_memory(q_d.dtype, [4, BM, D], q_d.layout)
    keys = gl.allocate_shared_memory(k_d.dtype, [STAGES, BN, D], k_d.layout)
    values = gl.allocate_shared_memory(v_d.dtype, [STAGES, D, BN], v_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    sync()
    memory = (queries, keys, values)
    barriers = (q_full, q_free, k_full, v_full, free, turns)
    vectors = (q_scale_ptr, scale_ptr, mean_ptr, ends)
    result = (o_ptr, H, S, o_batch, o_row)
    sizes = (heads, rows, blocks, programs)
    gl.warp_specialize(
        [
            (_products, (memory, barriers, vectors, result, sizes, 0, LEFT, RIGHT, TURNS, APART, STAGES)),
            (_products, (memory, barriers, vectors, result, sizes, 1, LEFT, RIGHT, TURNS, APART, STAGES)),
            (_copies, (q_d, k_d, v_d, memory, barriers, sizes, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
