"""Gated residual, the LayerNorm and modulation of the next branch, then e4m3 rows for its product, in one pass.

    r[b,s,c] = x[b,s,c] + gate[b,c] * y[b,s,c]
    n[b,s,c] = (r[b,s,c] - mean_c r[b,s,:]) / sqrt(var_c r[b,s,:] + eps) * (1 + scale[b,c]) + shift[b,c]
    n[b,s,c] ~ q[b,s,c] * s[b,s]                   as ops/_fp8.py says; length[b,s] is the L2 norm of q[b,s,:] * s[b,s]

B batch, S tokens, C channels. x, y, r fp16, bf16 or fp32; gate, scale, shift any of them; q e4m3, s and length fp32.
All in fp32 in registers; n is made of the r before rounding, and is rounded once, to e4m3.
Bytes: 3 B S C itemsize (x, y read, r written), B S C of codes, the vectors, and 8 a row. FLOPs: about 14 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small; r is not.
Source: gated_residual_layer_norm and layer_norm_modulate_fp8.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedit.ops import _check, _fp8
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.gated_residual_layer_norm import _args, _kernel, accept, run
from fusedit.ops.layer_norm_modulate import plain as plain_norm
from fusedit.ops.layer_norm_modulate import reference as norm_reference

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Rows:
    x, y, gate = wide(x, y, gate)
    r = x + gate[:, None] * y
    return r, *_fp8.ideal(norm_reference(r, scale, shift, eps))


def plain(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, *, out: Rows | None = None
) -> Rows:
    kept, y, gate, scale, shift = wide(x, y, gate, scale, shift)
    r = torch.addcmul(kept, y, gate[:, None])
    return cast(Rows, _fp8.delivered((r, *_fp8.quantized(plain_norm(r, scale, shift, eps))), x, out))


def check(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[torch.Size, ...]:
    accept("gated_residual_layer_norm_fp8", x, y, gate, scale, shift, eps)
    _check.filled("gated_residual_layer_norm_fp8", "x", x)
    return x.shape, *_fp8.shapes(x)


def cost(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, *_: Any, **__: Any) -> Cost:
    vectors = gate.nbytes + scale.nbytes + shift.nbytes
    return Cost(2 * x.nbytes + y.nbytes + x.numel() + vectors + 8 * x[..., 0].numel(), 14 * x.numel())


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "n_ptr", {"QUANT": True})


def _onto(x: Tensor, *_: Tensor) -> Rows:
    return x, *_fp8.unwritten(x)


CASES = (
    Case("small", _args((2, 5, 64)), alias=_onto),
    Case("on-y", _args((2, 5, 64)), ("small", "alias"), alias=lambda *given: _onto(given[1])),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd"), alias=_onto),
    Case("wide", _args((1, 3, 2304))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("joint", _args((2, 5, 96), "joint", "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("offset", _args((2, 5, 96), "offset", "dense"), ("small", "strided"), alias=_onto),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed", "gapped"), ("small", "strided")),
    Case(
        "fp32-vectors",
        (T((2, 5, 96)), T((2, 5, 96)), *(T((2, 96), dtype=torch.float32),) * 3),
        ("small", "mixed"),
    ),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("flux-image", _args((1, 4096, 3072), "dense", "sliced"), ("real",), alias=_onto),
    Case("flux", _args((1, 4608, 3072)), ("real",), alias=_onto),
)


@op(
    exactness="lossy",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    limit=_fp8.row_limit,
    dtypes=(None, *_fp8.ROWS),
    slack=(1e-6, *_fp8.SLACK),
    mixed=True,
)
def gated_residual_layer_norm_fp8(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r = x + gate * y, which may lie on x or y, and LN(r) * (1 + scale) + shift as e4m3 rows
    -> (r [B,S,C], q e4m3 [B,S,C], s [B,S], length [B,S])."""
    assert out is not None
    run(x, y, gate, scale, shift, eps, *out)
    return out
