"""Run by the tests in a process of its own: the kernels of attention's two products through the Triton interpreter."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interpreter import patch_once

from fusedit import ops
from fusedit.ops import _attention_products, _attention_scores, _triton
from fusedit.ops._verify import error

Tensor = torch.Tensor
NAN = float("nan")
KINDS = ("even", "large", "one-key", "rising")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(S: int, T: int, D: int, kind: str) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits have about a deviation of 1, of 150, one key far above, or rise along the keys."""
    q, k = numbers(S, D, seed=S), numbers(T, D, seed=T + 1)
    if kind == "large":
        q *= 150
    elif kind == "one-key":
        k[T // 2] = q[S // 2] * 12
    elif kind == "rising":
        q[:, 0], k[:, 0] = 20 * D**0.5, torch.linspace(-10, 10, T)
    return q, k


def scores(S: int, T: int, D: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Weights in fp32 (bf16 has its exponents), inside a larger buffer of NaN."""
    q, k = (t.to(dtype) for t in inputs(S, T, D, kind))
    scale = D**-0.5
    truth = (q.double() @ k.double().t() * scale).softmax(-1)
    room = -(-T // 8) * 8
    buffer = torch.full((S + 2, room + 16), NAN)
    p, tiles = buffer[1 : S + 1, 8 : T + 8], -(-T // _attention_scores.BN)
    levels, sums = torch.full((2, tiles, S), NAN)
    inverse = torch.full((S, 1), NAN)
    _attention_scores.scores(q, k, scale, p, levels, sums)
    most = float(p.max())
    before = p.clone()
    p_row = p.stride(0)
    own = torch.full((S, p_row), NAN)  # the second kernel may write up to the next row
    own[:, :T] = p
    p.fill_(NAN)
    outside = bool(buffer.isnan().all())
    p = own[:, :T]
    _attention_scores.level(p, levels, sums, inverse)
    per_key = (levels == levels.amax(0)).repeat_interleave(_attention_scores.BN, 0)[:T].t()
    return {
        "error": error(p * inverse, truth).largest,
        "most": most,
        "levels": sorted(set((levels / _attention_scores.STEP).flatten().tolist())),
        "outside": outside,
        "kept": bool((p == before)[per_key].all()),
    }


def exponentials(T: int) -> dict[str, Any]:
    x = torch.full((3, T + 24), NAN)[:, : -(-T // 8) * 8]
    x = torch.as_strided(x, (3, T), (-(-T // 8) * 8, 1))
    x.copy_(numbers(3, T, seed=T) * 40)
    y = torch.full((3, -(-T // 8) * 8 + 8), NAN)[:, :T]
    inverse = torch.full((3, 1), NAN)
    _attention_products.exponentials(x, 0.5, y, inverse)
    return {"error": error(y * inverse, (x.double() * 0.5).softmax(-1)).largest}


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """torch.mm with a result of another type, which torch has on CUDA alone."""
    made = a.to(out_dtype) @ b.to(out_dtype)
    return made if out is None else out.copy_(made)


def whole(reason: str, scale: float) -> dict[str, Any]:
    """Attention by either way: two items, two heads of a packed buffer, rounds that do not come out even."""
    q, k, v = numbers(2, 150, 3, 2, 264, seed=1).unbind(2)
    k, v = k[:, :131], v[:, :131]
    with (
        mock.patch.object(torch, "mm", product),
        mock.patch.object(_attention_products, "_QUERIES", 64),
        mock.patch.object(_attention_scores, "reason", return_value=reason),
    ):
        o = _attention_products.products(q, k, v, scale)
    return {"error": error(o, ops.attention.reference(q.double(), k.double(), v.double(), None, scale)).largest}


def main() -> None:
    warnings.simplefilter("error")
    np.seterr(divide="ignore")  # rows behind the last one have no weights, and are not stored
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    assert _triton.INTERPRETING
    patch_once()
    found: dict[str, Any] = {}
    for T, S, D in ((7, 3, 264), (256, 128, 512), (300, 150, 264), (700, 150, 512), (700, 3, 264)):
        for kind in KINDS:
            for dtype in (torch.float32, torch.float16)[: 2 if kind == "even" else 1]:
                found[f"scores/{T}/{S}/{D}/{kind}/{str(dtype)[6:]}"] = scores(S, T, D, kind, dtype)
    with mock.patch.dict(_attention_scores._LEVELLING, {"MANY": 2, "FEW": 2}):  # several rounds
        found["scores/1100/40/264/rising/float32"] = scores(40, 1100, 264, "rising", torch.float32)
    for T in (5, 16, 16384, 16390, 33000):
        found[f"exponentials/{T}"] = exponentials(T)
    found["whole/merged"] = whole("", 264**-0.5)
    found["whole/apart"] = whole("of the test", 264**-0.5)
    found["whole/negative"] = whole("of the test", -0.1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
