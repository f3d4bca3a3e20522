"""Run by the tests in a process of its own: e4m3 rows by Triton's interpreter beside plain torch, findings as JSON."""

from __future__ import annotations

import json
import warnings

import numpy as np
import torch

from fusedit import ops
from fusedit.ops import _fp8, _triton
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor


@kernel
def both_ways(x_ptr: tl.tensor, q_ptr: tl.tensor, y_ptr: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    q = _fp8.e4m3(tl.load(x_ptr + at))
    tl.store(q_ptr + at, q)
    tl.store(y_ptr + at, _fp8.from_e4m3(q))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN equal to any."""
    return torch.equal(a.float().nan_to_num(nan=-7.5), b.float().nan_to_num(nan=-7.5))


def every_code() -> Tensor:
    """Every code, the middles between two, their neighbours in fp32, and what is beyond; 2048 values."""
    codes = torch.arange(127, dtype=torch.uint8).view(_fp8.E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (1e9, 0.0))
    beyond = torch.tensor([449.0, 460.0, 464.0, 465.0, 1e4, torch.inf, torch.nan, 1e-45])
    one_sign = torch.cat([codes, middles, up, down, beyond])
    return torch.cat([one_sign, -one_sign, torch.zeros(2048 - 2 * len(one_sign))])


def rows() -> Tensor:
    """[60, 72] over all magnitudes, with zeros, an inf and a NaN, and rows that nearly vanish."""
    x = torch.randn(60, 72) * torch.logspace(-30, 30, 60)[:, None]
    x[7], x[9, 3], x[11, 5], x[13, 0] = 0.0, torch.inf, torch.nan, -torch.inf
    x[15] = torch.finfo(torch.float32).tiny
    return x


def main() -> None:
    warnings.simplefilter("error")
    np.seterr(over="ignore")
    torch.manual_seed(0)
    assert _triton.INTERPRETING
    x = every_code()
    q, y = torch.empty(2048, dtype=_fp8.E4M3), torch.empty(2048)
    both_ways[(1,)](x, q, y, N=2048)
    found = {"cast": same(q, _fp8.to_e4m3(x)), "back": same(y, q)}
    given = rows()
    for name, made, truth in zip(
        ("codes", "scales", "lengths"), ops.quantize_rows(given), ops.quantize_rows.plain(given), strict=True
    ):
        close = torch.allclose(made.float(), truth.float(), rtol=1e-6, atol=0, equal_nan=True)
        found[f"quantize_rows {name}"] = close if name == "lengths" else same(made, truth)
    s = torch.logspace(-20, 20, 60)
    s[3] = torch.nan
    found["scale_rows"] = same(ops.scale_rows(given, s), ops.scale_rows.plain(given, s))
    length = torch.cat([torch.logspace(-40, 30, 2000), torch.tensor([0.0, 448.0, 7.0 * 2**30])]).repeat(3, 1)
    length[1, 5], length[2, 9] = torch.nan, torch.inf
    for name, bounds, square in (
        ("linear", (1 / 1.0625, 0.0, 0.0, 0.0), False),
        ("floor", (3.0, 0.5, 0.1, 0.25), False),
        ("square", (2.5, 0.7, 0.0, 0.0), True),
    ):
        given_bounds = torch.tensor(bounds)
        made, truth = (f(length, given_bounds, square) for f in (ops.row_bounds, ops.row_bounds.plain))
        found[f"row_bounds {name}"] = same(made, truth)
    found["ran"] = set(ops.quantize_rows.ran) | set(ops.scale_rows.ran) | set(ops.row_bounds.ran) == {"triton"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
