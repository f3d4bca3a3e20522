"""nn.Linear with a cheaper backward pass: gradients of biases by column_sum, one sum where layers share their input."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from tiny.column_sum import group_sums, runs_kernels


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *pairs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights, biases = cast(tuple[torch.Tensor, ...], pairs[0::2]), pairs[1::2]
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, *weights)
        ctx.shape, ctx.has_bias = x.shape, [bias is not None for bias in biases]
        outs = (nn.functional.linear(flat, w, b) for w, b in zip(weights, biases, strict=True))
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, *weights = ctx.saved_tensors
        into: torch.Tensor | None = None
        pairs: list[torch.Tensor | None] = []
        learns = ctx.needs_input_grad[1:]  # a frozen layer under a LoRA wants no gradients of its own
        for grad, weight, has_bias, of_weight, of_bias in zip(
            grads, weights, ctx.has_bias, learns[0::2], learns[1::2], strict=True
        ):
            rows = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                into = rows @ weight if into is None else into.addmm_(rows, weight)
            pairs.append(rows.mT @ flat if of_weight else None)
            pairs.append(group_sums(rows[None], rows.dtype)[0] if has_bias and of_bias else None)
        return (None if into is None else into.view(ctx.shape), *pairs)


def linears(x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    """Apply each of LAYERS to X: nn.Linear, or what is wrapped around one (a LoRA layer computes for itself)."""
    if not runs_kernels(x) or not all(isinstance(layer, nn.Linear) for layer in layers):
        return tuple(layer(x) for layer in layers)
    pairs = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return cast(tuple[torch.Tensor, ...], _Linears.apply(x, *pairs))


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        ctx.save_for_backward(flat_x, flat_y, weight)
        ctx.shapes = x.shape, y.shape
        of_x, of_y = weight.split([x.shape[-1], y.shape[-1]], dim=1)
        return nn.functional.linear(flat_x, of_x, bias).addmm_(flat_y, of_y.mT).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, y, weight = ctx.saved_tensors
        rows, widths = grad.reshape(-1, grad.shape[-1]), [x.shape[-1], y.shape[-1]]
        into = [(rows @ w).view(shape) for w, shape in zip(weight.split(widths, dim=1), ctx.shapes, strict=True)]
        of_weight = torch.cat([rows.mT @ x, rows.mT @ y], dim=1)
        return (*into, of_weight, group_sums(rows[None], rows.dtype)[0])


def joined_linear(x: torch.Tensor, y: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Apply LAYER to X and Y side by side; to an nn.Linear with a bias without laying them there."""
    if not runs_kernels(x) or not isinstance(layer, nn.Linear):
        return cast(torch.Tensor, layer(torch.cat([x, y], dim=-1)))
    return cast(torch.Tensor, _JoinedLinear.apply(x, y, layer.weight, layer.bias))


class FastLinear(nn.Linear):
    """nn.Linear, with the gradient of its bias by column_sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b."""
        if not runs_kernels(x):
            return super().forward(x)
        return cast(torch.Tensor, _Linears.apply(x, self.weight, self.bias)[0])


def use_fast_linears(model: nn.Module) -> None:
    """Make every nn.Linear with a bias in MODEL a FastLinear; the weights and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is not None:
            module.__class__ = FastLinear
