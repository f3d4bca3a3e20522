"""Many linear layers of one input in one launch, or their results from a table that was made before.

    y[r, o_l + n] = table[j, r, o_l + n]                            for the last j with keys[j, r, :] = key[r, :]
    y[r, o_l + n] = bias_l[n] + sum_k x[r, k] weight_l[n, k]        where there is no such j
    hit[r]        = 1 where there is such a j, else 0

R rows, K inputs, L layers with N_l outputs each, o_l = N_0 + ... + N_(l-1), N their sum; Q numbers a key, J entries of
the table. x, weights, biases, table, y and hit fp16, bf16 or fp32, one dtype; keys fp32. Weights are dense rows.
The products run on tensor cores with fp32 accumulation, 16 rows of x at a time; a row does not depend on the others, so
a table that this op has made holds the bits that it would make again. Whether a row is in the table is decided on the
device: the caller needs to know no key, and cannot be wrong about one.
What it is for: the modulation of all blocks of a diffusion transformer. FLUX.1-dev reads 6.5 GB of weights for it a
step, 1.9 of 125 ms on an H200, and the scheduler knows the time steps when a run starts.
Bytes: the weights and R (K + N) itemsize; with a table, which is there to be hit, 2 R N itemsize.
FLOPs: 2 R K N, or the comparisons.
Exactness: reordered; the library rounds the same sums in another order.
Source: AdaLN (Peebles and Xie 2023) in FLUX and Z-Image: one linear layer a block on the same conditioning vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._triton import kernel, tl
from fusedit.ops._values import wide

Tensor = torch.Tensor
BLOCK: Final = 128
"""Outputs of one program."""
ENTRIES: Final = 32
"""Entries of a table at most."""


def reference(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x, table = wide(x, table)
    y = torch.cat([x @ wide(w).T + wide(b) for w, b in zip(weights, biases, strict=True)], dim=1)
    hit = x.new_zeros(x.shape[0])
    if key is not None and keys is not None and table is not None:
        for entry, values in zip(keys, table, strict=True):
            same = (entry == key).all(1)
            y = torch.where(same[:, None], values, y)
            hit = torch.where(same, 1.0, hit)
    return y, hit


def plain(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    N = sum(w.shape[0] for w in weights)
    y, hit = (x.new_empty(x.shape[0], N), x.new_empty(x.shape[0])) if out is None else out
    same = None if key is None or keys is None else (keys == key).all(2)
    if same is None or table is None or not bool(same.any(0).all()):
        for part, w, b in zip(torch.split(y, [w.shape[0] for w in weights], dim=1), weights, biases, strict=True):
            part.copy_(F.linear(x, w, b))
    hit.zero_()
    if same is not None and table is not None:
        for entry, values in zip(same, table, strict=True):
            y[entry] = values[entry]
            hit[entry] = 1
    return y, hit


def check(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Sequence[int], Sequence[int]]:
    name = "grouped_linear"
    _check.activation(name, "x", x, "RK")
    R, K = x.shape
    _check.tensors(name, "weights", weights)
    _check.tensors(name, "biases", biases)
    if not weights or len(weights) != len(biases):
        raise OpError(f"{name}: needs as many weights as biases and at least one, not {len(weights)} and {len(biases)}")
    N = 0
    for place, (w, b) in enumerate(zip(weights, biases, strict=True)):
        _check.activation(name, f"weights[{place}]", w, "NK")
        _check.like(name, f"weights[{place}]", w, x, (w.shape[0], K))
        _check.like(name, f"biases[{place}]", b, x, (w.shape[0],))
        if not (w.is_contiguous() and b.is_contiguous()):
            raise OpError(f"{name}: weights[{place}] and its bias must be contiguous")
        N += w.shape[0]
    given = [t is not None for t in (key, keys, table)]
    if any(given) and not all(given):
        raise OpError(f"{name}: key, keys and table are given together or not at all")
    if key is not None and keys is not None and table is not None:
        _check.activation(name, "key", key, "RQ")
        _check.activation(name, "keys", keys, "JRQ")
        J, Q = keys.shape[0], key.shape[-1]
        for label, t, shape in (("key", key, (R, Q)), ("keys", keys, (J, R, Q))):
            if t.dtype is not torch.float32 or tuple(t.shape) != shape or t.device != x.device:
                raise OpError(f"{name}: {label} must be float32{list(shape)} on {x.device}, not {_check.show(t)}")
        if J > ENTRIES:
            raise OpError(f"{name}: a table has at most {ENTRIES} entries, not {J}")
        _check.like(name, "table", table, x, (J, R, N))
    return (R, N), (R,)


def cost(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
) -> Cost:
    R, K = x.shape
    N = sum(w.shape[0] for w in weights)
    written = R * (N + 1) * x.element_size()
    if key is not None and keys is not None and table is not None:
        return Cost(key.nbytes + keys.nbytes + R * N * x.element_size() + written, keys.numel())
    return Cost(sum(t.nbytes for t in (*weights, *biases)) + x.nbytes + written, 2 * R * K * N)


@kernel
def _kernel(
    x_ptr: tl.tensor,
    address_ptr: tl.tensor,
    place_ptr: tl.tensor,
    key_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hit_ptr: tl.tensor,
    R: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    J: tl.tensor,
    Q: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    hit_step: tl.tensor,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    # K and x_row come in units of VEC, so that the compiler can prove the alignment of every row.
    # place: for each program its layer, its first output within the layer, N of the layer, its first column of y.
    layer = tl.load(place_ptr + tl.program_id(0) * 4)
    first = tl.load(place_ptr + tl.program_id(0) * 4 + 1)
    width = tl.load(place_ptr + tl.program_id(0) * 4 + 2)
    column = tl.load(place_ptr + tl.program_id(0) * 4 + 3)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < R
    # All entries at once: one after the other, their loads alone took 0.3 ms on an H200.
    entries = tl.arange(0, ENTRIES)
    same = (entries < J)[:, None] & inside[None, :]
    for q in range(Q):
        at = (entries[:, None] * R + rows[None, :]) * Q + q
        known = tl.load(keys_ptr + at, mask=same, other=0.0)
        same = same & (known == tl.load(key_ptr + rows * Q + q, mask=inside, other=0.0)[None, :])
    found = tl.max(tl.where(same, entries[:, None], -1), axis=0)
    outputs = first + tl.arange(0, BLOCK)
    mask = inside[:, None] & (outputs < width)[None, :]
    columns = column + tl.arange(0, BLOCK)
    y = tl.zeros((ROWS, BLOCK), tl.float32)
    element = x_ptr.dtype.element_ty
    if tl.min(tl.where(inside, found, 0)) < 0:
        weight = tl.load(address_ptr + 2 * layer).to(tl.pointer_type(element))
        if VEC > 1:
            weight = tl.multiple_of(weight, 16)
        bias = tl.load(address_ptr + 2 * layer + 1).to(tl.pointer_type(element))
        x_at = x_ptr + (rows.to(tl.int64) * x_row * VEC)[:, None]
        w_at = weight + (outputs.to(tl.int64) * K * VEC)[None, :]
        for k in range(0, K * VEC, STEP):
            inputs = k + tl.arange(0, STEP)
            known = inputs < K * VEC
            x = tl.load(x_at + inputs[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            w = tl.load(w_at + inputs[:, None], mask=(outputs < width)[None, :] & known[:, None], other=0.0)
            if STEP == 64:
                y = tl.dot(x, w, y)
            else:
                # fp32: sums of STEP terms, then the sum of these, lose less than one chain of K. The condition, which
                # always holds where it matters, keeps the compiler from making the chain of it after all.
                part = tl.dot(x, w, input_precision="ieee")
                y += tl.where(inside[:, None], part, 0.0)
        y += tl.load(bias + outputs, mask=outputs < width, other=0.0).to(tl.float32)[None, :]
    at = (found.to(tl.int64) * R + rows)[:, None] * N + columns[None, :]
    kept = tl.load(table_ptr + at, mask=mask & (found >= 0)[:, None], other=0.0)
    y = tl.where((found >= 0)[:, None], kept.to(tl.float32), y)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :], y.to(element), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(hit_ptr + rows.to(tl.int64) * hit_step, tl.where(found >= 0, 1.0, 0.0).to(element), mask=inside)


@lru_cache(maxsize=64)
def _places(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [programs, 4] for `_kernel`."""
    made, column = [], 0
    for layer, width in enumerate(widths):
        made += [(layer, first, width, column + first) for first in range(0, width, BLOCK)]
        column += width
    return torch.tensor(made, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """The addresses of weights and biases, int64 [2 L]: what is kept is the key itself, so it cannot be stale."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _constexprs(dtype: torch.dtype, vec: int) -> dict[str, Any]:
    return {
        "ROWS": 16,
        "ENTRIES": ENTRIES,
        "BLOCK": BLOCK,
        "STEP": 64 if dtype.itemsize == 2 else 32,
        "VEC": vec,
    }


def builds() -> list[Build]:
    made = []
    for name, dtype, vec in (
        ("bf16", torch.bfloat16, 8),
        ("bf16-unaligned", torch.bfloat16, 1),
        ("fp32", torch.float32, 4),
    ):
        types: dict[str, str] = dict.fromkeys(("x_ptr", "table_ptr", "out_ptr", "hit_ptr"), _rows.POINTERS[dtype])
        types |= {"address_ptr": "*i64", "place_ptr": "*i32", "key_ptr": "*fp32", "keys_ptr": "*fp32"}
        made.append(Build.of(name, _kernel, types, _constexprs(dtype, vec), 4))
    return made


def limit(x: Tensor, *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:  # it would multiply the bit patterns, as whole numbers
        return "triton's interpreter cannot multiply bfloat16"
    return f"{x.shape[0]} rows are more than {16 * 65535}" if x.shape[0] > 16 * 65535 else ""


def reads(x: Tensor, weights: list[Tensor], biases: list[Tensor], *table: Tensor | None) -> tuple[Tensor, ...]:
    return x[:0], x[:0], x, *weights, *biases, *(t for t in table if t is not None)  # no result may lie on any of them


def fits(t: Tensor) -> bool:
    return t.ndim == 1 or t.stride(-1) == 1


def _layers(x: Tensor, *parts: Tensor) -> tuple[Any, ...]:
    half = len(parts) // 2
    return x, list(parts[:half]), list(parts[half:])


def _with_table(x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, keys: Tensor, table: Tensor) -> Any:
    """Row 0 is entry 1 of the table, row 1 none of it, row 2 (where there is one) entry 0."""
    key = torch.stack([keys[1, 0], keys[0, 1] + 1, *keys[0, 2:]])
    return x, [w0, w1], [b0, b1], key, keys, table


def _all_known(x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, keys: Tensor, table: Tensor) -> Any:
    return x, [w0, w1], [b0, b1], keys[-1].clone(), keys, table


def _args(R: int, K: int, N: tuple[int, int], x: str = "dense", J: int = 3, table: bool = True) -> tuple[Any, ...]:
    layers = (T((N[0], K), std=K**-0.5), T((N[1], K), std=K**-0.5), T((N[0],)), T((N[1],)))
    entries = (T((J, R, 2), dtype=torch.float32), T((J, R, sum(N)))) if table else ()
    return (T((R, K), x), *layers, *entries)


CASES = (
    Case("small", _args(2, 64, (128, 256), table=False), packed=_layers),
    Case("some-known", _args(3, 64, (128, 256)), packed=_with_table),
    Case("all-known", _args(3, 64, (128, 256)), packed=_all_known),
    Case("odd", _args(3, 50, (70, 131)), ("small", "odd"), packed=_with_table),
    Case("many-rows", _args(19, 40, (30, 20)), ("small", "odd"), packed=_with_table),
    Case("strided", _args(3, 64, (128, 96), "sliced"), ("small", "strided"), packed=_with_table),
    Case("gapped", _args(3, 64, (128, 96), "gapped"), ("small", "strided"), packed=_with_table),
    Case("empty", _args(0, 64, (128, 96), table=False), ("small", "empty"), packed=_layers),
    Case("flux", _args(1, 3072, (18432, 9216), table=False), ("real",), packed=_layers),
    Case("flux-table", _args(2, 3072, (18432, 9216)), ("real",), packed=_all_known),
    Case("z-image", _args(4, 256, (15360, 15360), table=False), ("real",), packed=_layers),
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
def grouped_linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """x[R,K] through every layer (weights[l] [N_l,K], biases[l] [N_l]) -> (y [R,N], hit [R]).

    key [R,Q], keys [J,R,Q] (fp32) and table [J,R,N]: rows whose key is among the keys come from the table.
    """
    assert out is not None
    x = _rows.inner(x)
    R, K = x.shape
    y, hit = out
    J, Q = (0, 0) if keys is None else (keys.shape[0], keys.shape[2])
    places = _places(tuple(w.shape[0] for w in weights), x.device)
    nothing = places.view(torch.float32)  # a pointer of the right type for what is not read
    key, keys = (nothing if t is None else t.contiguous() for t in (key, keys))
    table = x if table is None else table.contiguous()
    pointers = tuple(t.data_ptr() for pair in zip(weights, biases, strict=True) for t in pair)
    vec = _rows.vector(K, x, *weights)
    constexprs = _constexprs(x.dtype, vec)
    _kernel[(places.shape[0], _rows.cdiv(R, constexprs["ROWS"]))](
        x,
        _addresses(pointers, x.device),
        places,
        key,
        keys,
        table,
        y,
        hit,
        R,
        K // vec,
        y.shape[1],
        J,
        Q,
        x.stride(0) // vec if R > 1 else 0,
        y.stride(0) if R > 1 else 0,
        hit.stride(0) if R > 1 else 0,
        **constexprs,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
