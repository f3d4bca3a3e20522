"""A 3 x 3 convolution by Winograd's minimal filtering, in one kernel: both transforms in fp32, products on tensor cores.

    y = act(bias + A^T [sum_c (B^T d_c B) * u_c] A) + residual,  for every tile of S x S outputs, of T x T inputs d

x[N, C, H, W], u[T T, K, C] of winograd_weight (T T = 16: S = 2, 36: S = 4), bias[K], residual and y [N, K, H, W], one
dtype: fp16, bf16 or fp32. Stride 1, zero padding 1. `act`: none, silu or relu. y is channels_last.
A program has a run of tiles and a block of K, and passes over C once for each row i of the transform: it forms row i of
B^T d B from 2 (S = 4: 3) of the T rows of each tile, rounds it to the dtype, multiplies it by u[T i + j], j < T, into T
accumulators, and adds these to the S S outputs. One pass with all T T accumulators would read x half as often, but
registers would then hold so small a block that the transform is recomputed for every 16 outputs; and a row at a time
shares u's traffic among more tiles. The passes are one loop at run time: unrolled, their addresses spilled.
Bytes: x, u, residual read, y written. FLOPs: those of a direct convolution, 18 N H W C K; the products take 4/9 of them
(S = 4: 1/4). The transform is not free: an H200's vector units do it no faster than its tensor cores the products.
Exactness: reordered; but u and B^T d B are rounded to the dtype, which a direct convolution does not do. Relative error
in bf16, normal inputs, C = 64: direct 0.0017, S = 2 0.0035, S = 4 0.0093. An infinity or NaN spoils its whole tile.
Source: Lavin and Gray 2015, Fast Algorithms for Convolutional Neural Networks, section 4; Winograd 1980.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _conv, _rows, _triton
from fusedit.ops._cases import Case, T
from fusedit.ops._conv import activate
from fusedit.ops._op import Build, Cost, op, wide
from fusedit.ops._triton import kernel, tl
from fusedit.ops.winograd_weight import flat, winograd_weight

Tensor = torch.Tensor
TAPS: Final[Mapping[int, int]] = {16: 4, 36: 6}
"""T by the planes of u."""
B: Final[Mapping[int, tuple[tuple[float, ...], ...]]] = {
    4: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    6: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
"""B^T by T."""
A: Final[Mapping[int, tuple[tuple[float, ...], ...]]] = {
    4: ((1, 1, 1, 0), (0, 1, -1, -1)),
    6: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
"""A^T by T."""


def reference(
    x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> Tensor:
    x, u, bias, residual = wide(x, u, bias, residual)
    return _in_torch(x, u, bias, residual, activation)


def plain(
    x: Tensor,
    u: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = _in_torch(x, u, *wide(bias, residual), activation)
    return (_conv.channels_last(x, y.shape) if out is None else out).copy_(y)


def _in_torch(x: Tensor, u: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """Products in the dtype of x, the rest in fp32 (fp64 for fp64); not rounded at the end."""
    t = TAPS[u.shape[0]]
    s = t - 2
    N, C, H, W = x.shape
    K = u.shape[1]
    h, w = max(1, _rows.cdiv(H, s)), max(1, _rows.cdiv(W, s))
    d = F.pad(wide(x), (1, s * w - W + 1, 1, s * h - H + 1)).unfold(2, t, s).unfold(3, t, s)
    b, a = (d.new_tensor(matrix[t]) for matrix in (B, A))
    v = torch.einsum("ir,nchwrs,js->ijnhwc", b, d, b).to(x.dtype)
    m = wide(torch.bmm(v.reshape(t * t, N * h * w, C), u.mT)).view(t, t, N, h, w, K)
    y = torch.einsum("pi,ijnhwk,qj->nkhpwq", a, m, a).reshape(N, K, s * h, s * w)[:, :, :H, :W]
    y = y if bias is None else y + bias[:, None, None]
    y = F.silu(y) if activation == "silu" else F.relu(y) if activation == "relu" else y
    return y if residual is None else y + residual


def check(
    x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> tuple[tuple[int, ...]]:
    _check.activation("winograd_conv2d", "x", x, "NCHW")
    _check.activation("winograd_conv2d", "u", u, "PKC")
    planes, K, _ = u.shape
    if planes not in TAPS:
        raise OpError(f"winograd_conv2d: u must have 16 or 36 planes, of winograd_weight, not {_check.show(u)}")
    _check.like("winograd_conv2d", "u", u, x, (planes, K, x.shape[1]))
    shape = (x.shape[0], K, *x.shape[2:])
    _conv.check_epilogue("winograd_conv2d", x, K, bias, residual, shape, activation)
    return (shape,)


def cost(x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *_: Any, **__: Any) -> Cost:
    N, C, H, W = x.shape
    K = u.shape[1]
    moved = x.nbytes + u.nbytes + N * H * W * K * x.element_size()
    return Cost(moved + sum(t.nbytes for t in (bias, residual) if t is not None), 18 * N * H * W * C * K)


def reads(
    x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> tuple[Tensor, ...]:
    del activation  # the result may lie on the residual alone
    return x[:0] if residual is None else residual, x, u, *(() if bias is None else (bias,))


@kernel
def _mix(values: tl.tensor, M: tl.constexpr, row: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """sum_i M[row, i] values[i]. In B^T and A^T, row 0 alone has an entry in column 0."""
    first: tl.constexpr = min(row, 1)
    total = values[first] * M[row * N + first]
    for i in tl.static_range(first + 1, N):
        if M[row * N + i] != 0.0:
            total += values[i] * M[row * N + i]
    return total


@kernel
def _entry(M: tl.constexpr, i: tl.tensor, start: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """M[start + i STEP], i < COUNT, for an i that is known at run time only."""
    found = M[start]
    for other in tl.static_range(1, COUNT):
        found = tl.where(i == other, M[start + other * STEP], found)
    return found


@kernel
def _pixels(
    base_ptr: tl.tensor,
    n: tl.tensor,
    y: tl.tensor,
    x: tl.tensor,
    n_step: tl.tensor,
    h_step: tl.tensor,
    w_step: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Addresses of the first channels; steps are in units of VEC elements."""
    at = base_ptr + (n.to(tl.int64) * n_step + y.to(tl.int64) * h_step + x.to(tl.int64) * w_step) * VEC
    if VEC > 1:
        at = tl.multiple_of(at, 16)
    return at


