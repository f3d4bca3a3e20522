"""A double block of FLUX: text and image streams with weights of their own, and attention over both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit.float8.products import quantise
from fusedit.float8.rows import Activation, Rows, part
from fusedit.models._flux_parts import Pair, Six, eps
from fusedit.models._flux_single import IMAGE
from fusedit.models._products import linear, low_of, packed, takes_rows
from fusedit.models._scratch import Scratch, Targets
from fusedit.runtime.branches import Split, split_for_packing
from fusedit.runtime.linear import Part, converted

if TYPE_CHECKING:
    from fusedit.models.flux import Flux

Tensor = torch.Tensor
TEXT: Final = ("add_q_proj", "add_k_proj", "add_v_proj")
"""The text stream's IMAGE."""
Following = tuple[Pair, Activation]
"""Scale and shift of the norm that follows in a stream, and where it puts what it gives (a part of all tokens)."""


class Double:
    """One double block, whose streams are the tokens before and from t on."""

    def __init__(self, block: Any, model: Flux) -> None:
        self.block, self.model = block, model
        self.image = model.packed(Part(block, "attn"), IMAGE)
        self.text = model.packed(Part(block, "attn"), TEXT)

    def unpack(self) -> None:
        self.image.unpack()
        self.text.unpack()

    def reads_rows(self) -> tuple[bool, bool]:
        """Whether the norms before it should give rows in e4m3, to the image's and to the text's product."""
        terms = self.model.terms
        return takes_rows(self.image.layers(), terms), takes_rows(self.text.layers(), terms)

    def bounded(self) -> list[list[Split]]:
        """For each stream the layer that bounds what the feed-forward layer's second product reads, in e4m3."""
        found = []
        for ff in (self.block.ff, self.block.ff_context):
            rows = takes_rows((ff.net[0].proj, ff.net[2]), self.model.terms)
            first = split_for_packing(ff.net[0].proj) if rows else None
            found.append([first] if first is not None and first.base.bias is not None else [])
        return found

    def _layers(self) -> list[Any]:
        """All linear layers of the block but those of its modulation."""
        ends = [self.block.attn.to_out[0], self.block.attn.to_add_out]
        ends += [layer for ff in (self.block.ff, self.block.ff_context) for layer in (ff.net[0].proj, ff.net[2])]
        return [*self.image.layers(), *self.text.layers(), *ends]

    def codes_width(self) -> int:
        """Columns of a feed-forward layer's inner input."""
        return max(len(ff.net[0].proj.weight) for ff in (self.block.ff, self.block.ff_context))

    def attend(
        self, n: tuple[Activation, Activation], y: Tensor, scratch: Scratch, t: int, rotary: Pair, off: bool
    ) -> None:
        """The normed image and text through attention, into y [B, T + I, C]."""
        attn, model = self.block.attn, self.model
        cos, sin = rotary
        qkv = scratch.dense(y, 3 * attn.inner_dim)
        if converted(self._layers()):
            model.counters.ran("flux.fp8")
        packed(self.image, n[0], qkv[:, t:], offloaded=off, terms=model.terms)
        packed(self.text, n[1], qkv[:, :t], offloaded=off, terms=model.terms)
        qkv = qkv.view(*qkv.shape[:2], 3, -1, attn.head_dim)
        for own, norm_q, norm_k, table in (
            (qkv[:, t:], attn.norm_q, attn.norm_k, (cos[:, t:], sin[:, t:])),
            (qkv[:, :t], attn.norm_added_q, attn.norm_added_k, (cos[:, :t], sin[:, :t])),
        ):
            model.rope(own, norm_q.weight, norm_k.weight, *table, eps(norm_q, y), out=(own[:, :, 0], own[:, :, 1]))
        made: Tensor = model.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).flatten(2)
        # Both streams are quantised in one pass, where both are.
        a: Activation = quantise(made) if takes_rows((attn.to_out[0], attn.to_add_out), model.terms) else made
        linear(attn.to_out[0], part(a, slice(t, None)), y[:, t:], model.terms)
        linear(attn.to_add_out, part(a, slice(None, t)), y[:, :t], model.terms)

    def feed(
        self,
        h: Tensor,
        y: Tensor,
        targets: Targets,
        scratch: Scratch,
        t: int,
        mods: tuple[Six, Six],
        following: tuple[Following, Following],
        extra: Tensor | None,
        bounds: list[Tensor | None],
    ) -> None:
        """Attention's result y is added to the residual stream h, then the feed-forward layers; both streams."""
        model = self.model
        for rows, ff, mod, (then, target), added, bound in (
            (slice(t, None), self.block.ff, mods[0], following[0], extra, bounds[0]),
            (slice(None, t), self.block.ff_context, mods[1], following[1], None, bounds[1]),
        ):
            hp, yp = h[:, rows], y[:, rows]
            _, _, gate_attention, scale, shift, gate_mlp = mod
            n = part(targets.of(takes_rows([ff.net[0].proj], model.terms)), rows)
            model.gate_norm(hp, yp, gate_attention, scale, shift, out=(hp, n))
            self._feed(ff, n, yp, scratch, bound)
            if added is None:
                model.gate_norm(hp, yp, gate_mlp, *then, out=(hp, target))
            else:
                model.gate(hp, yp, gate_mlp, out=hp)
                hp += added
                model.norm(hp, *then, out=target)

    def _feed(self, ff: Any, n: Activation, out: Tensor, scratch: Scratch, bound: Tensor | None) -> None:
        """n [B, S, C] through one stream's feed-forward layer, into out."""
        proj, last, model = ff.net[0].proj, ff.net[2], self.model
        found = split_for_packing(proj)
        base: Any = proj if found is None else found.base
        term = None if found is None else model.terms.of([proj], [found], out.dtype)
        plain = found is not None and (term is not None or not found.branches) and base.bias is not None
        low = () if term is None or not plain else low_of(n, term)
        if isinstance(n, Rows) and bound is not None and plain:
            codes = scratch.codes(n, len(base.weight))
            scale = model.row_bounds(n.length, bound, False)
            weights, dtype = (base.weight, base.weight_scale, base.bias), str(out.dtype).removeprefix("torch.")
            model.scaled_linear_gelu(*n[:2], *weights, scale, 0, dtype, *low, out=(out[..., :0], codes))
            linear(last, Rows(codes, scale, scale), out, model.terms)
            return
        u = scratch.dense(n, len(base.weight))
        if isinstance(n, Tensor) and plain and type(base) is torch.nn.Linear:
            g = model.linear_gelu(n, base.weight, base.bias, 0, *low, out=u)
        else:
            g = model.gelu(linear(proj, n, u, None if term is None else model.terms), out=u)
        linear(last, g, out, model.terms)
