"""FLUX: the fused forward of FluxTransformer2DModel.

Text and image live in one sequence buffer, text first, so that joint attention and the single blocks need no
concatenation: the streams of a double block are slices of it. Between two products there is one pass over the residual
stream: gate, add, normalise, modulate. In a single block q, k, v and the activated MLP come from one product, and
attention's output goes over v, which leaves the input of the closing product adjacent in memory.

A forward has two parts. What depends on the prompt, the positions and the time step alone comes from caches of the run
(text projection, rotary tables, modulation). The rest, from the image tokens in to the image tokens out, is a function
of tensors (`_step`) that can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusedit import ops
from fusedit.models._attention import attention_reason
from fusedit.models._bounds import Bounds, gelu_bounds
from fusedit.models._flux_chain import run_blocks
from fusedit.models._flux_double import Double
from fusedit.models._flux_parts import Pair, Residuals, Vectors, typical_conditions, width_of
from fusedit.models._flux_single import Single
from fusedit.models._lora_ready import lora_ready, widths_of
from fusedit.models._model import Followed, FusedModel, Rewrite, from_config
from fusedit.models._modulation import separate
from fusedit.models._precision import Precision
from fusedit.models._products import linear
from fusedit.plan import Plan
from fusedit.runtime.branches import Split, looked_at_once
from fusedit.runtime.counters import Counters
from fusedit.runtime.inspect_module import offload_hook
from fusedit.runtime.linear import PackedLinear, converted
from fusedit.runtime.lora_scale import lora_scaled


class Flux(FusedModel):
    stock = "diffusers.models.transformers.transformer_flux:FluxTransformer2DModel"
    path = ("transformer",)
    denoiser = True
    pipelines = (
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxFillPipeline",
        "FluxKontextPipeline",
        "FluxControlPipeline",
        "FluxControlNetPipeline",
    )
    signature = (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
        "joint_attention_kwargs",
        "controlnet_block_samples",
        "controlnet_single_block_samples",
        "return_dict",
        "controlnet_blocks_repeat",
    )
    known = frozenset(
        {
            "AdaLayerNormContinuous",
            "AdaLayerNormZero",
            "AdaLayerNormZeroSingle",
            "CombinedTimestepGuidanceTextProjEmbeddings",
            "CombinedTimestepTextProjEmbeddings",
            "FeedForward",
            "FluxAttention",
            "FluxPosEmbed",
            "FluxSingleTransformerBlock",
            "FluxTransformerBlock",
            "PixArtAlphaTextProjection",
            "TimestepEmbedding",
            "Timesteps",
        }
    )
    blocks = ("transformer_blocks", "single_transformer_blocks")
    rewrites = (
        Rewrite("flux.packed_qkv", "reordered", "q, k, v (and the single block's MLP input) as one product"),
        Rewrite("flux.norm_modulate", "reordered", "LayerNorm and modulation in one pass"),
        Rewrite("flux.gated_residual", "reordered", "gate, residual, next LayerNorm and modulation in one pass"),
        Rewrite("flux.qk_norm_rope", "reordered", "RMSNorm and rotary embedding of q and k in place, in fp32"),
        Rewrite("flux.gelu", "reordered", "GELU in the epilogue of its product, or in place"),
        Rewrite("flux.attention", "reordered", "joint attention by the fastest library kernel, without concatenation"),
        Rewrite(
            "flux.modulation", "reordered", "modulation of all blocks in one launch, for many steps of a run at once"
        ),
        Rewrite("flux.hoist", "bitwise", "rotary tables and the text projection once a run instead of once a step"),
        Rewrite("flux.fp8", "lossy", "products of e4m3 weights and activations, quantised where they are made", "fp8"),
        Rewrite("flux.fp8_rounding", "lossy", "codes rounded for what layers read in small pictures", "fp8"),
        Rewrite(
            "flux.fp8_attention", "lossy", "attention on e4m3 codes; off unless named", "fp8", False, "flux.attention"
        ),
        Rewrite("flux.fp8_modulation", "lossy", "weights of the modulation in e4m3, applied as they are", "fp8"),
    )
    rounding = "flux.fp8_rounding"
    precisions = (
        Precision("*norm1.linear", "weights", "one row reads 3.2 billion weights"),
        Precision("*norm1_context.linear", "weights", "one row reads 3.2 billion weights"),
        Precision("single_transformer_blocks.*.norm.linear", "weights", "one row reads 3.2 billion weights"),
        Precision("norm_out.linear", "weights", "one launch with the other modulation layers"),
        Precision("transformer_blocks.0.ff.*", "model", "36 % of the squared error on tiny-flux, 0.3 % of the time"),
        Precision("transformer_blocks.*", "fp8"),
        Precision("single_transformer_blocks.*", "fp8"),
        Precision(
            "x_embedder",
            "model",
            "embedder: 64 inputs, whose error every block reads",
            "embedder, which control LoRAs make wider",
        ),
        Precision("context_embedder", "model", "embedder, once a run"),
        Precision(
            "time_text_embed.timestep_embedder.linear_1",
            "model",
            "embedder: one row, whose error every modulation reads",
            "diffusers reads the model's dtype from this weight",
        ),
        Precision("time_text_embed.*", "model", "embedder: one row, whose error every modulation reads"),
        Precision("proj_out", "model", "final layer: its error is the picture's, 64 outputs"),
    )

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        super().__init__(module, plan, counters)
        self.norm = self.either("flux.norm_modulate", ops.layer_norm_modulate, ops.layer_norm_modulate_fp8)
        self.gate = self.site("flux.gated_residual", ops.gated_residual)
        fused = ops.gated_residual_layer_norm, ops.gated_residual_layer_norm_fp8
        self.gate_norm = self.either("flux.gated_residual", *fused)
        self.rope = self.site("flux.qk_norm_rope", ops.qk_norm_rope)
        self.gelu = self.site("flux.gelu", ops.gelu_tanh)
        self.linear_gelu = self.site("flux.gelu", ops.linear_gelu)
        coarse = plan.enabled("flux.fp8_attention", "fp8", False)
        self.attention = (
            self.site("flux.fp8_attention", ops.attention_fp8) if coarse else self.site("flux.attention", ops.attention)
        )
        self.scaled_linear_gelu = self.site("flux.gelu", ops.scaled_linear_gelu)
        self.row_bounds, self.scale_rows = ops.row_bounds.direct, ops.scale_rows.direct
        self.bounds = Bounds(self.cache, gelu_bounds)
        self.limits = (self.bounds,)
        self.doubles = Followed(lambda block: Double(block, self), Double.unpack)
        self.singles = Followed(lambda block: Single(block, self), Single.unpack)

    def packed(self, parent: Any, names: tuple[str, ...]) -> PackedLinear:
        rewrite = "flux.packed_qkv"
        return PackedLinear(parent, names, rewrite, self.counters, enabled=self.plan.enabled(rewrite))

    def unpack(self) -> None:
        for double in self.doubles.values():
            double.unpack()
        for single in self.singles.values():
            single.unpack()

    @classmethod
    def arguments(cls, module: nn.Module) -> dict[str, Any]:
        return from_config(module, num_layers=1, num_single_layers=1)

    @classmethod
    def typical(cls, module: nn.Module) -> torch.Tensor | None:
        return typical_conditions(module)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        if any(size % 2 for size in module.config.axes_dims_rope):  # type: ignore[union-attr]
            return f"axes_dims_rope {module.config.axes_dims_rope} has an odd entry"  # type: ignore[union-attr]
        return None

    def rare(self, x: torch.Tensor) -> None:
        m: Any = self.module
        row = x.new_zeros(1, 1, m.inner_dim)
        ops.gated_residual(row, row, row[0])  # with a ControlNet
        for block in (*m.transformer_blocks[:1], *m.single_transformer_blocks[:1]):
            wide = x.new_zeros(1, 1, 4 * width_of(block))
            ops.gelu_tanh(wide, out=wide)  # with a LoRA on the feed-forward layer
        lora_ready(x, bias=True, gelu=True, codes=self.plan.base == "fp8", widths=widths_of(m))

    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        module: Any = self.module
        if _argument(0, "hidden_states", args, kwargs).dtype == torch.float16:
            return "float16: stock clips the residual stream, the fused forward does not"
        extra = _argument(7, "joint_attention_kwargs", args, kwargs)
        if extra and set(extra) - {"scale"}:
            return f"joint_attention_kwargs has {sorted(set(extra) - {'scale'})[0]!r}"
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        blocks = (*module.transformer_blocks, *module.single_transformer_blocks)
        return attention_reason((block.attn for block in blocks), FluxAttnProcessor)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        controlnet_single_block_samples: Any = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
    ) -> Any:
        """The stock arguments and results; see FluxTransformer2DModel.forward."""
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        assert encoder_hidden_states is not None
        assert timestep is not None
        assert img_ids is not None
        assert txt_ids is not None
        m: Any = self.module
        self.make_ready(hidden_states)
        offloaded = offload_hook(m)
        with lora_scaled(m, joint_attention_kwargs), looked_at_once(not offloaded):
            look = self.looks(m)
            generation = self.terms.refresh(look.content, offloaded=offloaded)
            text = self.hoisted(
                "flux.hoist",
                (encoder_hidden_states,),
                m.context_embedder,
                lambda: m.context_embedder(encoder_hidden_states),
            )
            rotary = self.hoisted("flux.hoist", (txt_ids, img_ids), m.pos_embed, lambda: _rotary(m, txt_ids, img_ids))
            mods = self._modulation(hidden_states, text.shape[1], timestep, guidance, pooled_projections)
            double = Residuals(controlnet_block_samples, len(m.transformer_blocks), controlnet_blocks_repeat)
            single = Residuals(controlnet_single_block_samples, len(m.single_transformer_blocks), False)

            limits = self.bounds(self._bounding, None if offloaded else look.content)

            def step(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
                x, text, mods, cos, sin, *residuals = tensors
                bounds = None if limits.table is None else residuals.pop(0)
                doubles, singles = double.of(residuals), single.of(residuals[double.count :])
                return self._step(x, text, mods, (cos, sin), doubles, singles, limits.rows(bounds))

            given = () if limits.table is None else (limits.table,)
            inputs = (hidden_states, text, mods, *rotary, *given, *double.samples, *single.samples)
            key = (double.count, single.count, controlnet_blocks_repeat, limits.there, generation)
            refused = "weights move between calls (offload)" if offloaded else ""
            y = self.graphs.run(key, m, inputs, step, refused, look.state)
        return Transformer2DModelOutput(sample=y) if return_dict else (y,)

    def _modulation(
        self,
        x: torch.Tensor,
        text: int,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        """All modulation vectors of this step, [B, N]; see `Vectors` for what lies where."""
        m: Any = self.module
        batch, dtype = x.shape[0], x.dtype
        condition = F.silu(self._condition(dtype, timestep, guidance, pooled))
        if condition.shape[0] != batch:
            condition = condition.expand(batch, -1)
        doubles, singles = list(m.transformer_blocks), list(m.single_transformer_blocks)
        norms = [norm for block in doubles for norm in (block.norm1, block.norm1_context)]
        norms += [block.norm for block in singles] + [m.norm_out]
        layers = [norm.linear for norm in norms]
        if converted(layers):
            self.counters.ran("flux.fp8_modulation")
        if not self.plan.enabled("flux.modulation"):
            return separate(layers, condition)

        def key(timestep: torch.Tensor) -> torch.Tensor:
            numbers = [timestep.float()] if guidance is None else [timestep.float(), guidance.float()]
            return torch.stack([number.expand(batch) for number in numbers], dim=-1)

        def ahead(timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            coming = timesteps[:, None].expand(-1, batch).to(dtype) / 1000  # as every FLUX pipeline does
            guides = None if guidance is None else guidance.expand(batch).repeat(len(coming))
            pools = None if pooled is None else pooled.expand(batch, -1).repeat(len(coming), 1)
            return torch.stack(list(map(key, coming))), F.silu(self._condition(dtype, coming.flatten(), guides, pools))

        return self.modulation(
            "flux.modulation",
            layers,
            condition,
            key(timestep),
            ahead,
            watched=() if pooled is None else (pooled,),
            owner=nn.ModuleList([m.time_text_embed, *norms]),
            tokens=batch * (text + x.shape[1]),
        )

    def _condition(
        self, dtype: torch.dtype, timestep: torch.Tensor, guidance: torch.Tensor | None, pooled: torch.Tensor | None
    ) -> torch.Tensor:
        embed: Any = self.module.time_text_embed
        timestep = timestep.to(dtype) * 1000
        if guidance is None:
            return embed(timestep, pooled)  # type: ignore[no-any-return]
        return embed(timestep, guidance.to(dtype) * 1000, pooled)  # type: ignore[no-any-return]

    def _bounding(self) -> list[list[Split]]:
        """What bounds the input of each closing product in e4m3: two streams of double blocks, then single blocks."""
        m: Any = self.module
        doubles, singles = self.doubles(m.transformer_blocks), self.singles(m.single_transformer_blocks)
        return [*(group for block in doubles for group in block.bounded()), *(block.bounded() for block in singles)]

    def _step(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        mods: torch.Tensor,
        rotary: Pair,
        double: Residuals,
        single: Residuals,
        bounds: list[torch.Tensor | None],
    ) -> torch.Tensor:
        """x [B, I, *] -> [B, I, *]; text [B, T, C], mods [B, N], rotary tables [1, T + I, D / 2]."""
        m: Any = self.module
        t, s, wide = text.shape[1], text.shape[1] + x.shape[1], text.shape[2]
        # h is the residual stream. y holds what a branch's last product gives back; the norm that reads it may put what
        # it gives to the next product in its place, since it reads a row before it writes it.
        h, y = text.new_empty(2, x.shape[0], s, wide)
        h[:, :t] = text
        linear(m.x_embedder, x, out=h[:, t:])
        vectors = Vectors(mods, wide, len(m.transformer_blocks), len(m.single_transformer_blocks))
        run_blocks(self, h, y, vectors, t, rotary, double, single, bounds)
        return linear(m.proj_out, y[:, t:])

    @staticmethod
    def tiny(**changes: Any) -> nn.Module:
        from diffusers import FluxTransformer2DModel

        config: dict[str, Any] = {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 20,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 4, 8),
        }
        module: Any = FluxTransformer2DModel(**{**config, **changes})  # type: ignore[no-untyped-call]
        return module.eval()  # type: ignore[no-any-return]


def _argument(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _rotary(m: Any, txt_ids: torch.Tensor, img_ids: torch.Tensor) -> Pair:
    """cos and sin [1, T + I, D / 2] in fp32. Stock repeats each value for the pair it rotates; one of two is kept."""
    ids = [ids[0] if ids.ndim == 3 else ids for ids in (txt_ids, img_ids)]
    cos, sin = m.pos_embed(torch.cat(ids))
    return cos[None, :, ::2].float().contiguous(), sin[None, :, ::2].float().contiguous()
