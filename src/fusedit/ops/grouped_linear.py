"""Many linear layers of one input in one launch, or their results from a table that was made before.

    y[r, o_l + n] = table[j, r, o_l + n]                            for the last j with keys[j, r, :] = key[r, :]
    y[r, o_l + n] = bias_l[n] + sum_k x[r, k] weight_l[n, k]        where there is no such j
    y[r, o_l + n] = bias_l[n] + scale_l[n] sum_k x[r, k] weight_l[n, k]     the same, where scales are given
    hit[r]        = 1 where there is such a j, else 0

R rows, K inputs, L layers with N_l outputs each, o_l = N_0 + ... + N_(l-1), N their sum; Q numbers a key, J entries of
the table. x, weights, biases, table, y and hit fp16, bf16 or fp32, one dtype; keys fp32. Weights are dense rows. With
scales (fp32), weights are e4m3: half the bytes, multiplied as they are in the dtype of x, which holds every code.
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
from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _fp8, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._grouped_kernel import BLOCK, addresses, grouped
from fusedit.ops._grouped_kernel import places as places_of
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor
ENTRIES: Final = 32
"""Entries of a table at most."""


def reference(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
    scales: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    x, table = wide(x, table)
    factors = [1.0] * len(weights) if scales is None else scales
    y = torch.cat([x @ wide(w).T * s + wide(b) for w, b, s in zip(weights, biases, factors, strict=True)], dim=1)
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
    scales: list[Tensor] | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    N = sum(w.shape[0] for w in weights)
    y, hit = (x.new_empty(x.shape[0], N), x.new_empty(x.shape[0])) if out is None else out
    same = None if key is None or keys is None else (keys == key).all(2)
    if same is None or table is None or not bool(same.any(0).all()):
        for place, part in enumerate(torch.split(y, [w.shape[0] for w in weights], dim=1)):
            layer = (weights[place], biases[place])
            part.copy_(F.linear(x, *layer) if scales is None else _scaled(x, *layer, scales[place]))
    hit.zero_()
    if same is not None and table is not None:
        for entry, values in zip(same, table, strict=True):
            y[entry] = values[entry]
            hit[entry] = 1
    return y, hit


def _scaled(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """One layer at a time in fp32: in fp16 the sums of codes could overflow before they are scaled."""
    x, weight, bias, scale = wide(x, weight, bias, scale)
    return torch.addcmul(bias, F.linear(x, weight), scale)


def check(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
    scales: list[Tensor] | None = None,
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
        if scales is None:
            _check.activation(name, f"weights[{place}]", w, "NK")
        else:
            _check.fp8(name, f"weights[{place}]", w, "NK")
        _check.like(name, f"weights[{place}]", w, x, (w.shape[0], K), w.dtype if scales is not None else None)
        _check.like(name, f"biases[{place}]", b, x, (w.shape[0],))
        if not (w.is_contiguous() and b.is_contiguous()):
            raise OpError(f"{name}: weights[{place}] and its bias must be contiguous")
        N += w.shape[0]
    if scales is not None:
        _check.tensors(name, "scales", scales)
        if len(scales) != len(weights):
            raise OpError(f"{name}: needs as many scales as weights, {len(weights)}, not {len(scales)}")
        for place, (w, s) in enumerate(zip(weights, scales, strict=True)):
            _check.like(name, f"scales[{place}]", s, x, (w.shape[0],), torch.float32)
            if not s.is_contiguous():
                raise OpError(f"{name}: scales[{place}] must be contiguous")
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
    scales: list[Tensor] | None = None,
) -> Cost:
    R, K = x.shape
    N = sum(w.shape[0] for w in weights)
    written = R * (N + 1) * x.element_size()
    if key is not None and keys is not None and table is not None:
        return Cost(key.nbytes + keys.nbytes + R * N * x.element_size() + written, keys.numel())
    return Cost(sum(t.nbytes for t in (*weights, *biases, *(scales or ()))) + x.nbytes + written, 2 * R * K * N)


def _constexprs(dtype: torch.dtype, vec: int, codes: bool) -> dict[str, Any]:
    step = 32 if dtype.itemsize == 4 else 128 if codes and vec > 1 else 64  # 128 bytes of a row; byte by byte it spills
    return {"ROWS": 16, "ENTRIES": ENTRIES, "BLOCK": BLOCK, "STEP": step, "VEC": vec, "CODES": codes}


def builds() -> list[Build]:
    made = []
    for name, dtype, vec, codes in (
        ("bf16", torch.bfloat16, 8, False),
        ("bf16-unaligned", torch.bfloat16, 1, False),
        ("fp32", torch.float32, 4, False),
        ("e4m3-bf16", torch.bfloat16, 16, True),
        ("e4m3-unaligned", torch.bfloat16, 1, True),
    ):
        types: dict[str, str] = dict.fromkeys(("x_ptr", "table_ptr", "out_ptr", "hit_ptr"), _rows.POINTERS[dtype])
        types |= {"address_ptr": "*i64", "place_ptr": "*i32", "key_ptr": "*fp32", "keys_ptr": "*fp32"}
        least = _fp8.CAPABILITY if codes else 0
        made.append(Build.of(name, grouped, types, _constexprs(dtype, vec, codes), 4, capability=least))
    return made


def limit(x: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> str:
    if _triton.INTERPRETING and x.dtype is torch.bfloat16:  # it would multiply the bit patterns, as whole numbers
        return "triton's interpreter cannot multiply bfloat16"
    if x.shape[0] > 16 * 65535:
        return f"{x.shape[0]} rows are more than {16 * 65535}"
    return _fp8.limit(x) if weights[0].dtype is _fp8.E4M3 else ""


def reads(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    key: Tensor | None = None,
    keys: Tensor | None = None,
    table: Tensor | None = None,
    scales: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    known = (t for t in (key, keys, table) if t is not None)
    return x[:0], x[:0], x, *weights, *biases, *known, *(scales or ())  # no result may lie on any of them


def fits(t: Tensor) -> bool:
    return t.ndim == 1 or t.stride(-1) == 1


def _layers(x: Tensor, *parts: Tensor) -> tuple[Any, ...]:
    half = len(parts) // 2
    return x, list(parts[:half]), list(parts[half:])


def _coded(x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, s0: Tensor, s1: Tensor, *table: Tensor) -> Any:
    """The last row of x is the last entry of the table, where there is one."""
    if not table:
        return x, [w0, w1], [b0, b1], None, None, None, [s0, s1]
    keys, values = table
    key = torch.cat([keys[0, :-1] + 1, keys[-1, -1:]])
    return x, [w0, w1], [b0, b1], key, keys, values, [s0, s1]


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


def _codes(R: int, K: int, N: tuple[int, int], x: str = "dense", J: int = 0) -> tuple[Any, ...]:
    weights = (T((n, K), dtype=_fp8.E4M3, std=100.0) for n in N)
    scales = (T((n,), dtype=torch.float32, fill="positive", std=0.01 * K**-0.5) for n in N)
    entries = (T((J, R, 2), dtype=torch.float32), T((J, R, sum(N)))) if J else ()
    return (T((R, K), x), *weights, *(T((n,)) for n in N), *scales, *entries)


CASES = (
    Case("small", _args(2, 64, (128, 256), table=False), packed=_layers),
    Case("some-known", _args(3, 64, (128, 256)), packed=_with_table),
    Case("all-known", _args(3, 64, (128, 256)), packed=_all_known),
    Case("odd", _args(3, 50, (70, 131)), ("small", "odd"), packed=_with_table),
    Case("many-rows", _args(19, 40, (30, 20)), ("small", "odd"), packed=_with_table),
    Case("strided", _args(3, 64, (128, 96), "sliced"), ("small", "strided"), packed=_with_table),
    Case("gapped", _args(3, 64, (128, 96), "gapped"), ("small", "strided"), packed=_with_table),
    Case("codes", _codes(2, 64, (128, 256)), packed=_coded),
    Case("codes-table", _codes(3, 160, (128, 256), J=3), packed=_coded),
    Case("codes-odd", _codes(3, 50, (70, 131), "sliced"), ("small", "odd"), packed=_coded),
    Case("empty", _args(0, 64, (128, 96), table=False), ("small", "empty"), packed=_layers),
    Case("flux", _args(1, 3072, (18432, 9216), table=False), ("real",), packed=_layers),
    Case("flux-table", _args(2, 3072, (18432, 9216)), ("real",), packed=_all_known),
    Case("flux-codes", _codes(1, 3072, (18432, 9216)), ("real",), packed=_coded),
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
    scales: list[Tensor] | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """x[R,K] through every layer (weights[l] [N_l,K], biases[l] [N_l]) -> (y [R,N], hit [R]).

    With scales[l] [N_l] (fp32), weights are e4m3.
    key [R,Q], keys [J,R,Q] (fp32) and table [J,R,N]: rows whose key is among the keys come from the table.
    """
    assert out is not None
    x = _rows.inner(x)
    R, K = x.shape
    y, hit = out
    J, Q = (0, 0) if keys is None else (keys.shape[0], keys.shape[2])
    places = places_of(tuple(w.shape[0] for w in weights), x.device)
    nothing = places.view(torch.float32)  # a pointer of the right type for what is not read
    key, keys = (nothing if t is None else t.contiguous() for t in (key, keys))
    table = x if table is None else table.contiguous()
    factors = [0] * len(weights) if scales is None else [t.data_ptr() for t in scales]
    layers = zip(weights, biases, factors, strict=True)
    pointers = tuple(part for w, b, s in layers for part in (w.data_ptr(), b.data_ptr(), s))
    vec = _rows.vector(K, *weights, x)
    constexprs = _constexprs(x.dtype, vec, scales is not None)
    grouped[(places.shape[0], _rows.cdiv(R, constexprs["ROWS"]))](
        x,
        addresses(pointers, x.device),
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
