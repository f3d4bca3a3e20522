"""Convolutions 3x3 written for Hopper: tiles by TMA, products by wgmma, bias, residual and statistics behind them.

The kernel is in _conv_hopper_kernel.py, in Gluon. One program a multiprocessor takes tiles in turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedit.ops import _conv_hopper_kernel, _gluon, _hopper, _rows, _triton
from fusedit.ops._build import Build
from fusedit.ops._conv import ACTIVATIONS
from fusedit.ops._conv_hopper_kernel import CHANNELS, OUTPUTS, PIXELS
from fusedit.ops._rows import cdiv

Tensor = torch.Tensor


class Moments(NamedTuple):
    """Of each output over tiles of `size` pixels: means and sums of squared deviations, each [N, tiles, K] in fp32."""

    means: Tensor
    squares: Tensor
    size: int


def reason(x: Tensor, K: int, R: int, act: str, residual: Tensor | None, y: Tensor | None = None) -> str:
    """Why the kernel cannot take x[N,C,H,W] and K outputs, or nothing; y where it is there already."""
    if _gluon.reason:
        return _gluon.reason
    if not x.is_cuda or _triton.capability(x.device.index or 0) != (9, 0):
        return "written for compute capability 9.0"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes half precision, not {str(x.dtype).removeprefix('torch.')}"
    if not x.numel():
        return "nothing to do"
    if R != 3:
        return f"takes 3 x 3 taps, not {R} x {R}"
    if x.shape[1] % CHANNELS or K % OUTPUTS:
        return f"takes multiples of {CHANNELS} channels and {OUTPUTS} outputs, not {x.shape[1]} and {K}"
    if residual is not None and act != "none":
        return "a residual behind an activation"
    pictures = [t.permute(0, 2, 3, 1) for t in (x, residual, y) if t is not None]
    if any(t.stride(3) != 1 for t in pictures):
        return "channels do not lie side by side"
    if any(n > 1 and not step for t in pictures for n, step in zip(t.shape, t.stride(), strict=True)):
        return "several places are one pixel"
    return "needs pixels on 16 bytes" if _rows.vector(8, *pictures) == 1 else ""


def idle(x: Tensor, K: int) -> str:
    """Why so many multiprocessors or so much of the tiles would be idle that a library is faster, or nothing."""
    N, _, H, W = x.shape
    count, tiles = _rows.multiprocessors(x.device.index or 0), _tiles(N, H, W) * (K // OUTPUTS)
    share = tiles / (cdiv(tiles, count) * count) * (H * W) / (2 * cdiv(H, 2) * PIXELS * cdiv(W, PIXELS))
    return "" if share >= _hopper.FULL else f"{tiles} tiles for {H} x {W} keep only {share:.0%} of the chip busy"


def measures(H: int, W: int) -> bool:
    """Whether the kernel can take a norm's statistics: tiles are whole."""
    return H % 2 == 0 and W % PIXELS == 0


def _tiles(N: int, H: int, W: int) -> int:
    return N * cdiv(H, 2) * cdiv(W, PIXELS)


def conv(
    x: Tensor, rows: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor, *, moments: bool = False
) -> Moments | None:
    """For what has no `reason`; rows[K, 9 C], the weight of _conv_direct.rows_of. y may lie on the residual.

    With `moments` (if it `measures`), those of y before it is rounded.
    """
    N, C, H, W = x.shape
    K = y.shape[1]
    rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
    tiles = _tiles(N, H, W)
    means, squares = torch.empty((2, N, tiles // N, K) if moments else (2, 0), dtype=torch.float32, device=x.device)
    programs = min(_rows.multiprocessors(x.device.index or 0), tiles * (K // OUTPUTS))
    wide, narrow = [1, 2, PIXELS, CHANNELS], [1, 1, PIXELS // 2, CHANNELS]
    _conv_hopper_kernel.conv[(programs,)](
        _descriptor(x.permute(0, 2, 3, 1), wide),
        _descriptor(rows, [OUTPUTS, CHANNELS]),
        _descriptor((x if residual is None else residual).permute(0, 2, 3, 1), wide),
        _descriptor(y.permute(0, 2, 3, 1), narrow),
        rows if bias is None else bias.contiguous(),
        means,
        squares,
        N,
        H,
        W,
        C,
        K,
        programs,
        int(residual is not None),
        int(moments),
        ACT=ACTIVATIONS.index(act),
        BIAS=bias is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return Moments(means, squares, 2 * PIXELS) if moments else None


def _descriptor(t: Tensor, block: list[int]) -> Any:
    element = {torch.bfloat16: _gluon.gl.bfloat16, torch.float16: _gluon.gl.float16}[t.dtype]
    return _hopper.descriptor(t, block, _gluon.gl.NVMMASharedLayout.get_default_for(block, element))


def builds() -> list[Build]:
    if _gluon.reason:
        return []

    def tile(*block: int) -> str:
        layout = _gluon.gl.NVMMASharedLayout.get_default_for(list(block), _gluon.gl.bfloat16)
        return f"tensordesc<bf16[{','.join(map(str, block))}],{layout!r}>"

    wide = tile(1, 2, PIXELS, CHANNELS)
    types = {"x_d": wide, "residual_d": wide, "weight_d": tile(OUTPUTS, CHANNELS)}
    types |= {"y_d": tile(1, 1, PIXELS // 2, CHANNELS), "bias_ptr": "*bf16"}
    types |= {"mean_ptr": "*fp32", "square_ptr": "*fp32"}
    flags = {"ACT": 0, "BIAS": True}
    made = Build.of("hopper", _conv_hopper_kernel.conv, types, flags, 4, "no-spill", "descriptors")
    return [made]
