"""LayerNorm and modulation, then e4m3 rows for a product, in one pass.

    n[b,s,c] = (x[b,s,c] - mean_c x[b,s,:]) / sqrt(var_c x[b,s,:] + eps) * (1 + scale[b,c]) + shift[b,c]
    n[b,s,c] ~ q[b,s,c] * s[b,s]                   as ops/_fp8.py says; length[b,s] is the L2 norm of q[b,s,:] * s[b,s]

B batch, S tokens, C channels. x fp16, bf16 or fp32; scale and shift any of them; q e4m3, s and length fp32. Norm, s and
codes are made of one row that lies in registers, in fp32; n is rounded once, to e4m3.
Bytes: x read, codes written, (1 + itemsize) S C B, the vectors, and 8 a row. FLOPs: about 12 an element.
Exactness: lossy; a code is off by up to 2^-4 of its value, or 2^-10 of s where it is small.
Source: layer_norm_modulate, and row-wise quantisation as scaled products take it (torch._scaled_mm).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedit.ops import _check, _fp8
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op
from fusedit.ops._values import wide
from fusedit.ops.layer_norm_modulate import _kernel, accept, run
from fusedit.ops.layer_norm_modulate import plain as plain_norm
from fusedit.ops.layer_norm_modulate import reference as norm_reference

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> Rows:
    return _fp8.ideal(norm_reference(x, scale, shift, eps))


def plain(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Rows | None = None) -> Rows:
    x, scale, shift = wide(x, scale, shift)
    return cast(Rows, _fp8.delivered(_fp8.quantized(plain_norm(x, scale, shift, eps)), x, out))


def check(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6) -> tuple[torch.Size, ...]:
    accept("layer_norm_modulate_fp8", x, scale, shift, eps)
    _check.filled("layer_norm_modulate_fp8", "x", x)
    return _fp8.shapes(x)


def cost(x: Tensor, scale: Tensor, shift: Tensor | None, *_: Any, **__: Any) -> Cost:
    read = x.nbytes + scale.nbytes + (0 if shift is None else shift.nbytes)
    return Cost(read + x.numel() + 8 * x[..., 0].numel(), x.numel() * (11 if shift is None else 12))


def builds() -> list[Build]:
    return _fp8.row_builds(_kernel, "out_ptr", {"SHIFT": True, "QUANT": True})


_X, _V = (2, 5, 96), (2, 96)
CASES = (
    Case("small", (T((2, 5, 64)), T((2, 64)), T((2, 64)))),
    Case("no-shift", (T((1, 7, 64)), T((1, 64)), None)),
    Case("eps", (T((1, 3, 64), std=1e-3), T((1, 64)), T((1, 64))), kwargs=(("eps", 1e-2),)),
    Case("mean-100", (T((1, 3, 256), mean=100.0), T((1, 256)), T((1, 256)))),
    Case("zeros", (T((1, 3, 64), std=0.0), T((1, 64)), None)),
    Case("odd-channels", (T((2, 3, 75)), T((2, 75)), T((2, 75))), ("small", "odd")),
    Case("one-channel", (T((1, 3, 1)), T((1, 1)), T((1, 1))), ("small", "odd")),
    Case("wide", (T((1, 3, 2304)), T((1, 2304)), T((1, 2304)))),
    Case("sliced", (T(_X, "sliced"), T(_V, "sliced"), T(_V, "sliced")), ("small", "strided")),
    Case("joint", (T(_X, "joint"), T(_V), T(_V)), ("small", "strided")),
    Case("offset", (T(_X, "offset"), T(_V, "offset"), T(_V)), ("small", "strided")),
    Case("transposed", (T(_X, "transposed"), T(_V, "transposed"), T(_V, "gapped")), ("small", "strided")),
    Case("fp32-vectors", (T(_X), T(_V, dtype=torch.float32), T(_V, dtype=torch.float32)), ("small", "mixed")),
    Case("empty-tokens", (T((2, 0, 64)), T((2, 64)), T((2, 64))), ("small", "empty")),
    Case("empty-batch", (T((0, 5, 64)), T((0, 64)), T((0, 64))), ("small", "empty")),
    Case("flux-joint", (T((1, 4608, 3072)), T((1, 3072)), T((1, 3072))), ("real",)),
    Case("flux-text", (T((2, 512, 3072)), T((2, 3072), "sliced"), T((2, 3072), "sliced")), ("real",)),
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
def layer_norm_modulate_fp8(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float = 1e-6, *, out: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """LN(x[B,S,C]) * (1 + scale[B,C]) + shift[B,C] -> (q e4m3 [B,S,C], s [B,S], length [B,S]), fp32; n = q * s."""
    assert out is not None
    run(x, scale, shift, eps, *out)
    return out
