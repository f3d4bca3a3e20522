"""A single block of FLUX up to its closing product: one product of all that reads the input of the block, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit import ops
from fusedit.models._flux_parts import Pair, eps, width_of
from fusedit.models._scratch import scratch_part

if TYPE_CHECKING:
    from fusedit.models.flux import Flux

IMAGE: Final = ("to_q", "to_k", "to_v")
"""Attention's inputs in a single block, and those of the image stream in a double block."""


class SingleInput:
    """q, k, v and the MLP input of a single block as one product, and what follows up to the closing product."""

    def __init__(self, block: Any, model: Flux) -> None:
        self.block, self.model = block, model
        # proj_mlp sits on the block and to_q on its attention, so the group reads them through one view of both.
        self.product = model.packed(_View(block), (*IMAGE, "proj_mlp"))

    def __call__(self, n: torch.Tensor, scratch: torch.Tensor, rotary: Pair, offloaded: bool) -> torch.Tensor:
        """n [B, S, C] -> [attention | GELU(mlp)] [B, S, C + M], a strided view into the product's output in scratch."""
        attn = self.block.attn
        wide = attn.inner_dim
        x = scratch_part(scratch, n, width_of(self.block))
        whole = self.product.whole(offloaded=offloaded)
        if whole is not None and whole[1] is not None:
            self.model.linear_gelu(n, *whole, 3 * wide, out=x)
        else:
            self.product.separate(n, x)
            self.model.gelu(x[..., 3 * wide :], out=x[..., 3 * wide :])
        qkv = x[..., : 3 * wide].view(*x.shape[:2], 3, -1, attn.head_dim)
        q, k, v = qkv.unbind(2)
        self.model.rope(qkv, attn.norm_q.weight, attn.norm_k.weight, *rotary, eps(attn.norm_q, n), out=(q, k))
        a = self.model.attention(q, k, v).flatten(2)
        copy = ops.strided_copy.unchecked if a.is_cpu else ops.strided_copy
        copy(a, out=x[..., 2 * wide : 3 * wide])  # over v: beside the MLP's columns, for the closing product
        return x[..., 2 * wide :]


class _View:
    """Attribute access to a single block's attention projections and MLP projection, as they are at the moment."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return self._block.proj_mlp if name == "proj_mlp" else getattr(self._block.attn, name)
