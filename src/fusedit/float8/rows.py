"""Rows: activations in e4m3 with one fp32 scale a row, as the products of the fp8 tier read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Rows(NamedTuple):
    """x [B, S, K] = codes * scale[..., None].

    Attributes:
        codes: e4m3 [B, S, K], dense rows.
        scale: fp32 [B, S].
        length: fp32 [B, S], the L2 norm of each row of x; what bounds the next product before it is computed.
    """

    codes: Tensor
    scale: Tensor
    length: Tensor

    @classmethod
    def like(cls, x: Tensor) -> Rows:
        """Room for rows of x [B, S, K]."""
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale, length = torch.empty(2, *x.shape[:-1], dtype=torch.float32, device=x.device)
        return cls(codes, scale, length)

    def part(self, tokens: slice) -> Rows:
        """These tokens of every item; no copy."""
        return Rows(*(t[:, tokens] for t in self))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """x in this dtype, a copy."""
        return (self.codes.float() * self.scale[..., None]).to(dtype)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Activation = Tensor | Rows


def part(x: Any, tokens: slice) -> Any:
    """These tokens of an activation of either kind."""
    return x.part(tokens) if isinstance(x, Rows) else x[:, tokens]
