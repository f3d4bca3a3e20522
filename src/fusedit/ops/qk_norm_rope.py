"""RMSNorm of queries and keys over the head, then rotary embedding, from the packed QKV, in one pass.

    n[b,s,h,d]   = x[b,s,h,d] / sqrt(mean_d x[b,s,h,:]^2 + eps) * weight[d]        x = q or k
    y[b,s,h,2i]   = n[b,s,h,2i] cos[b,s,i] - n[b,s,h,2i+1] sin[b,s,i]
    y[b,s,h,2i+1] = n[b,s,h,2i+1] cos[b,s,i] + n[b,s,h,2i] sin[b,s,i]

B batch, S tokens, H heads, D head size (even, up to 256), i < D/2. qkv[B,S,3,H,D] and the results fp16, bf16 or fp32;
weights any of them, or None for a norm without affine; cos and sin fp32 [B or 1, S, D/2]. Norm and rotation in fp32
between one load and one store, rounded once. In place over the packed buffer is the fast path: attention then reads
q, k, v where they lie.
Bytes: q and k read and written, 4 B S H D itemsize, and the tables 4 B S D. FLOPs: about 7 an element of q and k.
Exactness: reordered; stock rounds after the norm, after the weight and after the rotation, this once.
Source: RoFormer (Su et al. 2021) on interleaved pairs, after the per-head RMSNorm of FLUX and Z-Image.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedit.errors import OpError
from fusedit.ops import _check, _rows
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._rows import plain_rms
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    qkv, q_weight, k_weight, cos, sin = wide(qkv, q_weight, k_weight, cos, sin)
    c, s = cos[:, :, None], sin[:, :, None]
    made = []
    for x, weight in ((qkv[:, :, 0], q_weight), (qkv[:, :, 1], k_weight)):
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        n = n if weight is None else n * weight
        x0, x1 = n[..., 0::2], n[..., 1::2]
        made.append(torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2))
    return made[0], made[1]


def plain(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    turn = torch.complex(*(wide(cos, sin) if cos.dtype is not sin.dtype else (cos, sin))).unsqueeze(2)
    if out is not None and _in_place(qkv, out) and qkv.dtype is cos.dtype:
        _turn_in_place(qkv[:, :, :2], q_weight, k_weight, turn.unsqueeze(2), eps)
        return out
    made = []
    for place, weight in enumerate((q_weight, k_weight)):
        x = qkv[:, :, place]
        n = plain_rms(x, weight, eps).contiguous()  # in fp32, and never x itself
        pairs = torch.view_as_complex(n.view(*n.shape[:-1], n.shape[-1] // 2, 2))
        if pairs.dtype is turn.dtype:
            pairs.mul_(turn)
        else:
            n = torch.view_as_real(pairs * turn).flatten(-2)
        made.append(n.to(x.dtype) if out is None else out[place].copy_(n))
    return made[0], made[1]


def _in_place(qkv: Tensor, out: tuple[Tensor, Tensor]) -> bool:
    """Whether both results lie on q and k, in memory that complex numbers can be read from."""
    even = qkv.stride(-1) == 1 and not any(s % 2 for s in (*qkv.stride()[:-1], qkv.storage_offset()))
    return even and all(_check.same_place(t, qkv[:, :, place]) for place, t in enumerate(out))


def _turn_in_place(x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, turn: Tensor, eps: float) -> None:
    """q and k together, in their own memory: no allocation of their size."""
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    x.mul_(inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
    if q_weight is not None and k_weight is not None:
        x.mul_(torch.stack((q_weight, k_weight)).unsqueeze(1))
    elif q_weight is not None:
        x[:, :, 0].mul_(q_weight)
    elif k_weight is not None:
        x[:, :, 1].mul_(k_weight)
    torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(turn)


def check(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[torch.Size, torch.Size]:
    name = "qk_norm_rope"
    if not isinstance(qkv, Tensor) or qkv.ndim != 5 or qkv.shape[2] != 3:
        raise OpError(f"{name}: qkv must be [B, S, 3, H, D], not {_check.show(qkv)}")
    _check.activation(name, "qkv", qkv, "BS3HD")
    B, S, _three, H, D = qkv.shape
    if D % 2 or D > 256:
        raise OpError(f"{name}: the head size D must be even and at most 256, not {D} (qkv {_check.show(qkv)})")
    for label, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _check.vector(name, label, weight, qkv, (D,), "D")
    for label, table in (("cos", cos), ("sin", sin)):
        rows = table.shape[0] if isinstance(table, Tensor) and table.ndim == 3 and table.shape[0] in (1, B) else B
        _check.vector(name, label, table, qkv, (rows, S, D // 2), ("B or 1", "S", "D/2"))
        if table.dtype not in (torch.float32, torch.float64):
            raise OpError(f"{name}: {label} must be float32, not {_check.show(table)}")
    if cos.shape != sin.shape:
        raise OpError(f"{name}: cos {_check.show(cos)} and sin {_check.show(sin)} must have one shape")
    _check.eps(name, eps)
    return torch.Size((B, S, H, D)), torch.Size((B, S, H, D))


def reads(qkv: Tensor, *rest: Tensor | None, **more: Tensor | None) -> tuple[Tensor, ...]:
    others = (t for t in (*rest, *more.values()) if isinstance(t, Tensor))
    return (qkv[:, :, 0], qkv[:, :, 1], *others)


def cost(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *_: Any, **__: Any
) -> Cost:
    part = qkv.nbytes // 3 * 2
    small = sum(t.nbytes for t in (q_weight, k_weight, cos, sin) if t is not None)
    return Cost(2 * part + small, qkv.numel() // 3 * 2 * 7)


@kernel
def _load(
    base_ptr: tl.tensor,
    offset: tl.tensor,
    head_step: tl.tensor,
    heads: tl.tensor,
    cols: tl.tensor,
    mask: tl.tensor,
    VEC: tl.constexpr,
) -> tl.tensor:
    base = base_ptr + offset * VEC
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    return tl.load(base + (heads * head_step * VEC)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@kernel
def _turn(
    x: tl.tensor,
    mask: tl.tensor,
    weight_ptr: tl.tensor,
    cols: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    VEC: tl.constexpr,
    WEIGHT: tl.constexpr,
) -> tl.tensor:
    n = x * tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + eps)[:, None]
    if WEIGHT:  # a whole tile of addresses: each thread gets its own columns in 16 bytes, nothing moves between threads
        at = tl.broadcast_to(weight_ptr + cols[None, :], (HEADS, BLOCK))
        if VEC > 1:
            at = tl.multiple_of(at, (1, 16))
        n *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(n, (HEADS, BLOCK // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS, BLOCK))


@kernel
def _store(
    base_ptr: tl.tensor,
    offset: tl.tensor,
    head_step: tl.tensor,
    heads: tl.tensor,
    cols: tl.tensor,
    mask: tl.tensor,
    y: tl.tensor,
    VEC: tl.constexpr,
) -> None:
    base = base_ptr + offset * VEC
    if VEC > 1:
        base = tl.multiple_of(base, 16)
    tl.store(base + (heads * head_step * VEC)[:, None] + cols[None, :], y.to(base_ptr.dtype.element_ty), mask=mask)


@kernel
def _kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    H: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    cos_batch: tl.tensor,
    cos_row: tl.tensor,
    sin_batch: tl.tensor,
    sin_row: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    VEC: tl.constexpr,
    TABLE: tl.constexpr,
    Q_WEIGHT: tl.constexpr,
    K_WEIGHT: tl.constexpr,
) -> None:
    s = tl.program_id(0).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = (heads < H)[:, None] & (cols < D)[None, :]
    # Both loads before any store: the results may lie on the inputs.
    q = _load(q_ptr, b * x_batch + s * x_row, x_head, heads, cols, mask, VEC)
    k = _load(k_ptr, b * x_batch + s * x_row, x_head, heads, cols, mask, VEC)
    pairs = tl.arange(0, BLOCK // 2)
    cos_at = cos_ptr + (b * cos_batch + s * cos_row) * TABLE + pairs
    sin_at = sin_ptr + (b * sin_batch + s * sin_row) * TABLE + pairs
    if TABLE > 1:
        cos_at, sin_at = tl.multiple_of(cos_at, 16), tl.multiple_of(sin_at, 16)
    cos = tl.load(cos_at, mask=pairs < D // 2, other=0.0)[None, :]
    sin = tl.load(sin_at, mask=pairs < D // 2, other=0.0)[None, :]
    q = _turn(q, mask, q_weight_ptr, cols, cos, sin, eps, D, BLOCK, HEADS, VEC, Q_WEIGHT)
    k = _turn(k, mask, k_weight_ptr, cols, cos, sin, eps, D, BLOCK, HEADS, VEC, K_WEIGHT)
    _store(q_out_ptr, b * q_batch + s * q_row, q_head, heads, cols, mask, q, VEC)
    _store(k_out_ptr, b * k_batch + s * k_row, k_head, heads, cols, mask, k, VEC)


def _tile(H: int, D: int) -> tuple[int, int]:
    """(BLOCK, HEADS): 1024 elements of q and as many of k in a program of 4 warps, 16 bytes a thread in bf16."""
    block = max(16, _rows.power_of_2(D))
    return block, min(max(1, 1024 // block), _rows.power_of_2(H))


def builds() -> list[Build]:
    made = []
    for name, dtype, D, aligned in (
        ("bf16", torch.bfloat16, 128, True),
        ("bf16-unaligned", torch.bfloat16, 128, False),
        ("fp32", torch.float32, 128, True),
        ("fp16-d56", torch.float16, 56, True),
    ):
        block, group = _tile(24, D)
        types: dict[str, str] = {p: _rows.POINTERS[dtype] for p in _kernel.arg_names if p.endswith("_ptr")}
        types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32"}
        constexprs: dict[str, Any] = {
            "D": D,
            "BLOCK": block,
            "HEADS": group,
            "VEC": 16 // dtype.itemsize if aligned else 1,
        }
        constexprs |= {"TABLE": 4 if aligned else 1, "Q_WEIGHT": True, "K_WEIGHT": True}
        traits = (["vector"] if aligned else []) + ["no-spill"]
        made.append(Build.of(name, _kernel, types, constexprs, 4, *traits))
    return made


def limit(qkv: Tensor, *_: Any, **__: Any) -> str:
    return f"batch {qkv.shape[0]} is larger than 65535" if qkv.shape[0] > 65535 else ""


def fits(t: Tensor) -> bool:
    return t.stride(-1) == 1


def _args(
    B: int, S: int, H: int, D: int, layout: str = "dense", tables: int = 1, weights: bool = True, table: str = "dense"
) -> tuple[Any, ...]:
    w = T((D,)) if weights else None
    cos = T((tables, S, D // 2), table, torch.float32, "cos")
    sin = T((tables, S, D // 2), table, torch.float32, "sin")
    return (T((B, S, 3, H, D), layout), w, w, cos, sin)


def _onto(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return qkv[:, :, 0], qkv[:, :, 1]


CASES = (
    Case("small", _args(2, 2, 4, 16), alias=_onto),
    Case("tables-per-item", _args(2, 2, 2, 32, tables=2), alias=_onto),
    Case("no-weights", _args(1, 2, 4, 32, weights=False), alias=_onto),
    Case("one-weight", (*_args(1, 2, 4, 32)[:2], None, *_args(1, 2, 4, 32)[3:])),
    Case("d56", _args(1, 2, 3, 56), ("small", "odd"), alias=_onto),
    Case("d72", _args(1, 2, 3, 72), ("small", "odd"), alias=_onto),
    Case("d96", _args(1, 2, 9, 96), ("small", "odd"), alias=_onto),
    Case("d6", _args(1, 2, 3, 6), ("small", "odd"), alias=_onto),
    Case("d256", _args(1, 1, 5, 256), alias=_onto),
    Case("heads-30", _args(1, 1, 30, 64), alias=_onto),
    Case("joint", _args(2, 2, 3, 16, "joint"), ("small", "strided"), alias=_onto),
    Case("offset", _args(1, 3, 3, 16, "offset"), ("small", "strided"), alias=_onto),
    Case("sliced", _args(1, 2, 3, 16, "sliced"), ("small", "strided"), alias=_onto),
    Case("transposed", _args(1, 2, 3, 16, "transposed"), ("small", "strided"), alias=_onto),
    Case("strided-tables", _args(2, 2, 3, 16, tables=2, table="gapped"), ("small", "strided")),
    Case(
        "fp32-weights",
        (*_args(1, 2, 3, 16)[:1], *(T((16,), dtype=torch.float32),) * 2, *_args(1, 2, 3, 16)[3:]),
        ("small", "mixed"),
    ),
    Case("empty-tokens", _args(2, 0, 4, 16), ("small", "empty")),
    Case("flux", _args(1, 4608, 24, 128), ("real",), alias=_onto),
    Case("flux-image", _args(1, 4096, 24, 128, "joint"), ("real",), alias=_onto),
    Case("z-image", _args(1, 4320, 30, 128), ("real",), alias=_onto),
    Case("z-image-batch", _args(2, 1056, 30, 128, tables=2), ("real",), alias=_onto),
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
    fits=fits,
    mixed=True,
)
def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """rope(RMS(q) * q_weight), rope(RMS(k) * k_weight) of qkv[B,S,3,H,D] -> (q, k), each [B,S,H,D].

    `out` may be (qkv[:, :, 0], qkv[:, :, 1]): in place, the fast path.
    """
    assert out is not None
    B, S, _, H, D = qkv.shape
    qkv, cos, sin = _rows.inner(qkv), _rows.inner(cos), _rows.inner(sin)
    q, k = qkv[:, :, 0], qkv[:, :, 1]
    q_row = cos if q_weight is None else _rows.inner(q_weight)
    k_row = cos if k_weight is None else _rows.inner(k_weight)
    vec = _rows.vector(D, q, k, *out, q_row, k_row)
    table = _rows.vector(D // 2, cos, sin)
    block, heads = _tile(H, D)
    _kernel[(S, _rows.cdiv(H, heads), B)](
        q,
        k,
        q_row,
        k_row,
        cos,
        sin,
        *out,
        H,
        *_rows.steps(q, vec),
        *_rows.steps(cos, table),
        *_rows.steps(sin, table),
        *_rows.steps(out[0], vec),
        *_rows.steps(out[1], vec),
        eps,
        D=D,
        BLOCK=block,
        HEADS=heads,
        VEC=vec,
        TABLE=table,
        Q_WEIGHT=q_weight is not None,
        K_WEIGHT=k_weight is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
