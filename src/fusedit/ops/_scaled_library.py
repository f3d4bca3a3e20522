"""Products of e4m3 by the libraries, in the order of their speed, with a memory of what failed.

- `rowwise`: torch's scaled product with a scale a row and one a column, into bf16;
- `tensorwise`: the same with one scale for all, into fp32; scales and bias in fp32 afterwards;
- `dequantised`: codes in fp16, which holds each of them exactly, multiplied into fp32; then as before.

All accumulate in fp32 and apply scales before they narrow: unscaled sums exceed fp16. Where a library fails for a size,
the next one serves, then and whenever that size comes again.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fusedit.ops import _triton
from fusedit.ops._op import Backend
from fusedit.runtime.product import rows

Tensor = torch.Tensor
NAMES: Final = ("rowwise", "tensorwise", "dequantised")
_failed: dict[tuple[Any, ...], str] = {}
_strided: dict[int, bool] = {}


def choose(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Backend:
    """The library that serves x [..., K] on a CUDA device, and why each faster one does not."""
    reasons: list[str] = []
    for name in NAMES:
        reason = _refusal(name, x, weight, dtype)
        if not reason:
            return Backend(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return Backend("plain", "; ".join(reasons))


def _refusal(name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> str:
    if name != "dequantised":
        capability = _triton.capability(x.device.index or 0)
        if torch.version.hip is not None:
            return "ROCm is not supported"
        if capability < (8, 9):
            return f"products of e4m3 need compute capability 8.9, not {capability[0]}.{capability[1]}"
        N, K = weight.shape
        if not K or N % 16 or K % 16:
            return f"takes inputs and outputs in multiples of 16, not {K} and {N}"
        if name == "rowwise" and dtype is not torch.bfloat16:
            return f"gives bfloat16, not {str(dtype).removeprefix('torch.')}"
    return _failed.get(_key(name, x, weight, dtype), "")


def _key(name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Sizes that a library takes alike: of the rows only their magnitude."""
    count = x.numel() // max(1, x.shape[-1])
    return name, x.device.index, count.bit_length(), weight.shape, dtype


def run(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, y: Tensor, first: str
) -> str:
    """u into y [..., N] of any strides, by the library `first` or the next that can; returns its name."""
    name = first
    while True:
        try:
            _each(name, x, x_scale, _aligned(weight), weight_scale, bias, y)
            return name
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if name == NAMES[-1]:
                raise
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            _failed[_key(name, x, weight, y.dtype)] = f"failed for these sizes ({said})"
            name = choose(x, weight, y.dtype).name


def _each(
    name: str, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """One product where the rows of x and y follow each other, else one an item."""
    x_rows, y_rows = rows(x), rows(y)
    if x_rows is not None and y_rows is not None:
        _matrix(name, x_rows, x_scale.reshape(-1), weight, weight_scale, bias, y_rows)
    elif x.ndim == 3:  # a slice along the sequence with batch > 1
        for item in zip(x, x_scale, y, strict=True):
            _matrix(name, item[0], item[1], weight, weight_scale, bias, item[2])
    else:
        made = y.new_empty(x_scale.numel(), weight.shape[0])
        _matrix(name, x.reshape(-1, x.shape[-1]), x_scale.reshape(-1), weight, weight_scale, bias, made)
        y.copy_(made.view(y.shape))


def _matrix(
    name: str, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    if name == "rowwise":
        direct = y.is_contiguous() or (_on_16_bytes(y) and _takes_slices(x.device))
        made = y if direct else torch.empty(y.shape, dtype=y.dtype, device=y.device)
        torch._scaled_mm(
            _aligned(x),
            weight.t(),
            scale_a=x_scale.contiguous()[:, None],
            scale_b=weight_scale.contiguous()[None, :],
            bias=None if bias is None else bias.to(y.dtype).contiguous(),
            out_dtype=y.dtype,
            use_fast_accum=True,
            out=made,
        )
        if not direct:
            y.copy_(made)
        return
    if name == "tensorwise":
        one = torch.ones((), dtype=torch.float32, device=x.device)
        made = torch._scaled_mm(
            _aligned(x), weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
        )
    else:
        made = torch.mm(x.half(), weight.half().t(), out_dtype=torch.float32)
    made *= x_scale[:, None]
    made *= weight_scale
    if bias is not None:
        made += bias
    y.copy_(made)


def _on_16_bytes(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0


def _aligned(t: Tensor) -> Tensor:
    """A matrix as it lies, or a copy where its rows are not dense or not on 16 bytes."""
    return t if _on_16_bytes(t) else t.clone(memory_format=torch.contiguous_format)


def _takes_slices(device: torch.device) -> bool:
    """Whether the row-wise product heeds the row stride of its result: asked once a device, outside graph capture.

    Not all libraries behind it do, and those that do not write a dense matrix across the slice.
    """
    index = device.index or 0
    if index not in _strided:
        if torch.cuda.is_current_stream_capturing():
            return False
        _strided[index] = _try_slices(torch.device("cuda", index))
    return _strided[index]


def _try_slices(device: torch.device) -> bool:
    with torch.no_grad(), torch.cuda.device(device):
        x = torch.ones(64, 64, device=device).to(torch.float8_e4m3fn)
        one = torch.ones(64, dtype=torch.float32, device=device)
        buffer = torch.full((64, 192), -1.0, dtype=torch.bfloat16, device=device)
        try:
            torch._scaled_mm(
                x,
                x.t(),
                scale_a=one[:, None],
                scale_b=one[None, :],
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
                out=buffer[:, 64:128],
            )
        except RuntimeError:
            return False
        wanted = torch.full_like(buffer, -1.0)
        wanted[:, 64:128] = 64.0
        return torch.equal(buffer, wanted)
