"""Z-Image: the fused forward of ZImageTransformer2DModel in its basic mode (one image and one caption an item).

Images and captions live in one buffer, image first, so that the joint layers need no concatenation: where all images
have the same padded length, patches are embedded, and the image refiner works, right inside it. Between two products
there is one pass over the residual stream: norm of the branch, tanh gate, add, next norm and its scale. What does not
depend on the time step (caption embedding and refiner, rotary tables, masks) is computed once a run, modulation for
many steps of a run at once. The rest is a function of tensors that can be captured in a CUDA graph.

Letters: B items, X image and T caption tokens (padded as stock does), S = X + T, C channels, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from fusedit import ops
from fusedit.models._attention import attention_reason
from fusedit.models._bounds import Bounds, swiglu_bounds
from fusedit.models._lora_ready import lora_ready, widths_of
from fusedit.models._model import Followed, FusedModel, Rewrite, from_config
from fusedit.models._modulation import separate
from fusedit.models._precision import Precision
from fusedit.models._products import linear
from fusedit.models._scratch import Targets
from fusedit.models._z_image_block import Block
from fusedit.models._z_image_chain import NO_MODS, Mods, eps_of, first_norm, run_chain, scratch_for
from fusedit.models._z_image_layout import Layout, patches, unpatched
from fusedit.plan import Plan
from fusedit.runtime.branches import looked_at_once
from fusedit.runtime.counters import Counters
from fusedit.runtime.inspect_module import offload_hook
from fusedit.runtime.lora_scale import lora_scaled

_NOTHING: Final = nn.Module()
_FEW: Final = "most of the error for its time: 10 % of the squares on tiny-z-image for 0.6 % of a step"


class ZImage(FusedModel):
    stock = "diffusers.models.transformers.transformer_z_image:ZImageTransformer2DModel"
    path = ("transformer",)
    denoiser = True
    pipelines = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ZImageControlNetPipeline")
    signature = (
        "x",
        "t",
        "cap_feats",
        "return_dict",
        "controlnet_block_samples",
        "siglip_feats",
        "image_noise_mask",
        "patch_size",
        "f_patch_size",
        "joint_attention_kwargs",
    )
    known = frozenset({"Attention", "FeedForward", "FinalLayer", "TimestepEmbedder", "ZImageTransformerBlock"})
    blocks = ("noise_refiner", "context_refiner", "siglip_refiner", "layers")
    rewrites = (
        Rewrite("z_image.packed_qkv", "reordered", "q, k and v as one product"),
        Rewrite("z_image.packed_ffn", "reordered", "both input products of the feed-forward layer as one"),
        Rewrite("z_image.norm_modulate", "reordered", "RMSNorm or LayerNorm and scale in one pass"),
        Rewrite("z_image.gated_residual", "reordered", "norm, tanh gate, residual, next norm and scale in one pass"),
        Rewrite("z_image.qk_norm_rope", "reordered", "RMSNorm and rotary embedding of q and k in place, in fp32"),
        Rewrite("z_image.swiglu", "reordered", "gated product in the packed product's epilogue, or in place"),
        Rewrite("z_image.attention", "reordered", "attention by the fastest library kernel"),
        Rewrite("z_image.image_rows", "reordered", "the last layer without the caption rows that nothing reads"),
        Rewrite(
            "z_image.modulation", "reordered", "modulation of all blocks in one launch, for many steps of a run at once"
        ),
        Rewrite("z_image.hoist", "bitwise", "caption refiner, rotary tables and masks once a run, not once a step"),
        Rewrite(
            "z_image.fp8", "lossy", "products of e4m3 weights and activations, quantised where they are made", "fp8"
        ),
        Rewrite("z_image.fp8_rounding", "lossy", "codes rounded for what layers read in small pictures", "fp8"),
        Rewrite(
            "z_image.fp8_attention",
            "lossy",
            "attention on e4m3 codes; off unless named",
            "fp8",
            False,
            "z_image.attention",
        ),
    )
    rounding = "z_image.fp8_rounding"
    precisions = (
        Precision("noise_refiner.*.attention.to_out.0", "model", _FEW),
        Precision("layers.-[12].attention.to_out.0", "model", _FEW),
        Precision(
            "*.adaLN_modulation.*", "model", "tanh-gated modulation of 256 inputs: its error scales every branch"
        ),
        Precision("noise_refiner.*", "fp8"),
        Precision("layers.*", "fp8"),
        Precision("context_refiner.*", "model", "once a run, and every layer reads its error"),
        Precision(
            "t_embedder.*",
            "model",
            "embedder: one row, whose error every modulation reads",
            "embedder, whose input gets the dtype of its weight",
        ),
        Precision("cap_embedder.*", "model", "embedder, once a run"),
        Precision(
            "all_x_embedder.*",
            "model",
            "embedder: 64 inputs, whose error every layer reads",
            "diffusers reads the model's dtype from this weight",
        ),
        Precision("all_final_layer.*", "model", "final layer: its error is the picture's, 64 outputs"),
    )

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        super().__init__(module, plan, counters)
        self.norm = self.either("z_image.norm_modulate", ops.rms_norm_modulate, ops.rms_norm_modulate_fp8)
        self.final_norm = self.site("z_image.norm_modulate", ops.layer_norm_modulate)
        self.gate = self.site("z_image.gated_residual", ops.rms_gated_residual)
        fused = ops.rms_gated_residual_rms_norm, ops.rms_gated_residual_rms_norm_fp8
        self.gate_norm = self.either("z_image.gated_residual", *fused)
        self.rope = self.site("z_image.qk_norm_rope", ops.qk_norm_rope)
        self.swiglu = self.site("z_image.swiglu", ops.swiglu)
        self.linear_swiglu = self.site("z_image.swiglu", ops.linear_swiglu)
        self.scaled_linear_swiglu = self.site("z_image.swiglu", ops.scaled_linear_swiglu)
        self.row_bounds = ops.row_bounds.direct
        self.limits = self.bounds, self.caption_bounds = tuple(Bounds(self.cache, swiglu_bounds) for _ in range(2))
        coarse = plan.enabled("z_image.fp8_attention", "fp8", False)
        self.attention = (
            self.site("z_image.fp8_attention", ops.attention_fp8)
            if coarse
            else self.site("z_image.attention", ops.attention)
        )
        self.noise_refiner, self.context_refiner, self.layers = (
            Followed(lambda block: Block(block, self), Block.unpack) for _ in range(3)
        )

    def unpack(self) -> None:
        for blocks in (self.noise_refiner, self.context_refiner, self.layers):
            for block in blocks.values():
                block.unpack()

    @classmethod
    def arguments(cls, module: nn.Module) -> dict[str, Any]:
        return from_config(module, n_layers=1, n_refiner_layers=1)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        config: Any = module.config
        if not config.qk_norm:
            return "qk_norm is off: q and k are not normalised"
        if config.n_kv_heads != config.n_heads:
            return f"n_kv_heads {config.n_kv_heads} differs from n_heads {config.n_heads}"
        if any(size % 2 for size in config.axes_dims):
            return f"axes_dims {config.axes_dims} has an odd entry"
        return None

    def rare(self, x: torch.Tensor) -> None:
        m: Any = self.module
        wide = x.new_zeros(1, 1, len(m.layers[0].feed_forward.w1.weight) if m.layers else m.dim)
        ops.swiglu(wide, wide, out=wide)  # with a LoRA on the feed-forward layer, and where tiles do not fill the chip
        ops.linear_swiglu(x.new_zeros(1, 1, 64), x.new_zeros(256, 64))  # where they do: the op compiles both its ways
        lora_ready(x, bias=False, swiglu=True, codes=self.plan.base == "fp8", widths=widths_of(m))

    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        m: Any = self.module
        given: dict[str, Any] = dict(zip(self.signature, args, strict=False)) | kwargs
        if "joint_attention_kwargs" in given and "joint_attention_kwargs" not in kwargs:
            return "joint_attention_kwargs was given by position, where stock ignores its scale"
        images: Any = given.get("x")
        captions: Any = given.get("cap_feats")
        if given.get("siglip_feats") is not None or given.get("image_noise_mask") is not None:
            return "omni mode (siglip_feats or image_noise_mask)"
        for name, parts, ndim in (("x", images, 4), ("cap_feats", captions, 2)):
            if not isinstance(parts, list | tuple) or not parts:
                return f"{name} is a {type(parts).__name__}, not a list of tensors"
            if isinstance(parts[0], list):
                return "omni mode (nested lists)"
            if any(part.ndim != ndim or part.shape[0] == 0 for part in parts):
                return f"{name} has a tensor that is empty or not {ndim}-dimensional"
        if len(images) != len(captions):
            return f"{len(images)} images for {len(captions)} captions"
        p, f = given.get("patch_size", 2), given.get("f_patch_size", 1)
        if p not in m.all_patch_size or f not in m.all_f_patch_size:
            return f"patch size {p}, {f} that this model does not have"
        if any(image.shape[1] % f or image.shape[2] % p or image.shape[3] % p for image in images):
            return "an image that is no whole number of patches"
        if not isinstance(given.get("controlnet_block_samples"), dict | None):
            return "controlnet_block_samples is no dict of layer to residual"
        if m.gradient_checkpointing and torch.is_grad_enabled():
            return "gradient checkpointing"
        from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

        blocks = (*m.noise_refiner, *m.context_refiner, *m.layers)
        return attention_reason((block.attention for block in blocks), ZSingleStreamAttnProcessor)

    def forward(
        self,
        x: Sequence[torch.Tensor],
        t: torch.Tensor,
        cap_feats: Sequence[torch.Tensor],
        return_dict: bool = True,
        controlnet_block_samples: dict[int, torch.Tensor] | None = None,
        siglip_feats: None = None,  # noqa: ARG002
        image_noise_mask: None = None,  # noqa: ARG002
        patch_size: int = 2,
        f_patch_size: int = 1,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The stock arguments and results; see ZImageTransformer2DModel.forward."""
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        m: Any = self.module
        key = f"{patch_size}-{f_patch_size}"
        final = m.all_final_layer[key]
        self.make_ready(x[0])
        offloaded = offload_hook(m)
        with lora_scaled(m, joint_attention_kwargs), looked_at_once(not offloaded):
            look = self.looks(m)
            self.terms.refresh(look.content, offloaded=offloaded)
            layout = self._layout(x, cap_feats, patch_size, f_patch_size)
            captions = self._captions(cap_feats, layout)
            mods, scale = self._modulation(x, t, final, len(x) * layout.joint.length)
            residuals = controlnet_block_samples or {}
            blocks = (*self.noise_refiner(m.noise_refiner), *self.layers(m.layers))
            content = None if offloaded else look.content
            limits = self.bounds(lambda: [block.bounded() for block in blocks], content)

            def step(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
                rest = iter(tensors)
                images = [next(rest) for _ in x]
                captions, mods, scale = next(rest), next(rest), next(rest)
                bounds = None if limits.table is None else next(rest)
                where = layout.with_tensors(rest)
                extra = dict(zip(residuals, rest))  # noqa: B905
                n = self._joint(images, captions, mods, where, m.all_x_embedder[key], extra, limits.rows(bounds))
                n = self.final_norm(n, scale, None, final.norm_final.eps)
                return linear(final.linear, n)

            given = () if limits.table is None else (limits.table,)
            inputs = (*x, captions, mods, scale, *given, *layout.tensors, *residuals.values())
            refused = "weights move between calls (offload)" if offloaded else ""
            shape = (layout.key, tuple(residuals), limits.there, self.terms.generation)
            tokens = self.graphs.run(shape, m, inputs, step, refused, look.state)
            sample = unpatched(tokens, layout, m.out_channels)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _modulation(
        self, x: Sequence[torch.Tensor], t: torch.Tensor, final: Any, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Modulation of all blocks [B, 4 C a block] and the scale of the final norm [B, C]."""
        m: Any = self.module

        def condition(t: torch.Tensor) -> torch.Tensor:
            return m.t_embedder(t * m.t_scale).type_as(x[0])  # type: ignore[no-any-return]

        temb = condition(t)
        if temb.shape[0] != len(x):
            temb = temb.expand(len(x), -1)
        scale = final.adaLN_modulation(temb)
        adaptive = [block.adaLN_modulation for block in (*m.noise_refiner, *m.layers)]
        layers = [modulation[0] for modulation in adaptive]
        if not layers or not self.plan.enabled("z_image.modulation"):
            return separate(layers, temb) if layers else temb, scale

        def ahead(timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            coming = ((1000 - timesteps) / 1000)[:, None].expand(-1, len(x)).to(t.dtype)  # as every pipeline does
            return coming.float()[..., None], condition(coming.flatten())

        mods = self.modulation(
            "z_image.modulation",
            layers,
            temb,
            t.float().expand(len(x))[:, None],
            ahead,
            watched=(),
            owner=nn.ModuleList([m.t_embedder, *adaptive]),
            tokens=tokens,
            # The same number in another precision is another one after the scaling.
            settings=(t.dtype, m.t_scale),
        )
        return mods, scale

    def _layout(self, x: Sequence[torch.Tensor], cap_feats: Sequence[torch.Tensor], patch: int, frames: int) -> Layout:
        """Lengths, rotary tables and masks of this call: kept for the run, one for each set of sizes in it."""
        rope: Any = self.module.rope_embedder
        if rope.freqs_cis is None or rope.freqs_cis[0].device != x[0].device:
            rope(torch.zeros(1, len(rope.axes_dims), dtype=torch.int64, device=x[0].device))
        kept: dict[Any, Layout] = self.hoisted("z_image.hoist", tuple(rope.freqs_cis), _NOTHING, dict)
        key = (tuple(i.shape for i in x), tuple(c.shape[0] for c in cap_feats), patch, frames)
        if key not in kept:
            kept[key] = Layout.of(*key, rope, x[0].device)
        return kept[key]

    def _captions(self, cap_feats: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
        """The refined captions [B, T, C], rows beyond an item's own padded length zero."""
        m: Any = self.module
        owner = nn.ModuleList([m.cap_embedder, m.context_refiner])
        owner.pad = m.cap_pad_token
        inputs = (*cap_feats, *m.rope_embedder.freqs_cis)
        captions: torch.Tensor = self.hoisted("z_image.hoist", inputs, owner, lambda: self._refined(cap_feats, layout))
        return captions

    def _refined(self, cap_feats: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
        m: Any = self.module
        norm, product = m.cap_embedder
        pad: torch.Tensor = m.cap_pad_token
        h = pad.new_empty(len(cap_feats), layout.captions.length, m.dim)
        for i, feats in enumerate(cap_feats):
            count, end = feats.shape[0], layout.caption_lengths[i]
            linear(product, self.norm(feats[None], norm.weight, None, norm.eps), out=h[i : i + 1, :count])
            h[i, count:end] = pad
            h[i, end:] = 0
        if len(m.context_refiner):
            blocks = self.context_refiner(m.context_refiner)
            targets = Targets(torch.empty_like(h))
            place = targets.of(blocks[0].reads_rows()[0])
            self.norm(h, *first_norm(m.context_refiner, None), eps_of(m.context_refiner), out=place)
            bounds = self.caption_bounds(lambda: [block.bounded() for block in blocks])
            limits = bounds.rows(bounds.table)
            run_chain(
                self, blocks, h, targets, None, scratch_for(h, blocks), [NO_MODS] * len(blocks), layout.captions, limits
            )
            for i, end in enumerate(layout.caption_lengths):
                h[i, end:] = 0
        return h

    def _joint(
        self,
        x: Sequence[torch.Tensor],
        captions: torch.Tensor,
        vectors: torch.Tensor,
        layout: Layout,
        embedder: Any,
        residuals: dict[int, torch.Tensor],
        bounds: list[torch.Tensor | None],
    ) -> torch.Tensor:
        """Everything between the patches and the final layer: the image rows [B, X, C] after it."""
        m: Any = self.module
        wide, long = layout.images.length, layout.joint.length
        h = captions.new_empty(len(x), long, m.dim)
        image = h[:, :wide] if layout.uniform else captions.new_empty(len(x), wide, m.dim)
        self._embed(x, image, layout, embedder)
        count = len(m.noise_refiner)
        blocks = torch.split(vectors, 4 * m.dim, dim=1)[: count + len(m.layers)]
        split: list[Mods] = [block.chunk(4, dim=1) for block in blocks]  # type: ignore[misc]
        refine, mods = split[:count], split[count:]
        targets = Targets(torch.empty_like(h))
        refiner, layers = self.noise_refiner(m.noise_refiner), self.layers(m.layers)
        scratch = scratch_for(h, [*refiner, *layers])  # one for both, or a graph would hold two
        head = slice(None, wide) if layout.uniform else None
        joint_rows = bool(layers) and layers[0].reads_rows()[0]
        then = (*first_norm(m.layers, mods), targets.of(joint_rows, head)) if layout.uniform and mods else None
        if refine:
            own = targets if layout.uniform else Targets(torch.empty_like(image))
            place = own.of(refiner[0].reads_rows()[0], head)
            self.norm(image, *first_norm(m.noise_refiner, refine), eps_of(m.noise_refiner), out=place)
            run_chain(self, refiner, image, own, head, scratch, refine, layout.images, bounds[: len(refiner)], then)
        if layout.uniform:
            h[:, wide:] = captions
        else:
            for i, (a, b) in enumerate(zip(layout.image_lengths, layout.caption_lengths, strict=True)):
                h[i, :a], h[i, a : a + b], h[i, a + b :] = image[i, :a], captions[i, :b], 0
        if mods:
            left = slice(wide, None) if refine and then else slice(None)  # the rows that have no norm yet
            self.norm(h[:, left], *first_norm(m.layers, mods), eps_of(m.layers), out=targets.of(joint_rows, left))
            rows = wide if self.plan.enabled("z_image.image_rows") else None
            if rows is not None:
                self.counters.ran("z_image.image_rows")
            limits = bounds[len(refiner) :]
            run_chain(self, layers, h, targets, None, scratch, mods, layout.joint, limits, None, residuals, rows)
        return h[:, :wide]

    def _embed(self, x: Sequence[torch.Tensor], image: torch.Tensor, layout: Layout, embedder: Any) -> None:
        """Patches -> image [B, X, C], with the pad token up to an item's own padded length and zeros beyond."""
        pad: Any = self.module.x_pad_token
        if layout.one_size:
            count = layout.image_tokens[0]
            linear(embedder, patches(x, layout), out=image[:, :count])
            image[:, count:] = pad
            return
        for i, (count, end) in enumerate(zip(layout.image_tokens, layout.image_lengths, strict=True)):
            linear(embedder, patches(x[i : i + 1], layout, i), out=image[i : i + 1, :count])
            image[i, count:end] = pad
            image[i, end:] = 0

    @staticmethod
    def tiny(**changes: Any) -> nn.Module:
        from diffusers import ZImageTransformer2DModel

        config: dict[str, Any] = {
            "in_channels": 4,
            "dim": 48,
            "n_layers": 3,
            "n_refiner_layers": 2,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 20,
            "axes_dims": [4, 6, 6],
            "axes_lens": [512, 64, 64],
        }
        module: nn.Module = ZImageTransformer2DModel(**{**config, **changes})  # type: ignore[no-untyped-call, assignment]
        return module.eval()
