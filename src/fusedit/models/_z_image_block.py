"""The products of one block of Z-Image: q, k and v as one, attention, and the gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit import ops
from fusedit.models._scratch import scratch_part
from fusedit.models._z_image_layout import Table
from fusedit.runtime.linear import PackedLinear, Part, linear
from fusedit.runtime.product import multiply

if TYPE_CHECKING:
    from fusedit.models.z_image import ZImage

_QKV: Final = ("to_q", "to_k", "to_v")


class Block:
    """The products of one block: attention up to its output product, and the feed-forward layer."""

    def __init__(self, block: Any, model: ZImage) -> None:
        self.stock, self.model = block, model
        packed, counters = model.plan.enabled, model.counters
        qkv, w13 = "z_image.packed_qkv", "z_image.packed_ffn"
        self.qkv = PackedLinear(Part(block, "attention"), _QKV, qkv, counters, enabled=packed(qkv))
        self.w13 = PackedLinear(Part(block, "feed_forward"), ("w1", "w3"), w13, counters, enabled=packed(w13))

    def unpack(self) -> None:
        self.qkv.unpack()
        self.w13.unpack()

    def attend(
        self, n: torch.Tensor, scratch: torch.Tensor, table: Table, offloaded: bool, rows: int | None
    ) -> torch.Tensor:
        """n [B, S, C] -> attention's output [B, rows or S, C]."""
        attn, model = self.stock.attention, self.model
        qkv = scratch_part(scratch, n, 3 * len(attn.to_q.weight))
        packed = self.qkv(n, out=qkv, offloaded=offloaded).view(*n.shape[:2], 3, attn.heads, -1)
        q, k, v = packed.unbind(2)
        norms = (attn.norm_q.weight, attn.norm_k.weight)
        model.rope(packed, *norms, table.cos, table.sin, attn.norm_q.eps, out=(q, k))
        a = model.attention(q if rows is None else q[:, :rows], k, v, table.mask)
        return linear(attn.to_out[0], a.flatten(2))

    def feed(self, n: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor, offloaded: bool) -> None:
        """n [B, S, C] -> the feed-forward layer's output, into out."""
        wide = self.hidden()
        whole = self.w13.whole(offloaded=offloaded)
        if whole is not None and whole[1] is None and ops.linear_swiglu.backend(n, whole[0]).name == "triton":
            g = self.model.linear_swiglu(n, whole[0], out=scratch_part(scratch, n, wide))
        else:
            # Not through the op, whose result has no room for both: the gate works in place on the product's output.
            u = scratch_part(scratch, n, 2 * wide)
            u = self.w13.separate(n, u) if whole is None else multiply(n, *whole, u)
            a, b = u.chunk(2, dim=-1)
            g = self.model.swiglu(a, b, out=a)
        linear(self.stock.feed_forward.w2, g, out=out)

    def hidden(self) -> int:
        """F, the inner width of the feed-forward layer."""
        return len(self.stock.feed_forward.w1.weight)

    def scratch_width(self) -> int:
        """Columns that q, k and v, and later both inputs of the gate, take of each token."""
        return max(3 * len(self.stock.attention.to_q.weight), 2 * self.hidden())
