"""The device side of _attention_fp8.py for Hopper: a warp that copies, two groups of four warps, each with 64 queries.

A tile is 128 queries of one head. Keys come in blocks of 128 through a ring of slots that hold a block of k [KEYS, D]
and of v transposed [D, KEYS] (8-bit products take both operands along their sum), each with a barrier of its own, since
the first product needs k alone. The last block, whose keys may end inside, comes first: no loop asks where they end.

In a step a group starts s = q k^T of a block and o = p v of the block before, takes the weights of s while the second
product runs, and its codes when that has ended: ptxas runs the products one by one where a register of an operand is
written while one is under way. It also lets a wait for products rise above all arithmetic up to the last branch, so
there is one, of a barrier, in front of the second wait. The groups take turns in starting their products, so that one's
weights are taken under the other's products. A step is 430 to 500 instructions of a warp; its registers are nearly all
that there are: triton 3.9 spills up to three numbers that are read once a tile, 3.6 none.
"""

from __future__ import annotations

from typing import Final

from fusedit.ops._attention_fp8_weights import COLUMNS, ROWS, all_coded, by_row, exp2, operand, weights
from fusedit.ops._gluon import copy_in, gl, hopper, kernel, sync

QUERIES: Final = 2 * ROWS
KEYS: Final = COLUMNS
HEAD: Final = 128
if hopper is not None:
    BM, BN, D = map(gl.constexpr, (ROWS, KEYS, HEAD))
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
    ACROSS: gl.constexpr = gl.SliceLayout(0, ACC)
    DOWN: gl.constexpr = gl.SliceLayout(1, ACC)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    queries, keys, values = memory
    q_full, q_free, k_full, v_full, free, turns = barriers
    q_scale_ptr, scale_ptr, mean_ptr, ends = vectors
    o_ptr, H, S, o_batch, o_row = result
    heads, rows, blocks, programs = sizes
    KIND: gl.constexpr = gl.int32 if queries.dtype == gl.int8 else gl.float32
    column = gl.arange(0, BN, layout=ACROSS)
    nothing = gl.zeros([BM, BN], KIND, ACC)
    empty = gl.zeros([BM, D], gl.float32, ACC)
    u = 0
    q_phase = 0
    t = 0
    phase = 0
    turn = 1 - GROUP  # the first of the first group is free
    for tile in range(gl.program_id(0), heads * rows, programs):
        head = tile // rows
        q_scale = gl.load(q_scale_ptr + (2 * tile + GROUP) * BM + gl.arange(0, BM, layout=DOWN))
        scales = scale_ptr + 2 * head * blocks
        k_scale = gl.load(scales + 2 * blocks - 2)
        v_scale = gl.load(scales + 2 * blocks - 1)
        q = queries.index(2 * u + GROUP)
        mbarrier.wait(q_full.index(2 * u + GROUP), q_phase)
        mbarrier.wait(k_full.index(t), phase)
        if TURNS:
            mbarrier.wait(turns.index(GROUP), turn)
            turn ^= 1
        first = warpgroup_mma(q, keys.index(t).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        logits = warpgroup_mma_wait(num_outstanding=0, deps=(first,)).to(gl.float32)
        logits = gl.where((column < ends)[None, :], logits, float("-inf"))
        start = gl.full([BM], float("-inf"), gl.float32, DOWN)
        left, right, most, total = weights(logits, q_scale * k_scale, start, LEFT, RIGHT)
        words = all_coded(left, right, LEFT, RIGHT)
        o = empty
        factor = gl.zeros([BM], gl.float32, DOWN)  # of o, to the level and the scale of what is added next
        mbarrier.wait(v_full.index(t), phase)
        last = t
        t, phase = _next(t, phase, STAGES)
        for i in range(blocks - 1):
            k_scale = gl.load(scales + 2 * i)
            next_scale = gl.load(scales + 2 * i + 1)
            p = operand(words, OPERAND)
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
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            before = most
            left, right, most, more = weights(s, q_scale * k_scale, before, LEFT, RIGHT)
            mbarrier.wait(v_full.index(t), phase)
            part, left, right, more = warpgroup_mma_wait(num_outstanding=0, deps=(part, left, right, more))
            words = all_coded(left, right, LEFT, RIGHT)
            sync()
            mbarrier.arrive(free.index(last), count=1)
            alpha = exp2(before - most)
            total = total * by_row(alpha, total) + more
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
        p = operand(words, OPERAND)
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
        weight = gl.convert_layout(gl.sum(total, axis=1), DOWN, assert_trivial=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        sync()
        mbarrier.arrive(free.index(last), count=1)
        if APART:
            part = o * factor[:, None] + part
        o = part * (v_scale / weight)[:, None] + mean[None, :]
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [o], gl.bfloat16, is_pure=True, pack=2)
        y = gl.convert_layout(y, STORE)
        row = (2 * (tile % rows) + GROUP) * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
        at = gl.multiple_of(o_ptr + (head // H).to(gl.int64) * o_batch * 8 + head % H * D, 16)
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

    `heads` B H; `rows` and `blocks` of 128 queries and keys; `ends` keys of the last block count. Scales of q by row,
    for base 2; of k and v by block, side by side. `mean` [heads, D] is added to o, whose strides count 8 elements.
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
