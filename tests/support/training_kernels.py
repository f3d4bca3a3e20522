"""The passes that training/tiny writes as kernels, each beside plain autograd: values and gradients of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

from tiny import column_sum, gate, linear, norm

Tensor = torch.Tensor
MODULES = (column_sum, gate, linear, norm)


class Case(NamedTuple):
    """`run(*inputs)` gives one tensor; every float input gets a gradient."""

    name: str
    run: Callable[..., Tensor]
    inputs: Callable[[torch.Generator], list[Tensor]]


def _all(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda generator: [torch.randn(shape, generator=generator) for shape in shapes]


def _normed(kind: int, *, turned: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, factor: Tensor, shift: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        turn = None
        if turned:
            angles = torch.arange(x.shape[1] * x.shape[-1] // 2, device=x.device).view(x.shape[1], -1) / 7
            turn = angles.cos(), angles.sin()
        return norm.norm(x, factor, shift, residual, turn, kind=kind, eps=1e-5)

    return run


def _strided_tables(x: Tensor, factor: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1] * x.shape[-1] // 2, device=x.device).view(-1, x.shape[1]).T / 7
    return norm.norm(x, factor, turn=(angles.cos(), angles.sin()), kind=norm.RMS)


def _heads(x: Tensor, factor: Tensor) -> Tensor:
    """Heads of a wider row, the last one left out: strided in and, through the transposition, strided gradients."""
    heads = x.unflatten(-1, (-1, factor.shape[1]))[:, :, :-1]
    return norm.norm(heads, factor, kind=norm.RMS).transpose(1, 2)


def _linears(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    first, second = nn.Linear(x.shape[-1], len(w)), nn.Linear(x.shape[-1], len(v), bias=False)
    with_parameters = [(first, {"weight": w, "bias": b}), (second, {"weight": v})]
    for layer, tensors in with_parameters:
        for name, tensor in tensors.items():
            delattr(layer, name)
            setattr(layer, name, tensor)
    return torch.cat(linear.linears(x, first, second), dim=-1)


def _joined(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    layer = nn.Linear(w.shape[1], len(w))
    del layer.weight, layer.bias
    layer.weight, layer.bias = w, b  # type: ignore[assignment]
    return linear.joined_linear(x, y, layer)


def _sums(x: Tensor) -> Tensor:
    return column_sum.group_sums(x.detach(), x.dtype) + 0 * x.sum(1)  # a sum of gradients: it has none itself


CASES = (
    Case("rms", _normed(norm.RMS), _all((2, 5, 48), (1, 48))),
    Case("rms-items", _normed(norm.RMS), _all((3, 7, 3, 20), (3, 20))),
    Case("layer-shift", _normed(norm.LAYER), _all((2, 33, 192), (2, 192), (2, 192))),
    Case("layer-residual", _normed(norm.LAYER), _all((2, 5, 24), (1, 24), (1, 24), (2, 5, 24))),
    Case("gated", lambda r, g, x: norm.gated(r, g, x), _all((2, 9, 40), (2, 40), (2, 9, 40))),
    Case("turned", _normed(norm.RMS, turned=True), _all((2, 11, 3, 32), (1, 32))),
    Case("turned-shift", _normed(norm.LAYER, turned=True), _all((2, 4, 2, 8), (2, 8), (2, 8))),
    Case("heads", _heads, _all((2, 6, 64), (1, 16))),
    Case(
        "strided-vectors",
        lambda x, f, s, r: norm.norm(x, f[:, ::2], s.mT, r.mT, kind=norm.LAYER),
        _all((2, 5, 24), (2, 48), (24, 2), (2, 24, 5)),
    ),
    Case("strided-gate", lambda r, g, x: norm.gated(r, g[:, ::2], x), _all((2, 9, 40), (2, 80), (2, 9, 40))),
    Case("strided-tables", _strided_tables, _all((2, 11, 3, 32), (1, 32))),
    Case("many-rows", _normed(norm.RMS), _all((1, 1100, 2, 16), (1, 16))),
    Case("gate", gate.silu_gate, _all((3, 50, 31), (3, 50, 31))),
    Case("gate-strided", lambda x: gate.silu_gate(*x.chunk(2, dim=-1)), _all((5, 62))),
    Case("linears", _linears, _all((2, 9, 24), (20, 24), (20,), (7, 24))),
    Case("joined", _joined, _all((2, 9, 24), (2, 9, 8), (20, 32), (20,))),
    Case("sums", _sums, _all((2, 77, 50))),
    Case("sums-one-row", _sums, _all((3, 1, 5))),
    Case("sums-long", _sums, _all((2, 2500, 70))),
    Case("sums-transposed", lambda x: _sums(x.mT), _all((2, 30, 90))),
)


def results(case: Case, device: str, dtype: torch.dtype, *, kernels: bool) -> list[Tensor]:
    """The value and the gradient of every input, on the CPU, by the kernels in `dtype` or plain in fp64."""
    kind = dtype if kernels else torch.float64
    inputs = case.inputs(torch.Generator().manual_seed(0))
    inputs = [t.to(dtype).to(device, kind).requires_grad_() for t in inputs]
    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "runs_kernels", return_value=kernels))
        made = case.run(*inputs)
        weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device, made.dtype)
        gradients = torch.autograd.grad(made, inputs, weight)
    return [t.detach().double().cpu() for t in (made, *gradients)]


def wrong(case: Case, device: str, dtype: torch.dtype) -> list[str]:
    """What differs from fp64 by more than rounding of inputs, products and results in `dtype`."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    expected, found = (results(case, device, dtype, kernels=kernels) for kernels in (False, True))
    sentences = []
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        if a.shape != b.shape or not error <= tolerance:
            sentences.append(f"{'value' if index == 0 else f'gradient {index - 1}'}: relative error {error:.2e}")
    return sentences
