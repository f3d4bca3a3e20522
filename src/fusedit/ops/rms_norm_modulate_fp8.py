"""RMSNorm with weight and scale, then e4m3 rows for a product, in one pass.

    n[b,s,c] = x[b,s,c] / sqrt(mean_c x[b,s,:]^2 + eps) * weight[c] * (1 + scale[b,c])
    n[b,s,c] ~ q[b,s,c] * s[b,s]                   as ops/_fp8.py says; length[b,s] is the L2 norm of q[b,s,:] * s[b,s]

B batch, S tokens, C channels. x fp16, bf16 or fp32; weight and scale any of them, None leaves the factor out; q e4m3, s
and length fp32. Norm, s and codes are made of one row that lies in registers, in fp32; n is rounded once, to e4m3.
Bytes: x read, codes written, (1 + itemsize) S C B, the vectors, and 8 a row. FLOPs: about 9 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small.
Source: rms_norm_modulate, and row-wise quantisation as scaled products take it (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedit.ops import _check, _fp8
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.rms_norm_modulate import _kernel, accept, run
from fusedit.ops.rms_norm_modulate import plain as plain_norm
from fusedit.ops.rms_norm_modulate import reference as norm_reference

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> Rows:
    return _fp8.ideal(norm_reference(x, weight, scale, eps))


def plain(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Rows | None = None
) -> Rows:
    x, weight, scale = wide(x, weight, scale)
    return cast(Rows, _fp8.delivered(_fp8.quantized(plain_norm(x, weight, scale, eps)), x, out))


def check(x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5) -> tuple[torch.Size, ...]:
    accept("rms_norm_modulate_fp8", x, weight, scale, eps)
    _check.filled("rms_norm_modulate_fp8", "x", x)
    return _fp8.shapes(x)


def cost(x: Tensor, weight: Tensor | None, scale: Tensor | None, *_: Any, **__: Any) -> Cost:
    read = x.nbytes + sum(t.nbytes for t in (weight, scale) if t is not None)
    flops = x.numel() * (7 + (weight is not None) + (scale is not None))
    return Cost(read + x.numel() + 8 * x[..., 0].numel(), flops)


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "out_ptr", {"WEIGHT": True, "SCALE": True, "QUANT": True}, C=3840)


_X, _W, _V = (2, 5, 96), (96,), (2, 96)
CASES = (
    Case("small", (T((2, 5, 64)), T((64,)), T((2, 64)))),
    Case("no-weight", (T((1, 7, 64)), None, T((1, 64)))),
    Case("no-scale", (T((2, 7, 64)), T((64,)), None)),
    Case("bare", (T((1, 7, 64)), None, None)),
    Case("eps", (T((1, 3, 64), std=1e-3), T((64,)), T((1, 64))), kwargs=(("eps", 1e-2),)),
    Case("zeros", (T((1, 3, 64), std=0.0), T((64,)), T((1, 64)))),
    Case("odd-channels", (T((2, 3, 75)), T((75,)), T((2, 75))), ("small", "odd")),
    Case("wide", (T((1, 3, 2560)), T((2560,)), T((1, 2560)))),
    Case("sliced", (T(_X, "sliced"), T(_W), T(_V, "sliced")), ("small", "strided")),
    Case("joint", (T(_X, "joint"), T(_W), T(_V)), ("small", "strided")),
    Case("offset", (T(_X, "offset"), T(_W, "offset"), T(_V)), ("small", "strided")),
    Case("transposed", (T(_X, "transposed"), T(_W, "gapped"), T(_V, "transposed")), ("small", "strided")),
    Case("fp32-weight", (T(_X), T(_W, dtype=torch.float32), T(_V)), ("small", "mixed")),
    Case("empty-tokens", (T((2, 0, 64)), T((64,)), T((2, 64))), ("small", "empty")),
    Case("z-image", (T((1, 4320, 3840)), T((3840,)), T((1, 3840))), ("real",)),
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
    dtypes=_fp8.ROWS,
    slack=_fp8.SLACK,
    mixed=True,
)
def rms_norm_modulate_fp8(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, eps: float = 1e-5, *, out: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS(x[B,S,C]) * weight[C] * (1 + scale[B,C]) -> (q e4m3 [B,S,C], s [B,S], length [B,S]), fp32; n = q * s."""
    assert out is not None
    run(x, weight, scale, eps, *out)
    return out
