"""Codes of a panel of a weight, input after input, each taking its error off those to come; for float8/rounding.py.

    for k in 0 .. P-1:  q_k = e4m3(w_k),  e_k = (w_k - q_k) / f_kk,  w_j -= e_k f_kj for j > k

w [G, N, P] fp32 in units of the codes, f [G, P, P] upper triangular, P at most 128. All fp32, rounded one by one, so
that the kernel and torch agree bit for bit. It is no op: one code that falls on the other side moves all after it, so
there is no distance from fp64 by which to judge it, and nothing but a conversion calls it.
In torch a column is seven launches of next to no work: for FLUX.1-dev's one million columns 40 s on an H200.
Source: GPTQ (Frantar et al. 2022), the inner loop of its algorithm 1.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _triton
from fusedit.ops._build import Build
from fusedit.ops._fp8 import CAPABILITY, E4M3, e4m3, from_e4m3, limit, to_e4m3
from fusedit.ops._rows import cdiv
from fusedit.ops._triton import kernel, tl

Tensor = torch.Tensor
PANEL: Final = 128
ROWS: Final = 16
"""Of a program: with 32 it would spill at 4 warps."""


def plain(w: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """See `round_panel`."""
    now = w.clone()
    codes, missed = torch.empty_like(now, dtype=E4M3), torch.empty_like(now)
    for k in range(w.shape[2]):
        codes[..., k] = to_e4m3(now[..., k])
        missed[..., k] = (now[..., k] - codes[..., k].float()) / factor[:, k, k, None]
        now[..., k + 1 :] -= missed[..., k : k + 1] * factor[:, k, None, k + 1 :]
    return codes, missed


@kernel
def _kernel(
    w_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    code_ptr: tl.tensor,
    missed_ptr: tl.tensor,
    N: tl.tensor,
    P: tl.tensor,
    w_group: tl.tensor,
    w_row: tl.tensor,
    factor_group: tl.tensor,
    factor_row: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    group = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = (rows < N)[:, None] & (cols < P)[None, :]
    w = tl.load(w_ptr + group * w_group + rows[:, None] * w_row + cols[None, :], mask=mask, other=0.0)
    factor = factor_ptr + group * factor_group
    missed = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(0, P):
        here = (cols == k)[None, :]
        column = tl.sum(tl.where(here, w, 0.0), axis=1)
        rest = tl.load(factor + k * factor_row + cols, mask=(cols >= k) & (cols < P), other=0.0)
        own = tl.load(factor + k * factor_row + k)
        miss = tl.div_rn(column - from_e4m3(e4m3(column)), own)
        missed = tl.where(here, miss[:, None], missed)
        # Column k keeps what it was, for its code.
        w -= tl.where((cols > k)[None, :], miss[:, None] * rest[None, :], 0.0)
    place = group * N * P + rows[:, None] * P + cols[None, :]
    tl.store(code_ptr + place, e4m3(w), mask=mask)
    tl.store(missed_ptr + place, missed, mask=mask)


def builds() -> list[Build]:
    types = {"w_ptr": "*fp32", "factor_ptr": "*fp32", "code_ptr": "*fp8e4nv", "missed_ptr": "*fp32"}
    sizes = {"ROWS": ROWS, "BLOCK": PANEL}
    return [Build.of("panel", _kernel, types, sizes, 4, "no-spill", capability=CAPABILITY)]


def round_panel(w: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """w [G, N, P], P <= 128, rows adjacent, factor [G, P, P] -> codes e4m3 [G, N, P], and e [G, N, P] to go on with."""
    usable, _ = _triton.status(w.device, torch.float32)
    if not (usable and not limit(w) and (w.is_cuda or _triton.INTERPRETING)):
        return plain(w, factor)
    G, N, P = w.shape
    codes, missed = w.new_empty(w.shape, dtype=E4M3), w.new_empty(w.shape)
    if w.numel():
        strides: Any = (*w.stride()[:2], *factor.stride()[:2])
        given = (w, factor, codes, missed, N, P, *strides)
        _kernel[(cdiv(N, ROWS), G)](*given, ROWS=ROWS, BLOCK=PANEL, num_warps=4, enable_fp_fusion=False)
    return codes, missed
