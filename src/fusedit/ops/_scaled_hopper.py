"""Products written for Hopper, of e4m3 or of bf16 with a low-rank term: tiles by TMA, products by wgmma, and a group of
warps that ends tiles meanwhile.

The kernel is in _scaled_hopper_kernel.py, in Gluon. One program a multiprocessor takes tiles in turn.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch

from fusedit.ops import _gluon, _hopper, _rows, _scaled_ends, _scaled_hopper_kernel, _triton
from fusedit.ops._build import Build
from fusedit.ops._rows import cdiv
from fusedit.ops._scaled_hopper_kernel import COLUMNS, RANKS, ROWS, STEP

Tensor = torch.Tensor
ACTS: Final = ("none", "gelu", "swiglu")
WIDE: Final = 64
"""Columns of a block of the result."""
BUSY: Final = 0.7
"""Instead of `_hopper.FULL` where a term and an activation would take passes of their own behind the library's product;
estimated: two passes over the text rows of FLUX, which keep 73 % of an H200 busy, take as long as what is idle."""
GROUP: Final = 8
"""Tiles of rows that share weights in L2."""


def reason(x: Tensor, weight: Tensor, pair: bool = False) -> str:
    """Why the kernel cannot take these at any length, or nothing.

    Args:
        pair: the result is e4m3 and half as wide as weight is long.
    """
    if _gluon.reason:
        return _gluon.reason
    if not x.is_cuda or _triton.capability(x.device.index or 0) != (9, 0):
        return "written for compute capability 9.0"
    if not x.shape[-1]:
        return "has nothing to multiply"
    if x.ndim not in (2, 3):
        return f"takes two or three dimensions, not {x.ndim}"
    if x.stride(-1) != 1 or not weight.is_contiguous():
        return "rows are not dense"
    N, K = weight.shape
    if N % 16 or K % 16:
        return f"takes inputs and outputs in multiples of 16, not {K} and {N}"
    if pair and N % 32:  # the copy engine writes 16 bytes at a time, beyond the end of a row where that lies inside
        return f"writes 16 codes at a time, not {N // 2} a row"
    return "" if _rows.vector(K, x, weight) > 1 else "needs rows on 16 bytes"


def idle(x: Tensor, N: int, t: Tensor | None = None) -> str:
    """Why so many multiprocessors would be idle that the library is faster, or nothing.

    Args:
        t: of a term that would take a pass of its own, as would an activation.
    """
    least = _hopper.FULL if t is None else BUSY
    count, needed = _rows.multiprocessors(x.device.index or 0), _hopper.tiles(x, N)
    share = needed / (cdiv(needed, count) * count)
    return "" if share >= least else f"{needed} tiles keep only {share:.0%} of {count} multiprocessors busy"


def low_reason(t: Tensor | None, up: Tensor | None, part: int, pair: bool) -> str:
    """Why the kernel cannot add this low-rank term, or nothing."""
    if t is None or up is None:
        return ""
    if t.dtype is not torch.bfloat16:
        return f"takes a low-rank term in bfloat16, not {str(t.dtype).removeprefix('torch.')}"
    parts = t.shape[-1] // up.shape[1]
    if parts > 1 and (pair or part % COLUMNS):
        return "parts of a low-rank term do not begin where tiles do"
    well = t.stride(-1) == 1 and up.is_contiguous() and up.shape[1] % 8 == 0 and _rows.vector(8, t, up) > 1
    return "" if well else "rows of the low-rank term are not on 16 bytes"


def launch(
    act: str,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    g: Tensor | None = None,
    g_scale: Tensor | None = None,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
    group: int = GROUP,
) -> None:
    """Whatever the number of tiles: x [B,S,K], weight [N,K] e4m3, x_scale and g_scale [B,S] and weight_scale [N] fp32,
    dense; rows of x, weight, y and g on 16 bytes, and multiples of 16 bytes long.

    `none`: y [B,S,N]. `gelu`: y [B,S,start], g [B,S,N - start], start a multiple of COLUMNS. `swiglu`: g [B,S,N / 2].
    x and weight in bf16: no scales, and of `gelu` all in y [B,S,N].
    t [B,S,P R], up [N,R] and part as in _scaled.py, if they have no `low_reason`.
    """
    B, S, K = x.shape
    N = weight.shape[0]
    pair = act == "swiglu"
    small = _nothing(x.device)
    ranks = 0 if up is None else up.shape[1]
    parts = 1 if t is None or not ranks else t.shape[2] // ranks
    tiles = B * cdiv(S, ROWS) * cdiv(N, COLUMNS)
    programs = min(_rows.multiprocessors(x.device.index or 0), tiles)
    step, low, narrow = STEP // x.element_size(), ranks_a_step(x.dtype), [1, ROWS // 2, WIDE]
    none = small.view(torch.float32)
    given_y = small if y is None or not y.shape[-1] else y
    given_g = given_y if g is None or not g.shape[-1] else g
    _scaled_hopper_kernel.product[(programs,)](
        _descriptor(x, [1, ROWS, step]),
        _weights(weight, step, pair),
        _descriptor(small if t is None else t, [1, ROWS, low]),
        _weights(small[0] if up is None else up, low, pair),
        _descriptor(given_y, narrow),
        _descriptor(given_g, narrow),
        none if x_scale is None else x_scale,
        none if weight_scale is None else weight_scale,
        none if bias is None else bias,
        none if g_scale is None else g_scale,
        B,
        S,
        N,
        K,
        ranks,
        part if parts > 1 else N,
        parts - 1,
        start if act == "gelu" else 0,
        programs,
        ACT=ACTS.index(act),
        BIAS=bias is not None,
        GROUP=group,
        num_warps=4,
        enable_fp_fusion=True,
    )


def into(
    act: str,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    g: Tensor | None,
    g_scale: Tensor | None,
    start: int = 0,
    t: Tensor | None = None,
    up: Tensor | None = None,
    part: int = 0,
) -> None:
    """launch() for tensors of two or three dimensions and results of any strides; by way of dense ones where the copy
    engine cannot write to them."""

    def three(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or x.ndim == 3 else tensor[None]

    def dense(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None else tensor.contiguous()

    targets = [
        given if given is None or _writable(given) else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (y, g)
    ]
    tokens = x if x.ndim == 3 else x[None]
    launch(
        act, tokens, dense(x_scale), weight, dense(weight_scale), dense(bias), three(targets[0]), three(targets[1]),
        dense(g_scale), start, three(t), up, part,
    )  # fmt: skip
    for given, target in zip((y, g), targets, strict=True):
        if given is not None and target is not None and given is not target:
            given.copy_(target)


_known: set[tuple[Any, ...]] = set()


def make_ready(act: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compiles both ways of an op at its first call that the kernel could serve, so that no later length does."""
    key = act, x.device.index, None if bias is None else bias.dtype
    if key in _known or reason(x, weight, act == "swiglu") or torch.cuda.is_current_stream_capturing():
        return
    _known.add(key)
    N = COLUMNS if act != "gelu" else 2 * COLUMNS
    few, wide = x.new_zeros(1, 8, STEP), x.new_zeros(N, STEP)
    scale, weight_scale = (torch.ones(shape, dtype=torch.float32, device=x.device) for shape in ((1, 8), (N,)))
    u = torch.zeros(1, 8, N, dtype=torch.bfloat16, device=x.device)
    own = None if bias is None else bias.new_zeros(N)
    if act == "none":
        launch(act, few, scale, wide, weight_scale, own, u)
        return
    y, g = u[..., :COLUMNS].clone(), x.new_empty(1, 8, COLUMNS if act == "gelu" else COLUMNS // 2)
    launch(act, few, scale, wide, weight_scale, own, y, g, scale, COLUMNS if act == "gelu" else 0)
    _scaled_ends.finish(u[..., : g.shape[-1] * (2 if act == "swiglu" else 1)], scale, g, act == "swiglu")


def ranks_a_step(dtype: torch.dtype) -> int:
    """Of the low-rank term of a product of this dtype; beside bf16 its steps are as all others are."""
    return RANKS if dtype.itemsize == 1 else STEP // dtype.itemsize


def _writable(t: Tensor) -> bool:
    return not t.shape[-1] or (t.stride(-1) == 1 and _rows.vector(16 // t.element_size(), t) > 1)


@cache
def _nothing(device: torch.device) -> Tensor:
    """Stands for an operand that a call does without."""
    return torch.zeros((1, 8, WIDE), dtype=torch.bfloat16, device=device)


def _weights(weight: Tensor, step: int, pair: bool) -> Any:
    if not pair:
        return _descriptor(weight, [COLUMNS, step])
    return _descriptor(weight.view(2, weight.shape[0] // 2, -1), [2, COLUMNS // 2, step])


def _descriptor(t: Tensor, block: list[int]) -> Any:
    element = {torch.bfloat16: _gluon.gl.bfloat16, torch.float8_e4m3fn: _gluon.gl.float8e4nv}[t.dtype]
    return _hopper.descriptor(t, block, _gluon.gl.NVMMASharedLayout.get_default_for(block, element))


def builds(act: str, codes: bool = True) -> list[Build]:
    """Of the kernel for e4m3, or for bf16."""
    if _gluon.reason:
        return []
    x, g, step = ("fp8e4nv", "fp8e4nv", STEP) if codes else ("bf16", "bf16", STEP // 2)
    low = ranks_a_step(torch.float8_e4m3fn if codes else torch.bfloat16)

    def tile(name: str, *block: int) -> str:
        element = {"bf16": _gluon.gl.bfloat16, "fp8e4nv": _gluon.gl.float8e4nv}[name]
        layout = _gluon.gl.NVMMASharedLayout.get_default_for(list(block), element)
        return f"tensordesc<{name}[{','.join(map(str, block))}],{layout!r}>"

    both = (2, COLUMNS // 2) if act == "swiglu" else (COLUMNS,)
    types = {
        "x_d": tile(x, 1, ROWS, step),
        "weight_d": tile(x, *both, step),
        "t_d": tile("bf16", 1, ROWS, low),
        "up_d": tile("bf16", *both, low),
        "y_d": tile("bf16", 1, ROWS // 2, WIDE),
        "g_d": tile("bf16" if act == "none" else g, 1, ROWS // 2, WIDE),
        "x_scale_ptr": "*fp32",
        "weight_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "g_scale_ptr": "*fp32",
    }
    flags = {"ACT": ACTS.index(act), "BIAS": act != "swiglu", "GROUP": GROUP}
    name = "hopper" if codes else "bf16-low-rank-hopper"
    return [Build.of(name, _scaled_hopper_kernel.product, types, flags, 4, "no-spill", "descriptors")]
