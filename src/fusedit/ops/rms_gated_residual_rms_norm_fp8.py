"""RMSNorm of a branch, tanh gate, addition to the stream, the next RMSNorm and scale, then e4m3 rows, in one pass.

    r[b,s,c] = x[b,s,c] + tanh(gate[b,c]) * y[b,s,c] / sqrt(mean_c y[b,s,:]^2 + eps) * y_weight[c]
    n[b,s,c] = r[b,s,c] / sqrt(mean_c r[b,s,:]^2 + eps) * next_weight[c] * (1 + next_scale[b,c])
    n[b,s,c] ~ q[b,s,c] * s[b,s]                   as ops/_fp8.py says; length[b,s] is the L2 norm of q[b,s,:] * s[b,s]

B batch, S tokens, C channels. x, y, r fp16, bf16 or fp32; the vectors any of them; gate None: plain addition;
next_scale None: no scale; q e4m3, s and length fp32. All in fp32 in registers; n is made of the r before rounding, and
is rounded once, to e4m3.
Bytes: 3 B S C itemsize (x, y read, r written), B S C of codes, the vectors, and 8 a row. FLOPs: about 15 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small; r is not.
Source: rms_gated_residual_rms_norm and rms_norm_modulate_fp8.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedit.ops import _check, _fp8
from fusedit.ops._build import Build
from fusedit.ops._cases import Case
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.rms_gated_residual import plain as plain_residual
from fusedit.ops.rms_gated_residual import reference as residual_reference
from fusedit.ops.rms_gated_residual_rms_norm import _args, _kernel, accept, run
from fusedit.ops.rms_norm_modulate import plain as plain_norm
from fusedit.ops.rms_norm_modulate import reference as norm_reference

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
) -> Rows:
    r = residual_reference(x, y, y_weight, gate, eps)
    return r, *_fp8.ideal(norm_reference(r, next_weight, next_scale, eps))


def plain(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
    *,
    out: Rows | None = None,
) -> Rows:
    kept, y, y_weight, gate, next_weight, next_scale = wide(x, y, y_weight, gate, next_weight, next_scale)
    r = plain_residual(kept, y, y_weight, gate, eps)
    return cast(Rows, _fp8.delivered((r, *_fp8.quantized(plain_norm(r, next_weight, next_scale, eps))), x, out))


def check(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
) -> tuple[torch.Size, ...]:
    accept("rms_gated_residual_rms_norm_fp8", x, y, y_weight, gate, next_weight, next_scale, eps)
    _check.filled("rms_gated_residual_rms_norm_fp8", "x", x)
    return x.shape, *_fp8.shapes(x)


def cost(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    *_: Any,
    **__: Any,
) -> Cost:
    vectors = sum(t.nbytes for t in (y_weight, gate, next_weight, next_scale) if t is not None)
    flops = x.numel() * (13 + (gate is not None) + (next_scale is not None))
    return Cost(2 * x.nbytes + y.nbytes + x.numel() + vectors + 8 * x[..., 0].numel(), flops)


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "n_ptr", {"GATE": True, "SCALE": True, "QUANT": True}, C=3840)


def _onto(x: Tensor, *_: Tensor) -> Rows:
    return x, *_fp8.unwritten(x)


CASES = (
    Case("small", _args((2, 5, 64)), alias=_onto),
    Case("no-gate", _args((2, 5, 64), gate=False)),
    Case("no-scale", _args((2, 5, 64), scale=False)),
    Case("bare", _args((2, 5, 64), gate=False, scale=False), alias=_onto),
    Case("on-y", _args((2, 5, 64)), ("small", "alias"), alias=lambda *given: _onto(given[1])),
    Case("odd-channels", _args((2, 3, 75)), ("small", "odd"), alias=_onto),
    Case("wide", _args((1, 3, 2560))),
    Case("sliced", _args((2, 5, 96), "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("joint", _args((2, 5, 96), "joint", "sliced", "sliced"), ("small", "strided"), alias=_onto),
    Case("offset", _args((2, 5, 96), "offset"), ("small", "strided"), alias=_onto),
    Case("transposed", _args((2, 5, 96), "transposed", "transposed", "gapped"), ("small", "strided")),
    Case("empty-tokens", _args((2, 0, 64)), ("small", "empty")),
    Case("z-image", _args((1, 4320, 3840)), ("real",), alias=_onto),
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
def rms_gated_residual_rms_norm_fp8(
    x: Tensor,
    y: Tensor,
    y_weight: Tensor,
    gate: Tensor | None,
    next_weight: Tensor,
    next_scale: Tensor | None,
    eps: float = 1e-5,
    *,
    out: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r = x + tanh(gate) * RMS(y) * y_weight, which may lie on x or y, and RMS(r) * next_weight * (1 + next_scale) as
    e4m3 rows -> (r [B,S,C], q e4m3 [B,S,C], s [B,S], length [B,S])."""
    assert out is not None
    run(x, y, y_weight, gate, next_weight, next_scale, eps, *out)
    return out
