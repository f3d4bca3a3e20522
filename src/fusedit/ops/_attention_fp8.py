"""8-bit queries, keys and values for attention, and the launch of the kernel that takes them.

    q8[s, :] = round(log2(e) scale q[s, :] / a[s])          a[s]: a row's largest / its code's, and one fp32 a row
    k8[t, :] = round((k[t, :] - kc) / c[block])             kc[d] near the mean over tokens; one c for 128 keys
    v8[d, t] = e4m3((v[t, d] - vc[d]) / e[block])           vc[d] likewise; e a power of two, one for 128 keys
    o[s, d]  = sum_t softmax_t(a[s] c[t] q8[s] . k8[t]) e[t] v8[d, t] + vc[d]

Taking any vector off all keys leaves the softmax as it is, and weights add up to 1, so kc and vc are accounted for
exactly, whatever they are: they are the means of up to 64 tokens spread over the sequence, so that no pass over all of
them comes first. q8 and k8 are int8 (codes up to 127, to the nearest) or e4m3 (up to 448).
One program takes 128 tokens of one head of q, k or v. A row or block that holds an inf or NaN gets a scale that is NaN.
Tokens that fill up the last block have codes 0. Bytes: q, k, v read, half of it written.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch

from fusedit.ops import _attention_fp8_kernel, _gluon, _rows, _triton
from fusedit.ops._attention_fp8_kernel import HEAD, KEYS, QUERIES
from fusedit.ops._attention_fp8_weights import EXACT
from fusedit.ops._build import Build
from fusedit.ops._fp8 import E4M3, E4M3_MAX, e4m3
from fusedit.ops._rows import cdiv
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
SAMPLES: Final = 64
INT8_MAX: Final = 127.0
TINY: Final = 2.0**-91
_VEC: Final = 8
_CONSTEXPRS: Final = {"D": HEAD, "BLOCK": KEYS, "SAMPLES": SAMPLES, "VEC": _VEC}


class Variant(NamedTuple):
    """How the kernel computes: see _attention_fp8_kernel.py, and _attention_fp8_weights.py for `left` and `right`."""

    int8: bool = False
    left: int = EXACT
    right: int = EXACT
    turns: bool = True
    apart: bool = True
    stages: int = 4


class Quantised(NamedTuple):
    """q8 [B H rows, 128, D], k8 [B H blocks, 128, D], v8 [B H, D, blocks 128] e4m3 with the keys in `order`; in fp32
    q_scale [B H, rows 128] (log2(e) times the softmax's in it), scales [B H, blocks, 2] of k and v, mean [B H, D]."""

    q8: Tensor
    k8: Tensor
    v8: Tensor
    q_scale: Tensor
    scales: Tensor
    mean: Tensor


def order(device: torch.device | str = "cpu") -> Tensor:
    """Key of each column of v8, for 16 keys; all others repeat it.

    Lane c of four has the weights of keys 2c, 2c + 1, 2c + 8, 2c + 9 in a row of an accumulator, and those of columns
    4c to 4c + 3 in one of an 8-bit operand: with keys in this order they are the same, and move nowhere.
    """
    column = torch.arange(16, device=device)
    return column % 4 // 2 * 8 + column // 4 * 2 + column % 2


@kernel
def _scale(amax: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """amax / LARGEST; 1 for what counts as zeros, NaN for inf and NaN."""
    s = tl.where(amax < float("inf"), tl.div_rn(amax, LARGEST), float("nan"))
    return tl.where(amax < 4.0389678347315804e-28, 1.0, s)  # TINY


@kernel
def _largest(x: tl.tensor) -> tl.tensor:
    """Largest magnitude of each row. As whole numbers NaN is above inf and inf above any number: none is lost."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)


@kernel
def _codes(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    if dtype == tl.int8:
        # NaN is not converted: its scale shows it.
        x = tl.where(x == x, tl.clamp(tl.floor(x + 0.5), -127.0, 127.0), 0.0).to(tl.int8)
    else:
        x = e4m3(x)
    return x


@kernel
def _tokens(
    x_ptr: tl.tensor, token: tl.tensor, T: tl.tensor, row: tl.tensor, D: tl.constexpr, VEC: tl.constexpr
) -> Any:
    """Some tokens of one head in fp32, zeros from T on."""
    at = x_ptr + (token.to(tl.int64) * row * VEC)[:, None] + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(token < T)[:, None], other=0.0).to(tl.float32)


@kernel
def _centred(
    x_ptr: tl.tensor,
    token: tl.tensor,
    T: tl.tensor,
    row: tl.tensor,
    D: tl.constexpr,
    SAMPLES: tl.constexpr,
    VEC: tl.constexpr,
) -> Any:
    """These tokens without the mean of some, the same ones in every program of a head; that mean; the largest."""
    some = (tl.arange(0, SAMPLES).to(tl.int64) * T // SAMPLES).to(tl.int32)
    mean = tl.sum(_tokens(x_ptr, some, T, row, D, VEC), axis=0) * (1.0 / SAMPLES)
    x = _tokens(x_ptr, token, T, row, D, VEC)
    x = tl.where((token < T)[:, None], x - mean[None, :], 0.0)
    amax = tl.max(_largest(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    return x, mean, amax


@kernel
def _store(to_ptr: tl.tensor, codes: tl.tensor, row: tl.tensor) -> None:
    """A tile of codes, rows of `row` times 128 bytes."""
    at = to_ptr + (tl.arange(0, codes.shape[0]).to(tl.int64) * row * 128)[:, None]
    tl.store(at + tl.arange(0, codes.shape[1])[None, :], codes)


@kernel
def _quantise(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q8_ptr: tl.tensor,
    k8_ptr: tl.tensor,
    v8_ptr: tl.tensor,
    q_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    H: tl.tensor,
    S: tl.tensor,
    T: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    q_batch: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    factor: tl.tensor,
    LARGEST: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Strides in units of VEC elements; `factor` goes into q."""
    block, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    place = tl.arange(0, BLOCK)
    token = block * BLOCK + place
    q_to, k_to = head.to(tl.int64) * rows + block, head.to(tl.int64) * blocks + block
    if which == 0:
        if block < rows:
            q_ptr = tl.multiple_of(q_ptr + (b * q_batch + h * q_head) * VEC, 16)
            q = _tokens(q_ptr, token, S, q_row, D, VEC) * factor
            a = _scale(_largest(q), LARGEST)
            tl.store(q_scale_ptr + q_to * BLOCK + place, a)
            q8_ptr = tl.multiple_of(q8_ptr + q_to * BLOCK * D, 16)
            _store(q8_ptr, _codes(q * tl.div_rn(1.0, a)[:, None], q8_ptr.dtype.element_ty), 1)
    elif block < blocks:
        if which == 1:
            k_ptr = tl.multiple_of(k_ptr + (b * k_batch + h * k_head) * VEC, 16)
            k, _, amax = _centred(k_ptr, token, T, k_row, D, SAMPLES, VEC)
            c = _scale(amax, LARGEST)
            tl.store(scale_ptr + k_to * 2, c)
            k8_ptr = tl.multiple_of(k8_ptr + k_to * BLOCK * D, 16)
            _store(k8_ptr, _codes(k * tl.div_rn(1.0, c), k8_ptr.dtype.element_ty), 1)
        else:
            v_ptr = tl.multiple_of(v_ptr + (b * v_batch + h * v_head) * VEC, 16)
            key = token // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2  # as `order`
            v, mean, amax = _centred(v_ptr, key, T, v_row, D, SAMPLES, VEC)
            e = _scale(amax, 448.0)
            # The next power of two, NaN as it is: exact in the kernel's quotients.
            up = ((e.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
            e = tl.where(e == e, up, e)
            tl.store(scale_ptr + k_to * 2 + 1, e)
            if block == 0:
                tl.store(mean_ptr + head * D + tl.arange(0, D), mean)
            v8_ptr = tl.multiple_of(v8_ptr + (head.to(tl.int64) * D * blocks + block) * BLOCK, 16)
            _store(v8_ptr, tl.trans(e4m3(v * tl.div_rn(1.0, e))), blocks)


def quantise(q: Tensor, k: Tensor, v: Tensor, scale: float, *, int8: bool) -> Quantised:
    """q[B,S,H,D], k and v [B,T,H,D] in bf16 or fp16, rows dense on 16 bytes; D = 128, S and T above 0."""
    (B, S, H, _), T = q.shape, k.shape[1]
    rows, blocks = cdiv(S, QUERIES), cdiv(T, KEYS)
    code, device = torch.int8 if int8 else E4M3, q.device
    q8 = torch.empty((B * H * rows, QUERIES, HEAD), dtype=code, device=device)
    k8 = torch.empty((B * H * blocks, KEYS, HEAD), dtype=code, device=device)
    v8 = torch.empty((B * H, HEAD, blocks * KEYS), dtype=E4M3, device=device)
    q_scale = torch.empty((B * H, rows * QUERIES), dtype=torch.float32, device=device)
    scales = torch.empty((B * H, blocks, 2), dtype=torch.float32, device=device)
    mean = torch.empty((B * H, HEAD), dtype=torch.float32, device=device)
    strides = [s for t in (q, k, v) for s in _rows.steps(t, _VEC)]
    _quantise[(max(rows, blocks), B * H, 3)](
        *(q, k, v, q8, k8, v8, q_scale, scales, mean),
        *(H, S, T, rows, blocks, *strides, scale * math.log2(math.e)),
        LARGEST=INT8_MAX if int8 else E4M3_MAX,
        **_CONSTEXPRS,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return Quantised(q8, k8, v8, q_scale, scales, mean)


def attend(made: Quantised, T: int, o: Tensor, variant: Variant) -> None:
    """Attention of what `quantise` made of T keys, into o [B,S,H,D] bf16: heads side by side, rows on 16 bytes."""
    B, S, H, _ = o.shape
    rows, blocks = cdiv(S, QUERIES), cdiv(T, KEYS)
    programs = min(_rows.multiprocessors(o.device.index or 0), B * H * rows)
    o_batch, o_row, _ = _rows.steps(o, _VEC)
    _attention_fp8_kernel.attention[(programs,)](
        _descriptor(made.q8.flatten(0, 1), QUERIES // 2),
        _descriptor(made.k8.flatten(0, 1), KEYS),
        _descriptor(made.v8.flatten(0, 1), HEAD),
        *(made.q_scale, made.scales, made.mean, o),
        *(B * H, H, S, rows, blocks, T - (blocks - 1) * KEYS, o_batch, o_row, programs),
        LEFT=variant.left,
        RIGHT=variant.right,
        TURNS=variant.turns,
        APART=variant.apart,
        STAGES=variant.stages,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _descriptor(t: Tensor, rows: int) -> Any:
    block = [rows, 128]
    element = _gluon.gl.int8 if t.dtype is torch.int8 else _gluon.gl.float8e4nv
    layout = _gluon.gl.NVMMASharedLayout.get_default_for(block, element)
    return _gluon.descriptor_class(t, list(t.shape), list(t.stride()), block, layout)


def reason(q: Tensor) -> str:
    """Why the kernels cannot take queries q[B,S,H,D] at any length, or nothing."""
    if q.device.type != "cuda":
        return f"no kernels for device type {q.device.type}"
    if _gluon.reason:
        return _gluon.reason
    if _triton.capability(q.device.index or 0) != (9, 0):
        return f"written for compute capability 9.0, not {_triton.capability(q.device.index or 0)}"
    if q.dtype is not torch.bfloat16:
        return f"takes bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] != HEAD:
        return f"takes heads of {HEAD}, not {q.shape[-1]}"
    if q.shape[0] * q.shape[2] > 65535:
        return f"{q.shape[0]} times {q.shape[2]} heads are more than 65535"
    return _triton.status(q.device, q.dtype)[1]


def builds(variant: Variant) -> list[Build]:
    code = "i8" if variant.int8 else "fp8e4nv"
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16")
    types |= dict.fromkeys(("q_scale_ptr", "scale_ptr", "mean_ptr"), "*fp32")
    types |= {"q8_ptr": f"*{code}", "k8_ptr": f"*{code}", "v8_ptr": "*fp8e4nv", "factor": "fp32"}
    constexprs = {**_CONSTEXPRS, "LARGEST": INT8_MAX if variant.int8 else E4M3_MAX}
    made = [Build.of(f"codes-{code}", _quantise, types, constexprs, 8, "no-spill")]
    if _gluon.reason:
        return made
    element = _gluon.gl.int8 if variant.int8 else _gluon.gl.float8e4nv
    for name, rows, kind, written in (
        ("q_d", QUERIES // 2, element, code),
        ("k_d", KEYS, element, code),
        ("v_d", HEAD, _gluon.gl.float8e4nv, "fp8e4nv"),
    ):
        layout = _gluon.gl.NVMMASharedLayout.get_default_for([rows, 128], kind)
        types[name] = f"tensordesc<{written}[{rows},128],{layout!r}>"
    flags = variant._asdict()
    del flags["int8"]
    flags = {name.upper(): value for name, value in flags.items()}
    return [*made, Build.of("hopper", _attention_fp8_kernel.attention, types, flags, 4, "descriptors")]
