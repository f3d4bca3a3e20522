"""A 3 x 3 convolution by Winograd's minimal filtering, in one kernel: transforms in fp32, products on tensor cores.

    y = act(bias + A^T [sum_c (B^T d_c B) * u_c] A) + residual,  for every tile of S x S outputs, of T x T inputs d

x[N, C, H, W], u[T T, K, C] of winograd_weight (T T = 16: S = 2, 36: S = 4), bias[K], residual and y [N, K, H, W], one
dtype: fp16, bf16 or fp32. Stride 1, zero padding 1. `act`: none, silu or relu. y is channels_last.
A program has a run of tiles and a block of K, and passes over C once for each row i of the transform: it forms row i of
B^T d B from 2 (S = 4: 3 or 4) of the T rows of each tile, rounds it to the dtype, multiplies it by u[T i + j], j < T,
into T accumulators, and adds these to the S S outputs. One pass with T T accumulators would read x half as often, but
registers would hold half the block, and each block transforms x anew. The passes are a loop at run time: unrolled,
their addresses spill.
Bytes: x, u, residual read, y written. FLOPs: those of a direct convolution, 18 N H W C K; the products do 4/9 of them
(S = 4: 1/4), the transforms some more, on the vector units.
Exactness: reordered, but u and B^T d B are rounded to the dtype, which a direct convolution does not do. Measured in
bf16: its error is 0.0017, that of S = 2 0.0042 (2.5 times), of S = 4 0.025 (15 times). So no exact plan uses this op;
it can be selected as an op. An infinity or NaN spoils its whole tile.
Measured on an H200 in bf16, from 512 channels at 128 x 128 to 128 at 1024 x 1024, in TFLOP/s of a direct convolution:
cuDNN 718 to 804, S = 2 185 to 207, S = 4 115 to 137, which wins nowhere (512 at 128 x 128: 0.101, 0.374, 0.575 ms).
The tensor cores do 92 at most; accumulators and addresses fill the registers (some 250 a thread, 8 warps an SM), too
few warps to hide that loads, transforms, shared memory and products wait for each other (counted, not profiled).
Source: Lavin and Gray 2015, Fast Algorithms for Convolutional Neural Networks, section 4; Winograd 1980.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _conv, _conv_epilogue, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._conv import activate
from fusedit.ops._op import Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide
from fusedit.ops.winograd_weight import A, B, flat, winograd_weight

Tensor = torch.Tensor
TILE: Final[Mapping[int, int]] = {16: 2, 36: 4}
"""S by the planes of u."""


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
    bias, residual = wide(bias, residual)
    y = _in_torch(x, u, bias, residual, activation)
    return (_conv.channels_last(x, y.shape) if out is None else out).copy_(y)


def _in_torch(x: Tensor, u: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """Products in the dtype of x, the rest in fp32 (fp64 for fp64); not rounded at the end."""
    s = TILE[u.shape[0]]
    t = s + 2
    (N, C, H, W), K = x.shape, u.shape[1]
    h, w = max(1, _rows.cdiv(H, s)), max(1, _rows.cdiv(W, s))
    d = F.pad(wide(x), (1, s * w - W + 1, 1, s * h - H + 1)).unfold(2, t, s).unfold(3, t, s)
    b, a = (d.new_tensor(matrix[s]) for matrix in (B, A))
    v = torch.einsum("ir,nchwrs,js->ijnhwc", b, d, b).to(x.dtype)
    m = wide(torch.bmm(v.reshape(t * t, N * h * w, C), u.mT)).view(t, t, N, h, w, K)
    y = torch.einsum("pi,ijnhwk,qj->nkhpwq", a, m, a).reshape(N, K, s * h, s * w)[:, :, :H, :W]
    return _conv_epilogue.in_torch(y, bias, residual, activation, None)


def check(
    x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> tuple[tuple[int, ...]]:
    _check.activation("winograd_conv2d", "x", x, "NCHW")
    _check.activation("winograd_conv2d", "u", u, "PKC")
    planes, K, _ = u.shape
    if planes not in (16, 36):  # no look-up: it may be symbolic
        raise OpError(f"winograd_conv2d: u must have 16 or 36 planes, of winograd_weight, not {_check.show(u)}")
    _check.like("winograd_conv2d", "u", u, x, (planes, K, x.shape[1]))
    shape = (x.shape[0], K, *x.shape[2:])
    _conv.check_epilogue("winograd_conv2d", x, K, bias, residual, shape, activation)
    return (shape,)


def cost(x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *_: Any, **__: Any) -> Cost:
    (N, C, H, W), K = x.shape, u.shape[1]
    moved = x.nbytes + u.nbytes + N * H * W * K * x.element_size()
    return Cost(moved + sum(t.nbytes for t in (bias, residual) if t is not None), 18 * N * H * W * C * K)


def reads(
    x: Tensor, u: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return x[:0] if residual is None else residual, x, u, *(() if bias is None else (bias,))  # may lie on the residual


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
    """Addresses of channel 0; steps are in units of VEC elements."""
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
    S: tl.constexpr,
    TILES: tl.constexpr,
    KB: tl.constexpr,
    CB: tl.constexpr,
    VEC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
) -> None:
    T: tl.constexpr = S + 2
    C, K = C * VEC, K * VEC
    blocks = tl.cdiv(K, KB)  # of one run of tiles side by side: they read the same x
    at = tl.program_id(0) // blocks * TILES + tl.arange(0, TILES)
    k = tl.program_id(0) % blocks * KB + tl.arange(0, KB)
    c = tl.arange(0, CB)
    n, y, x = at // (tl.cdiv(H, S) * tl.cdiv(W, S)), at // tl.cdiv(W, S) % tl.cdiv(H, S) * S, at % tl.cdiv(W, S) * S
    corner = _pixels(x_ptr, n, y - 1, x - 1, x_n, x_h, x_w, VEC)[:, None] + c[None, :]
    rows = u_ptr + k.to(tl.int64) * C
    if VEC > 1:
        rows = tl.multiple_of(rows, 16)
    rows = rows[:, None] + c[None, :]
    plane = K.to(tl.int64) * C
    down, right = x_h.to(tl.int64) * VEC, x_w.to(tl.int64) * VEC
    zero = tl.zeros((KB, TILES), tl.float32)  # u on the left: wgmma wants 64 rows there, and 16 tiles will do
    result: tl.tuple = (zero,) * (S * S)
    for i in tl.range(T):
        m: tl.tuple = (zero,) * T
        row: tl.tuple = ()
        factor: tl.tuple = ()
        for part in tl.static_range(S):
            row += (_entry(ROW, i, part, S, T),)
            factor += (_entry(FACTOR, i, part, S, T),)
        for first in tl.range(0, C, CB):
            inside = (c < C - first)[None, :]
            d: tl.tuple = ()
            for j in tl.static_range(T):
                there = (at < tiles) & (x + j >= 1) & (x + j <= W)
                total = 0.0
                for part in tl.static_range(S):
                    mask = (there & (y + row[part] >= 1) & (y + row[part] <= H))[:, None] & inside
                    loaded = tl.load(corner + (row[part] * down + j * right + first), mask=mask, other=0.0)
                    total += loaded.to(tl.float32) * factor[part]
                d += (total,)
            sums: tl.tuple = ()
            for j in tl.static_range(T):
                v = _mix(d, B, j, T).to(x_ptr.dtype.element_ty)
                mask = (k < K)[:, None] & inside
                u = tl.load(rows + ((i * T + j) * plane + first), mask=mask, other=0.0)
                sums += (tl.dot(u, v.T, m[j], input_precision="ieee"),)
            m = sums
        more: tl.tuple = ()
        for p in tl.static_range(S):
            f = _entry(A, i, p * T, 1, T)
            for q in tl.static_range(S):
                more += (result[p * S + q] + _mix(m, A, q, T) * f,)
        result = more
    bias = tl.zeros((KB,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    for p in tl.static_range(S):
        for q in tl.static_range(S):
            v = activate(result[p * S + q].T + bias[None, :], ACT)
            mask = ((at < tiles) & (y + p < H) & (x + q < W))[:, None] & (k < K)[None, :]
            if RESIDUAL:
                source = _pixels(residual_ptr, n, y + p, x + q, residual_n, residual_h, residual_w, VEC)
                v += tl.load(source[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            target = _pixels(out_ptr, n, y + p, x + q, out_n, out_h, out_w, VEC)
            tl.store(target[:, None] + k[None, :], v.to(out_ptr.dtype.element_ty), mask=mask)


class Launch(NamedTuple):
    """What a program takes at once: TILES by KB outputs (times S S), CB channels a step."""

    TILES: int
    KB: int
    CB: int
    num_warps: int
    num_stages: int


TABLE: Final[Mapping[str, Mapping[int, Launch]]] = {
    "half": {2: Launch(32, 64, 16, 4, 2), 4: Launch(8, 64, 16, 4, 2)},
    "hopper": {2: Launch(32, 64, 32, 4, 2), 4: Launch(16, 64, 64, 8, 2)},
    "unaligned": {2: Launch(16, 64, 16, 8, 2), 4: Launch(8, 64, 16, 8, 2)},
    "fp32": {2: Launch(16, 32, 16, 4, 3), 4: Launch(16, 16, 16, 8, 2)},
}
"""By what they are for (`half`: any chip; fp32 has no tensor cores) and by S. Only `hopper` is measured. None spills,
except fp32 with S = 4 by triton 3.6 on sm_100 (32 bytes). Without wgmma all warps lie along K, and a thread has as many
accumulators as TILES says: with S = 4, 16 spill.
"""


def _launch(x: Tensor, s: int, vec: int) -> Launch:
    if x.dtype is torch.float32:
        return TABLE["fp32"][s]
    hopper = x.is_cuda and _triton.capability(x.device.index or 0) == (9, 0)
    return TABLE["unaligned" if vec == 1 else "hopper" if hopper else "half"][s]


@cache
def _constexprs(s: int, table: Launch) -> Mapping[str, Any]:
    rows = [[(r, f) for r, f in enumerate(row) if f] for row in B[s]]
    for row in rows:  # 4 a - 5 b + c as 4 a - 4 b - b + c: as many terms in every row
        if len(row) < s:
            row[1:2] = [(row[1][0], -4.0), (row[1][0], row[1][1] + 4)]
    sparse = {"ROW": tuple(r for row in rows for r, _ in row), "FACTOR": flat([f for _, f in row] for row in rows)}
    block = {name: getattr(table, name) for name in ("TILES", "KB", "CB")}
    return {"B": flat(B[s]), "A": flat(A[s]), **sparse, "S": s, **block}


def builds() -> list[Build]:
    made = []
    for kind, tables in TABLE.items():
        for s, table in tables.items():
            name = f"f{s}-bf16" if kind == "half" else f"f{s}-{kind}"  # `bf16` at the end: compiled for every chip
            dtype = torch.float32 if kind == "fp32" else torch.bfloat16
            vec = 1 if kind == "unaligned" else 16 // dtype.itemsize
            types = {p: _rows.POINTERS[dtype] for p in _kernel.arg_names if p.endswith("_ptr")}
            constexprs = {**_constexprs(s, table), "VEC": vec, "BIAS": True, "RESIDUAL": True, "ACT": 1}
            warps, stages = table.num_warps, table.num_stages
            made.append(Build.of(name, _kernel, types, constexprs, warps, "no-spill", num_stages=stages))
    return made


def limit(x: Tensor, u: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:  # it would multiply the bit patterns, as whole numbers
        return "triton's interpreter cannot multiply bfloat16"
    (N, C, H, W), K = x.shape, u.shape[1]
    tiles = N * _rows.cdiv(H, 2) * _rows.cdiv(W, 2)
    many = max(tiles, C, K, H, W) > 2**31 - 2**10 or _rows.cdiv(tiles, 16) * _rows.cdiv(K, 16) >= 2**31
    return f"{N} images of {H} x {W} with {C} and {K} channels are too many" if many else ""


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
    """Weights for outputs near 1. `extras`: `b` for a bias, `r` a residual, on which (tile 2) the result may lie."""
    N, C, H, W = size
    x, weight = T(size, layout), T((K, C, 3, 3), std=(9 * C) ** -0.5)
    bias = T((K,)) if "b" in extras else None
    residual = T((N, K, H, W), layout) if "r" in extras else None

    def packed(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
        return x, winograd_weight.plain(weight, tile), *rest

    alias = (lambda *args: args[3]) if residual and tile == 2 else None
    return Case(name, (x, weight, bias, residual), tags or ("small",), (("activation", activation),), alias, packed)


CASES = (
    _case("small", (2, 24, 4, 5), 16, extras="br", activation="silu"),
    _case("tile-4", (1, 16, 5, 7), 16, extras="br", activation="relu", tile=4),
    _case("batch-3", (3, 16, 3, 3), 8, layout="dense", extras="r"),
    _case("one-pixel", (1, 16, 1, 1), 8, "small", "odd"),
    _case("odd-sizes", (1, 16, 5, 7), 8, "small", "odd", extras="b"),
    _case("odd-channels", (1, 19, 3, 3), 3, "small", "odd", extras="br"),
    _case("odd-channels-4", (2, 5, 1, 1), 3, "small", "odd", layout="offset", tile=4),
    _case("blocks", (1, 12, 3, 3), 72, "small", "odd"),
    _case("runs-of-tiles", (1, 16, 1, 67), 8, "small", "odd"),
    _case("transposed", (1, 16, 4, 6), 16, "small", "strided", layout="transposed", extras="r"),
    _case("inside", (1, 16, 4, 4), 16, "small", "strided", layout="inside", extras="br"),
    _case("one-channel", (2, 1, 4, 6), 1, "small", "strided", layout="gapped", extras="r"),
    _case("empty-batch", (0, 16, 4, 4), 16, "small", "empty", extras="br"),
    _case("vae-512-128", (1, 512, 128, 128), 512, "real", extras="br"),
    _case("vae-512-128-4", (1, 512, 128, 128), 512, "real", extras="br", tile=4),
    _case("vae-128-512", (1, 128, 512, 512), 128, "real", extras="b", activation="silu"),
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
    x, u, s = _conv.dense(x), u.contiguous(), TILE[u.shape[0]]
    residual = None if residual is None else _conv.dense(residual)
    (N, C, H, W), K = x.shape, u.shape[1]
    tiles = N * _rows.cdiv(H, s) * _rows.cdiv(W, s)
    pixels = [t.permute(0, 2, 3, 1) for t in (x, out if residual is None else residual, out)]
    vec = 1 if K % 8 else _rows.vector(C, *pixels, u)
    table = _launch(x, s, vec)
    _kernel[(_rows.cdiv(tiles, table.TILES) * _rows.cdiv(K, table.KB),)](
        x,
        u,
        x if bias is None else _rows.inner(bias),
        x if residual is None else residual,
        out,
        tiles,
        H,
        W,
        C // vec,
        K // vec,
        *(step for t in pixels for step in _rows.steps(t, vec)),
        **_constexprs(s, table),
        VEC=vec,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACT=_conv.ACTIVATIONS.index(activation),
        num_warps=table.num_warps,
        num_stages=table.num_stages,
        enable_fp_fusion=True,
    )
    return out
