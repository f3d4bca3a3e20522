"""A single block of FLUX: one product of all that reads its input, attention, and the closing product of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit import ops
from fusedit.float8.rows import Activation, Rows
from fusedit.models._flux_parts import Pair, eps, width_of
from fusedit.models._products import linear, low_of, separate, takes_rows, times
from fusedit.models._scratch import Scratch
from fusedit.runtime.branches import Split
from fusedit.runtime.linear import Whole, converted
from fusedit.runtime.terms import Term

if TYPE_CHECKING:
    from fusedit.models.flux import Flux

Tensor = torch.Tensor
IMAGE: Final = ("to_q", "to_k", "to_v")
"""Attention's inputs in a single block, and those of the image stream in a double block."""


class Single:
    """q, k, v and the MLP input of a single block as one product, and what follows up to its result."""

    def __init__(self, block: Any, model: Flux) -> None:
        self.block, self.model = block, model
        # proj_mlp sits on the block and to_q on its attention, so the group reads them through one view of both.
        self.product = model.packed(_View(block), (*IMAGE, "proj_mlp"))

    def unpack(self) -> None:
        self.product.unpack()

    def reads_rows(self) -> bool:
        """Whether the norm before it should give rows in e4m3."""
        return takes_rows(self.product.layers(), self.model.terms)

    def bounded(self) -> list[Split]:
        """The layers that bound what the closing product reads: GELU's and attention's, where both are quantised."""
        if not (self.reads_rows() and takes_rows([self.block.proj_out], self.model.terms)):
            return []
        parts = self.product.parts()
        return [part for part in (parts[3], parts[2]) if part is not None]

    def codes_width(self) -> int:
        """Columns of the closing product's input."""
        return int(self.block.attn.inner_dim) + len(self.block.proj_mlp.weight)

    def __call__(
        self, n: Activation, y: Tensor, scratch: Scratch, rotary: Pair, offloaded: bool, bounds: Tensor | None
    ) -> None:
        """n [B, S, C], the normed input, through the block into y [B, S, C], which its gate multiplies."""
        layers, parts, terms = self.product.layers(), self.product.parts(), self.model.terms
        whole = self.product.whole(parts, offloaded=offloaded)
        if converted((*layers, self.block.proj_out)):
            self.model.counters.ran("flux.fp8")
        term = None if whole is None else terms.of(layers, parts, y.dtype)
        plain = term is not None or not any(part is not None and part.branches for part in parts)
        if isinstance(n, Rows) and bounds is not None and whole is not None and whole.bias is not None and plain:
            self._float8(n, y, whole, term, scratch, rotary, bounds)
            return
        wide = self.block.attn.inner_dim
        x = scratch.dense(n, width_of(self.block))
        if whole is not None and plain and whole.bias is not None and isinstance(n, Tensor) and whole.scale is None:
            low = () if term is None else low_of(n, term)
            self.model.linear_gelu(n, whole.weight, whole.bias, 3 * wide, *low, out=x)
        else:
            if whole is None:
                separate(layers, n, x, terms)
            else:
                times(n, whole, x, parts, term)
            self.model.gelu(x[..., 3 * wide :], out=x[..., 3 * wide :])
        a = self._attend(x[..., : 3 * wide], rotary)
        # Over v: beside the MLP's columns, for the closing product.
        ops.strided_copy.direct(a, out=x[..., 2 * wide : 3 * wide])
        linear(self.block.proj_out, x[..., 2 * wide :], y, terms)

    def _float8(
        self, n: Rows, y: Tensor, whole: Whole, term: Term | None, scratch: Scratch, rotary: Pair, bounds: Tensor
    ) -> None:
        """The same in e4m3: the activated MLP and attention's output are written as the rows of the closing product."""
        model = self.model
        wide = self.block.attn.inner_dim
        qkv = scratch.dense(n, 3 * wide)
        codes = scratch.codes(n, self.codes_width())
        scale = model.row_bounds(n.length, bounds, False)
        dtype = str(y.dtype).removeprefix("torch.")
        given = (
            whole.weight,
            whole.scale,
            whole.bias,
            scale,
            3 * wide,
            dtype,
            *(() if term is None else low_of(n, term)),
        )
        model.scaled_linear_gelu(*n[:2], *given, out=(qkv, codes[..., wide:]))
        model.scale_rows(self._attend(qkv, rotary), scale, out=codes[..., :wide])
        linear(self.block.proj_out, Rows(codes, scale, scale), y, model.terms)

    def _attend(self, qkv: Tensor, rotary: Pair) -> Tensor:
        """Attention on q, k, v [B, S, 3 C] of one product; q and k are overwritten -> [B, S, C]."""
        attn, model = self.block.attn, self.model
        heads = qkv.view(*qkv.shape[:2], 3, -1, attn.head_dim)
        q, k, v = heads.unbind(2)
        model.rope(heads, attn.norm_q.weight, attn.norm_k.weight, *rotary, eps(attn.norm_q, qkv), out=(q, k))
        return model.attention(q, k, v).flatten(2)  # type: ignore[no-any-return]


class _View:
    """Attribute access to a single block's attention projections and MLP projection, as they are at the moment."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return self._block.proj_mlp if name == "proj_mlp" else getattr(self._block.attn, name)
