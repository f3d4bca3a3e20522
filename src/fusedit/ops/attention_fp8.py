"""Attention with both products in 8 bits: keys without their mean, one scale for a row of q and a block of k and v.

    o[b,s,h,:] = sum_t softmax_t(scale * q[b,s,h,:] . k[b,t,h,:]) v[b,t,h,:]     over all t

B batch, S queries, T keys, H heads, D head size; scale None: D^-0.5. q, k, v any strides (slices of a packed buffer);
the result is dense [B,S,H,D], so that flatten(2) copies nothing. What is rounded: q, k, v and the weights to e4m3, each
after what _attention_fp8.py takes off; products, maxima and sums in 32 bits. Weights are taken by a straight
line between powers of two (LINEAR in _attention_fp8_weights.py).
Relative L2 against fp64: 0.059 of independent gaussian q, k and v, where nothing averages out; 0.029 to 0.045 of keys
and values with a mean, neighbours alike or one channel eight times the others. With q and k in int8, which takes 8 %
longer: 0.046 and 0.011 to 0.021. bf16: 0.002.

On CUDA of compute capability 9.0 two kernels serve bf16 and heads of 128: codes and scales in one pass, then attention.
An item with a mask, other head sizes and other devices are served by `attention` in the dtype of q, with the reason; on
a CPU the emulation of _attention_fp8_plain.py is, where there is no mask.
Bytes: q, k, v read, o written, and codes of half their size written and read. FLOPs: 4 B H S T D. Exactness: lossy.
Source: SageAttention 2 (Zhang et al. 2024) for int8 with smoothed keys, FlashAttention-3 (Shah et al. 2024) for the
order of v's columns and the turns, Schraudolph 1999 for the straight line.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _attention_fp8, _attention_fp8_plain, _rows
from fusedit.ops._attention_fp8 import Variant
from fusedit.ops._attention_fp8_weights import LINEAR
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops.attention import attention, checked, lies_well

Tensor = torch.Tensor
VARIANT: Final = Variant(left=LINEAR, right=LINEAR, turns=False)
"""The fastest on an H200, all passes included: 0.351 ms at 1,24,4608,128 where cuDNN takes 0.396, and 0.364 against
0.446 sustained; with int8 logits 0.378. LINEAR loses little beside codes of three bits: 0.059 instead of 0.057."""


def reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    o: Tensor = attention.reference(q, k, v, key_mask, scale)
    return o


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if key_mask is not None:
        return attention.unchecked(q, k, v, key_mask, scale, out=out)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if k.shape[1] == 0:
        return o.zero_()
    made = _attention_fp8_plain.quantise(q, k, v, _scale(q, scale), int8=VARIANT.int8)
    _attention_fp8_plain.attend(made, k.shape[1], o, VARIANT)
    return o


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def check(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> tuple[torch.Size]:
    return checked("attention_fp8", q, k, v, key_mask, scale)


def cost(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Cost:
    B, S, H, D = q.shape
    codes = q.numel() + k.numel() + v.numel()
    return Cost(2 * q.nbytes + k.nbytes + v.nbytes + 2 * codes, 4 * B * H * S * k.shape[1] * D)


def choose(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Backend:
    """`hopper`, or why not: then `attention` where there is a mask or a GPU, else `plain`."""
    del k, v, scale
    reason = "takes no mask" if key_mask is not None else _attention_fp8.reason(q)
    if not reason:
        return Backend("hopper", "")
    return Backend("attention" if key_mask is not None or q.is_cuda else "plain", reason)


_Q, _K = (2, 5, 4, 16), (2, 7, 4, 16)


def _packed(qkv: Tensor, *rest: Any) -> tuple[Any, ...]:
    return (*qkv.unbind(2), *rest)


CASES = (
    Case("small", (T(_Q), T(_K), T(_K)), alias=lambda q, *_: q),
    Case("packed", (T((2, 9, 3, 4, 16)),), ("small", "strided"), packed=_packed),
    Case("masked", (T(_Q), T(_K), T(_K), T((2, 7), fill="mask"))),
    Case("scale", (T(_Q), T(_K), T(_K), None, -0.5)),
    Case("blocks", (T((1, 130, 2, 24)), T((1, 260, 2, 24)), T((1, 260, 2, 24))), ("small", "odd")),
    Case("one-key", (T((1, 3, 2, 15)), T((1, 1, 2, 15)), T((1, 1, 2, 15))), ("small", "odd")),
    Case("transposed", (T(_Q, "transposed"), T(_K, "gapped"), T(_K, "offset")), ("small", "strided")),
    Case("empty-queries", (T((2, 0, 4, 16)), T(_K), T(_K)), ("small", "empty")),
    Case("flux", (T((1, 4608, 3, 24, 128)),), ("real",), packed=_packed),
    Case("z-image", (T((1, 4352, 3, 30, 128)),), ("real",), packed=_packed),
    Case("ends-inside", (T((2, 1001, 3, 128)), T((2, 777, 3, 128)), T((2, 777, 3, 128))), ("real", "odd")),
    Case("one-block", (T((3, 60, 5, 128)), T((3, 77, 5, 128)), T((3, 77, 5, 128))), ("real", "odd")),
    Case(
        "lying",
        (T((1, 300, 2, 128), "transposed"), T((1, 300, 2, 128), "offset"), T((1, 300, 2, 128), "gapped"), None, 0.2),
        ("real",),
    ),
    Case("real-masked", (T((2, 300, 3, 2, 128)), T((2, 300), fill="mask")), ("real",), packed=_packed),
)


def builds() -> list[Build]:
    return _attention_fp8.builds(VARIANT)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
)
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v -> [B,S,H,D] dense, in 8 bits; scale None: D^-0.5; with key_mask[B,T] in q's dtype."""
    name = choose(q, k, v, key_mask).name
    attention_fp8.ran[name] += 1
    if name == "attention":
        return attention(q, k, v, key_mask, scale, out=out)
    if name == "plain" or k.shape[1] == 0:
        return plain(q, k, v, None, scale, out=out)
    direct = out is not None and out.stride(3) == 1 and out.stride(2) == q.shape[3] and _rows.vector(8, out) > 1
    o = out if direct and out is not None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    made = _attention_fp8.quantise(lies_well(q), lies_well(k), lies_well(v), _scale(q, scale), int8=VARIANT.int8)
    _attention_fp8.attend(made, k.shape[1], o, VARIANT)
    return o if out is None or o is out else out.copy_(o)
