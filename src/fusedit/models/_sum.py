"""A picture inside the fused VAE whose bias, residual or convolution is still to come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(eq=False)
class Sum:
    """x + bias + residual, not added yet; bias[C] of any dtype. With a weight, conv(x, weight) in the place of x."""

    x: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None

    def taken(self) -> Sum:
        """All of it. Nothing is left here, so that no name that a caller has for it keeps the memory."""
        everything = replace(self)
        vars(self).clear()
        return everything

    def beside(self, past: Sum) -> Sum:
        """This and what passes by it, of which nothing but a bias is to come."""
        return replace(self, bias=total(self.bias, past.bias), residual=past.x)


def added(s: Sum, out: Tensor | None = None) -> Tensor:
    """The sum, in place of its first term unless `out` is given."""
    x = s.x if out is None else out.copy_(s.x)
    for term in (None if s.bias is None else s.bias.to(x.dtype)[:, None, None], s.residual):
        if term is not None:
            x.add_(term)
    return x


def total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Two biases as one; in float32 where there are two."""
    if a is None or b is None:
        return b if a is None else a
    return a.float() + b
