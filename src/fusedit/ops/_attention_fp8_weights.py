"""Weights of attention on the device, in registers: exponentials of a block's logits, and their codes as an operand.

2^x, per half of a block's columns, by one of
    EXACT      the special function unit: 8 cycles a warp, as many as both products together
    LINEAR     the bits of 1024 (x + 15) of a number in [0, 1] as those of an f16: 2^floor(x) (1 + x - floor(x)), off by
               a factor with a deviation of 1.8 %, before e4m3 rounds them with one of 2.6 %; on the other units
    QUADRATIC  that times a polynomial of its mantissa: 0.2 %
In a row of an accumulator lane c of four has the columns 2c, 2c + 1, 2c + 8, 2c + 9 of each 16, in an 8-bit operand
4c to 4c + 3: what it has becomes what it should have, and v's columns follow (`order` in _attention_fp8.py).
"""

from __future__ import annotations

from typing import Final

from fusedit.ops._gluon import gl, hopper, kernel

EXACT: Final = 0
LINEAR: Final = 1
QUADRATIC: Final = 2
ROWS: Final = 64
"""Queries of a group of warps."""
COLUMNS: Final = 128
"""Keys of a block."""
if hopper is not None:
    BM, BN = map(gl.constexpr, (ROWS, COLUMNS))


@kernel
def exp2(x: gl.tensor) -> gl.tensor:
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@kernel
def _larger(x: gl.tensor, y: gl.tensor) -> gl.tensor:
    """The maximum, NaN if one is: a scale that is NaN must show."""
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1)


@kernel
def by_row(x: gl.tensor, like: gl.tensor) -> gl.tensor:
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
def _floating(s: gl.tensor, times: gl.tensor, plus: gl.tensor) -> gl.tensor:
    """s * times + plus of s[BM, 64], between 0 and 1, in 2^-15 as 16 bits: pairs [BM, 32]."""
    left, right = s.reshape([BM, 32, 2]).split()
    left, times = gl.broadcast(left, by_row(times, left))
    left, plus = gl.broadcast(left, by_row(plus, left))
    return gl.inline_asm_elementwise(
        "{ .reg .f32 x, y; fma.rn.sat.f32 x, $1, $3, $4; fma.rn.sat.f32 y, $2, $3, $4;"
        " add.rn.f32 x, x, 0f43800000; add.rn.f32 y, y, 0f43800000; prmt.b32 $0, x, y, 0x5410; }",
        "=r,f,f,f,f",
        [left, right, times, plus],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@kernel
def _whole(x: gl.tensor) -> gl.tensor:
    """To the nearest whole number; beyond those of 32 bits the last of them."""
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], gl.int32, is_pure=True, pack=1)


@kernel
def _fixed(s: gl.tensor, scale: gl.tensor, most: gl.tensor, ABOVE: gl.constexpr) -> gl.tensor:
    """s * scale - most + ABOVE of whole numbers s[BM, 64], 0 where it is less, in 2^-10 as 16 bits: pairs [BM, 32].

    It is below 32, so that 26 bits of a word behind its point suffice, and no s is converted. All is counted from the
    whole number nearest to the maximum. A step of s of more than ABOVE binades counts as so many.
    """
    TOP: gl.constexpr = int(ABOVE * 67108864.0)
    times = gl.maximum(gl.minimum(_whole(scale * 67108864.0), TOP), 1)
    step = times.to(gl.float32)
    top = _whole(most * 67108864.0 / step)
    least = top - (TOP / step).to(gl.int32)
    left, right = s.reshape([BM, 32, 2]).split()
    left, plus = gl.broadcast(left, by_row(TOP - top * times, left))  # modulo 2^32, as the product that it goes to
    left, times = gl.broadcast(left, by_row(times, left))
    left, least = gl.broadcast(left, by_row(least, left))
    return gl.inline_asm_elementwise(
        "{ .reg .s32 x, y; max.s32 x, $1, $5; max.s32 y, $2, $5; mad.lo.s32 x, x, $3, $4; mad.lo.s32 y, y, $3, $4;"
        " prmt.b32 $0, x, y, 0x7632; }",
        "=r,r,r,r,r,r",
        [left, right, times, plus, least],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@kernel
def _taken(s: gl.tensor, scale: gl.tensor, most: gl.tensor, KIND: gl.constexpr) -> gl.tuple:
    """256 * 2^(s * scale - most) of s[BM, 64]: as fp32 [BM, 64], or as pairs of f16 [BM, 32]; and its sums [BM, 4]."""
    if KIND == 0:
        p = exp2(s.to(gl.float32) * scale[:, None] - (most - 8.0)[:, None])
        total = gl.sum(gl.sum(p.reshape([BM, 8, 4, 2]), axis=1), axis=2)
    else:
        # Both kinds have the mean of the exact one: LINEAR is too large by 2^0.0575.
        ABOVE: gl.constexpr = 23.0 if KIND == 2 else 22.9425
        if s.dtype == gl.int32:
            p = _fixed(s, scale, most, ABOVE)
        else:
            p = _floating(s, scale * (1.0 / 32), (ABOVE - most) * (1.0 / 32))
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
def _top(s: gl.tensor) -> gl.tensor:
    """The largest logit of each row, or 0: as whole numbers, three in an instruction, which orders fp32 above 0 too.

    Keys without a mean of some have no row whose logits are all below 0, but for rounding, so 0 is never far above.
    """
    if s.dtype == gl.int32:
        top = gl.maximum(gl.max(s, axis=1), 0).to(gl.float32)
    else:
        top = gl.maximum(gl.max(s.to(gl.int32, bitcast=True), axis=1), 0).to(gl.float32, bitcast=True)
    return top


@kernel
def weights(s: gl.tensor, scale: gl.tensor, before: gl.tensor, LEFT: gl.constexpr, RIGHT: gl.constexpr) -> gl.tuple:
    """Weights of the left and the right half, the new maximum, sums [BM, 4] that are still to be added up."""
    most = _larger(before, _top(s) * scale)
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
def all_coded(left: gl.tensor, right: gl.tensor, LEFT: gl.constexpr, RIGHT: gl.constexpr) -> gl.tensor:
    """Codes of all columns, four a word, [BM, 32]."""
    first = _coded(left, LEFT)
    second = gl.convert_layout(_coded(right, RIGHT), first.type.layout, assert_trivial=True)
    return gl.join(first, second).permute((0, 2, 1)).reshape([BM, 32])


@kernel
def operand(words: gl.tensor, LAYOUT: gl.constexpr) -> gl.tensor:
    """The same registers as the left operand of a product, e4m3 [BM, BN]."""
    words = gl.join(words, words)
    words = gl.convert_layout(gl.join(words, words).reshape([BM, BN]), LAYOUT, assert_trivial=True)
    # Not pure, so that it stays in front of the first product.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], gl.float8e4nv, is_pure=False, pack=4)