@kernel
def _kernel(
    x_ptr: tl.tensor,
    u_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tiles: tl.tensor,
    H: tl.tensor,
    W: tl.tensor,
    C: tl.tensor,
    K: tl.tensor,
    x_n: tl.tensor,
    x_h: tl.tensor,
    x_w: tl.tensor,
    residual_n: tl.tensor,
    residual_h: tl.tensor,
    residual_w: tl.tensor,
    out_n: tl.tensor,
    out_h: tl.tensor,
    out_w: tl.tensor,
    B: tl.constexpr,
    A: tl.constexpr,
    ROW: tl.constexpr,
    FACTOR: tl.constexpr,
    T: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    CB: tl.constexpr,
    LEFT: tl.constexpr,
    VEC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
) -> None:
    S: tl.constexpr = T - 2
    blocks = tl.cdiv(K * VEC, KB)  # of one run of tiles side by side: they read the same x
    at = tl.program_id(0) // blocks * TILES + tl.arange(0, TILES)
    k = tl.program_id(0) % blocks * KB + tl.arange(0, KB)
    c = tl.arange(0, CB)
    n, y, x = at // (tl.cdiv(H, S) * tl.cdiv(W, S)), at // tl.cdiv(W, S) % tl.cdiv(H, S) * S, at % tl.cdiv(W, S) * S
    corner = _pixels(x_ptr, n, y - 1, x - 1, x_n, x_h, x_w, VEC)[:, None] + c[None, :]
    rows = u_ptr + k.to(tl.int64) * C * VEC
    if VEC > 1:
        rows = tl.multiple_of(rows, 16)
    rows = rows[:, None] + c[None, :]
    plane = K.to(tl.int64) * VEC * C * VEC
    down, right = x_h.to(tl.int64) * VEC, x_w.to(tl.int64) * VEC
    zero = tl.zeros((KB, TILES) if LEFT else (TILES, KB), tl.float32)
    result: tl.tuple = ()
    for _ in tl.static_range(S * S):
        result = result + (zero,)
    for i in tl.range(T):
        m: tl.tuple = ()
        for _ in tl.static_range(T):
            m = m + (zero,)
        for first in tl.range(0, C * VEC, CB):
            inside = (c < C * VEC - first)[None, :]
            d: tl.tuple = ()
            for j in tl.static_range(T):
                there = (at < tiles) & (x + j >= 1) & (x + j <= W)
                total = tl.zeros((TILES, CB), tl.float32)
                for part in tl.static_range(PARTS):
                    r = _entry(ROW, i, part, PARTS, T)
                    mask = (there & (y + r >= 1) & (y + r <= H))[:, None] & inside
                    loaded = tl.load(corner + (r * down + j * right + first), mask=mask, other=0.0).to(tl.float32)
                    loaded *= _entry(FACTOR, i, part, PARTS, T)
                    total = loaded if part == 0 else total + loaded
                d = d + (total,)
            sums: tl.tuple = ()
            for j in tl.static_range(T):
                v = _mix(d, B, j, T).to(x_ptr.dtype.element_ty)
                mask = (k < K * VEC)[:, None] & inside
                u = tl.load(rows + ((i * T + j) * plane + first), mask=mask, other=0.0)
                if LEFT:
                    sums = sums + (tl.dot(u, v.T, m[j], input_precision="ieee"),)
                else:
                    sums = sums + (tl.dot(v, u.T, m[j], input_precision="ieee"),)
            m = sums
        more: tl.tuple = ()
        for p in tl.static_range(S):
            factor = _entry(A, i, p * T, 1, T)
            for q in tl.static_range(S):
                more = more + (result[p * S + q] + _mix(m, A, q, T) * factor,)
        result = more
    bias = tl.zeros((KB,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + k, mask=k < K * VEC, other=0.0).to(tl.float32)
    for p in tl.static_range(S):
        for q in tl.static_range(S):
            v = result[p * S + q].T if LEFT else result[p * S + q]
            v = activate(v + bias[None, :], ACT)
            mask = ((at < tiles) & (y + p < H) & (x + q < W))[:, None] & (k < K * VEC)[None, :]
            if RESIDUAL:
                source = _pixels(residual_ptr, n, y + p, x + q, residual_n, residual_h, residual_w, VEC)
                v += tl.load(source[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            target = _pixels(out_ptr, n, y + p, x + q, out_n, out_h, out_w, VEC)
            tl.store(target[:, None] + k[None, :], v.to(out_ptr.dtype.element_ty), mask=mask)


class Launch(NamedTuple):
    """What a program takes at once.

    Attributes:
        TILES, KB: tiles and outputs; T + S S accumulators of so many numbers are kept in registers.
        CB: channels a step.
        LEFT: u is the left operand of the products, [KB, CB] x [CB, TILES], so that wgmma, which wants 64 rows on the
            left, can do with 16 tiles. Else B^T d B is, which wgmma reads from registers, while it goes on.
    """

    TILES: int
    KB: int
    CB: int
    LEFT: bool
    num_warps: int
    num_stages: int


HALF: Final[Mapping[int, Launch]] = {4: Launch(64, 32, 16, False, 4, 3), 6: Launch(16, 32, 16, False, 8, 3)}
"""By T, for any chip."""
HOPPER: Final[Mapping[int, Launch]] = {4: Launch(64, 32, 32, False, 4, 3), 6: Launch(16, 64, 32, True, 8, 2)}
FLOAT: Final[Mapping[int, Launch]] = {4: Launch(16, 32, 16, True, 4, 3), 6: Launch(16, 16, 16, True, 8, 2)}
"""fp32, whose products are not of tensor cores."""


def _launch(x: Tensor, t: int) -> Launch:
    if x.dtype is torch.float32:
        return FLOAT[t]
    hopper = x.is_cuda and _triton.capability(x.device.index or 0) == (9, 0)
    return HOPPER[t] if hopper else HALF[t]


def _constexprs(t: int, table: Launch, vec: int, bias: bool, residual: bool, activation: str) -> dict[str, Any]:
    parts = 2 if t == 4 else 4
    rows = [[(r, f) for r, f in enumerate(row) if f] for row in B[t]]
    for row in rows:  # 4 a - 5 b + c as 4 a - 4 b - b + c: as many terms in every row
        if len(row) < parts:
            row[1:2] = [(row[1][0], -4.0), (row[1][0], row[1][1] + 4)]
    return {
        "B": flat(B[t]),
        "A": flat(A[t]),
        "ROW": tuple(r for row in rows for r, _ in row),
        "FACTOR": tuple(float(f) for row in rows for _, f in row),
        "T": t,
        "PARTS": parts,
        "TILES": table.TILES,
        "KB": table.KB,
        "CB": table.CB,
        "LEFT": table.LEFT,
        "VEC": vec,
        "BIAS": bias,
        "RESIDUAL": residual,
        "ACT": _conv.ACTIVATIONS.index(activation),
    }


def builds() -> list[Build]:
    made = []
    for name, dtype, t, table, aligned, traits in (
        ("f2-bf16", torch.bfloat16, 4, HALF, True, ("no-spill",)),
        ("f4-bf16", torch.bfloat16, 6, HALF, True, ("no-spill",)),
        ("f2-bf16-hopper", torch.bfloat16, 4, HOPPER, True, ("no-spill",)),
        ("f4-bf16-hopper", torch.bfloat16, 6, HOPPER, True, ("no-spill",)),
        ("f2-bf16-unaligned", torch.bfloat16, 4, HOPPER, False, ()),
        ("f2-fp32", torch.float32, 4, FLOAT, True, ("no-spill",)),
        ("f4-fp32", torch.float32, 6, FLOAT, True, ()),
    ):
        types = {p: _rows.POINTERS[dtype] for p in _kernel.arg_names if p.endswith("_ptr")}
        vec = 16 // dtype.itemsize if aligned else 1
        constexprs = _constexprs(t, table[t], vec, True, True, "silu")
        made.append(
            Build.of(name, _kernel, types, constexprs, table[t].num_warps, *traits, num_stages=table[t].num_stages)
        )
    return made


def limit(x: Tensor, u: Tensor, *_: Any, **__: Any) -> str:
    N, C, H, W = x.shape
    K = u.shape[1]
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:  # it would multiply the bit patterns, as whole numbers
        return "triton's interpreter cannot multiply bfloat16"
    if max(C, K) > 2**31 - 2**16:
        return f"{C} x {K} channels are too many"
    # The smallest block is 16 tiles by 16 outputs; a tile has 2 x 2 pixels or more.
    count = N * _rows.cdiv(H, 2) * _rows.cdiv(W, 2)
    many = count > 2**31 - 2**16 or _rows.cdiv(count, 16) * _rows.cdiv(K, 16) >= 2**31 or max(H, W) > 2**31 - 2**16
    return f"{N} images of {H} x {W} with {K} outputs are too many" if many else ""


def _case(
    name: str,
    size: tuple[int, int, int, int],
    K: int,
    *tags: str,
    tile: int = 2,
    layout: str = "channels_last",
    extras: str = "",
    activation: str = "none",
) -> Case:
    """Weights for outputs of about 1. `extras`: `b` for a bias, `r` for a residual, on which the result may lie."""
    N, C, H, W = size
    x, weight = T(size, layout), T((K, C, 3, 3), std=(9 * max(1, C)) ** -0.5)
    bias = T((K,)) if "b" in extras else None
    residual = T((N, K, H, W), layout) if "r" in extras else None

    def packed(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
        return x, winograd_weight.plain(weight, tile), *rest

    kwargs = () if activation == "none" else (("activation", activation),)
    alias = (lambda *args: args[3]) if residual else None
    return Case(name, (x, weight, bias, residual), tags or ("small",), kwargs, alias, packed)


CASES = (
    _case("small", (2, 24, 6, 5), 16, extras="br", activation="silu"),
    _case("tile-4", (1, 24, 6, 9), 16, extras="br", activation="silu", tile=4),
    _case("relu", (1, 16, 4, 4), 16, extras="b", activation="relu"),
    _case("batch-3", (3, 16, 3, 3), 8, extras="r", layout="dense"),
    _case("one-pixel", (1, 16, 1, 1), 8, "small", "odd"),
    _case("one-pixel-4", (2, 16, 1, 1), 8, "small", "odd", tile=4),
    _case("odd-sizes", (1, 16, 5, 7), 8, "small", "odd", extras="b"),
    _case("odd-sizes-4", (1, 16, 5, 7), 8, "small", "odd", tile=4),
    _case("odd-channels", (1, 19, 3, 3), 3, "small", "odd", extras="br"),
    _case("odd-channels-4", (1, 5, 3, 3), 3, "small", "odd", tile=4),
    _case("blocks", (1, 40, 12, 12), 40, "small", "odd"),
    _case("nchw", (1, 16, 5, 4), 16, "small", "strided", layout="dense", extras="r"),
    _case("transposed", (1, 16, 4, 6), 16, "small", "strided", layout="transposed", extras="r"),
    _case("inside", (1, 16, 4, 4), 16, "small", "strided", layout="inside", extras="br"),
    _case("offset", (1, 16, 4, 4), 16, "small", "strided", layout="offset", extras="r", tile=4),
    _case("one-channel", (2, 1, 4, 6), 1, "small", "strided", layout="gapped", extras="r"),
    _case("empty-batch", (0, 16, 4, 4), 16, "small", "empty", extras="br"),
    _case("no-outputs", (1, 16, 4, 4), 0, "small", "empty"),
    _case("vae-512-128", (1, 512, 128, 128), 512, "real", extras="br"),
    _case("vae-512-128-4", (1, 512, 128, 128), 512, "real", extras="br", tile=4),
    _case("vae-128-512", (1, 128, 512, 512), 128, "real", extras="b", activation="silu"),
    _case("vae-128-512-4", (1, 128, 512, 512), 128, "real", tile=4),
    _case("vae-256-128", (1, 256, 256, 256), 128, "real"),
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
    reads=reads,
    fits=_conv.fits,
    allocate=_conv.channels_last,
)
def winograd_conv2d(
    x: Tensor,
    u: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """act(conv2d(x[N,C,H,W], 3 x 3, padding 1) + bias[K]) + residual -> [N,K,H,W], u being winograd_weight(weight)."""
    assert out is not None
    t = TAPS[u.shape[0]]
    launch(x, u, bias, residual, activation, _launch(x, t), out)
    return out


def launch(
    x: Tensor, u: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, table: Launch, out: Tensor
) -> None:
    """The kernel with any parameters."""
    x, u = _conv.dense(x), u.contiguous()
    bias = None if bias is None else _rows.inner(bias)
    residual = None if residual is None else _conv.dense(residual)
    N, C, H, W = x.shape
    K, t = u.shape[1], TAPS[u.shape[0]]
    tiles = N * _rows.cdiv(H, t - 2) * _rows.cdiv(W, t - 2)
    pixels = [v.permute(0, 2, 3, 1) for v in (x, out if residual is None else residual, out)]
    vec = 1 if K % 8 else _rows.vector(C, *pixels, u)
    steps = [step for v in pixels for step in _rows.steps(v, vec)]
    _kernel[(_rows.cdiv(tiles, table.TILES) * _rows.cdiv(K, table.KB),)](
        x,
        u,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        tiles,
        H,
        W,
        C // vec,
        K // vec,
        *steps,
        **_constexprs(t, table, vec, bias is not None, residual is not None, activation),
        num_warps=table.num_warps,
        num_stages=table.num_stages,
        enable_fp_fusion=True,
    )
