"""Run by the tests in a process of its own: codes of 8-bit attention through the Triton interpreter."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from fusedit.ops import _attention_fp8, _attention_fp8_plain, _triton

Tensor = torch.Tensor


def packed(S: int, T: int, dtype: torch.dtype) -> list[Tensor]:
    """q [2,S,2,128], k and v [2,T,2,128], slices of one buffer; keys and values far from 0."""
    x = torch.randn(2, max(S, T), 3, 2, 128, generator=torch.Generator().manual_seed(S))
    x[:, :, 1:] += 3.0
    return [t[:, :n] for t, n in zip(x.to(dtype).unbind(2), (S, T, T), strict=True)]


def same(a: Tensor, b: Tensor) -> float:
    """The share of equal codes; 0 and -0 are."""
    return float((a.float() == b.float()).float().mean())


def compared(S: int, T: int, dtype: torch.dtype, int8: bool) -> dict[str, Any]:
    q, k, v = packed(S, T, dtype)
    made = _attention_fp8.quantise(q, k, v, -0.1, int8=int8)
    plain = _attention_fp8_plain.quantise(q, k, v, -0.1, int8=int8)
    return {
        name: [
            same(a, b) if a.element_size() == 1 else float(((a - b) / b).abs().max()),
            list(a.shape) == list(b.shape),
        ]
        for name, a, b in zip(made._fields, made, plain, strict=True)
    }


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    assert _triton.INTERPRETING
    found: dict[str, Any] = {
        f"{S}/{T}/{str(dtype)[6:]}/{'int8' if int8 else 'e4m3'}": compared(S, T, dtype, int8)
        for S, T, dtype in ((128, 256, torch.float16), (150, 203, torch.float16), (3, 2, torch.float32))
        for int8 in (False, True)
    }
    warnings.simplefilter("ignore")  # of numpy about what is not finite
    for name, place, value in (("q", 0, "inf"), ("k", 1, "nan"), ("v", 2, "-inf")):
        x = packed(150, 203, torch.float16)
        x[place] = x[place].clone()
        x[place][1, 140, 0, 5] = float(value)
        made = _attention_fp8.quantise(x[0], x[1], x[2], 0.1, int8=True)
        found[f"not finite/{name}"] = {
            "rows": made.q_scale.isnan().nonzero().tolist(),
            "blocks": made.scales.isnan().nonzero().tolist(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
