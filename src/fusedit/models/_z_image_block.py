"""The products of one block of Z-Image: q, k and v as one, attention, and the gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit import ops
from fusedit.float8.rows import Activation, Rows
from fusedit.models._products import linear, low_of, packed, separate, takes_rows, times
from fusedit.models._scratch import Scratch
from fusedit.models._z_image_layout import Table
from fusedit.runtime.branches import Split
from fusedit.runtime.linear import PackedLinear, Part, converted

if TYPE_CHECKING:
    from fusedit.models.z_image import ZImage

Tensor = torch.Tensor
_QKV: Final = ("to_q", "to_k", "to_v")


class Block:
    """The products of one block: attention up to its output product, and the feed-forward layer."""

    def __init__(self, block: Any, model: ZImage) -> None:
        self.stock, self.model = block, model
        enabled, counters = model.plan.enabled, model.counters
        qkv, w13 = "z_image.packed_qkv", "z_image.packed_ffn"
        self.qkv = PackedLinear(Part(block, "attention"), _QKV, qkv, counters, enabled=enabled(qkv))
        self.w13 = PackedLinear(Part(block, "feed_forward"), ("w1", "w3"), w13, counters, enabled=enabled(w13))

    def unpack(self) -> None:
        self.qkv.unpack()
        self.w13.unpack()

    def reads_rows(self) -> tuple[bool, bool]:
        """Whether the norms before attention and before the feed-forward layer should give rows in e4m3."""
        terms = self.model.terms
        return takes_rows(self.qkv.layers(), terms), takes_rows(self.w13.layers(), terms)

    def bounded(self) -> list[Split]:
        """The layers that bound what the feed-forward layer's last product reads, in e4m3."""
        if not takes_rows([*self.w13.layers(), self.stock.feed_forward.w2], self.model.terms):
            return []
        parts = [part for part in self.w13.parts() if part is not None]
        return parts if all(part.base.bias is None for part in parts) else []

    def attend(self, n: Activation, scratch: Scratch, table: Table, offloaded: bool, rows: int | None) -> Tensor:
        """n [B, S, C] -> attention's output [B, rows or S, C]."""
        attn, model = self.stock.attention, self.model
        room = scratch.dense(n, 3 * len(attn.to_q.weight))
        qkv = packed(self.qkv, n, room, offloaded=offloaded, terms=model.terms)
        heads = qkv.view(*qkv.shape[:2], 3, attn.heads, -1)
        q, k, v = heads.unbind(2)
        norms = (attn.norm_q.weight, attn.norm_k.weight)
        model.rope(heads, *norms, table.cos, table.sin, attn.norm_q.eps, out=(q, k))
        a = model.attention(q if rows is None else q[:, :rows], k, v, table.mask)
        return linear(attn.to_out[0], a.flatten(2), terms=model.terms)

    def feed(self, n: Activation, scratch: Scratch, out: Tensor, offloaded: bool, bounds: Tensor | None) -> None:
        """n [B, S, C] -> the feed-forward layer's output, into out."""
        wide, last, model = self.hidden(), self.stock.feed_forward.w2, self.model
        layers, parts = self.w13.layers(), self.w13.parts()
        whole = self.w13.whole(parts, offloaded=offloaded)
        if converted((*self.qkv.layers(), self.stock.attention.to_out[0], *layers, self.stock.feed_forward.w2)):
            model.counters.ran("z_image.fp8")
        term = None if whole is None else model.terms.of(layers, parts, out.dtype, "joint")
        plain = term is not None or not any(part is None or part.branches for part in parts)
        if isinstance(n, Rows) and bounds is not None and whole is not None and plain:
            scale = model.row_bounds(n.length, bounds, True)
            codes = scratch.codes(n, wide)
            low = () if term is None else low_of(n, term)
            model.scaled_linear_swiglu(*n[:2], whole.weight, whole.scale, scale, *low, out=codes)
            linear(last, Rows(codes, scale, scale), out, model.terms)
            return
        if isinstance(n, Tensor) and whole is not None and plain and whole.bias is None and whole.scale is None:
            low = () if term is None else low_of(n, term)
            if ops.linear_swiglu.backend(n, whole.weight, *low).name in ("triton", "hopper"):
                g = model.linear_swiglu(n, whole.weight, *low, out=scratch.dense(n, wide))
                linear(last, g, out, model.terms)
                return
        # Not through the op, whose result has no room for both: the gate works in place on the product's output.
        u = scratch.dense(n, 2 * wide)
        if whole is None:
            separate(layers, n, u, model.terms)
        else:
            times(n, whole, u, parts, term)
        a, b = u.chunk(2, dim=-1)
        linear(last, model.swiglu(a, b, out=a), out, model.terms)

    def hidden(self) -> int:
        """F, the inner width of the feed-forward layer."""
        return len(self.stock.feed_forward.w1.weight)

    def scratch_width(self) -> int:
        """Columns that q, k and v, and later both inputs of the gate, take of each token."""
        return max(3 * len(self.stock.attention.to_q.weight), 2 * self.hidden())
