"""AutoencoderKL: the fused forward of its decoder, so that decode is faster, sliced and tiled decode too.

Everything runs on channels_last memory, where GroupNorm and SiLU are one op and attention needs no transposition; the
latents are converted once, and the picture once. On a GPU the convolutions' weights lie channels_last too, in place:
the library would reorder them in each call (see runtime/relaid.py). Doubling a picture by repeating pixels and then
convolving it 3x3 is one op (see upsample_conv2d), which sums the weights in each call as they are.

Letters: N pictures, C channels, H and W rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusedit import ops
from fusedit.models._model import Rewrite
from fusedit.models._sum import Sum, added
from fusedit.models._vae import Stage, VaeModel, no_convolution, plain_conv, rewrites, shared_reason
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.plan import Plan
from fusedit.runtime import relaid
from fusedit.runtime.counters import Counters

_UPSAMPLE = "vae.upsample_conv"
_END = "vae.conv_out"
_TAPS = 32
"""Outputs times taps that group_norm_silu_conv2d takes."""


class AutoencoderKL(VaeModel):
    stock = "diffusers.models.autoencoders.vae:Decoder"
    name = "vae"
    path = ("vae", "decoder")
    pipelines = (*Flux.pipelines, *ZImage.pipelines)
    signature = ("sample", "latent_embeds")
    known = frozenset({"Attention", "ResnetBlock2D", "UNetMidBlock2D", "UpDecoderBlock2D", "Upsample2D"})
    rewrites = (
        *rewrites("vae", "decoder"),
        Rewrite(_UPSAMPLE, "reordered", "doubling and 3x3 convolution as four 2x2 convolutions"),
        Rewrite(_END, "reordered", "the last norm, SiLU and convolution to few channels as one op"),
    )

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        super().__init__(module, plan, counters)
        self.upsample = self.site(_UPSAMPLE, ops.upsample_conv2d)
        self.end = self.site(_END, ops.group_norm_silu_conv2d)

    @classmethod
    def arguments(cls, module: nn.Module) -> dict[str, Any]:
        m: Any = module  # a Decoder has no config: it is a part of a model that has
        return {
            "in_channels": getattr(m.conv_in, "base_layer", m.conv_in).in_channels,  # with a LoRA
            "out_channels": getattr(m.conv_out, "base_layer", m.conv_out).out_channels,
            "up_block_types": ("UpDecoderBlock2D",) * len(m.up_blocks),
            "block_out_channels": tuple(block.resnets[0].out_channels for block in reversed(m.up_blocks)),
            "layers_per_block": m.layers_per_block,
            "norm_num_groups": m.conv_norm_out.num_groups,
            "mid_block_add_attention": m.mid_block.attentions[0] is not None,
        }

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        m: Any = module
        reason = shared_reason(m, m.up_blocks, "UpDecoderBlock2D")
        if reason is None and any(not _plain_upsampler(up) for block in m.up_blocks for up in block.upsamplers or ()):
            return "an upsampler that is not doubling and convolution"
        return reason

    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        given = dict(zip(self.signature, args, strict=False)) | kwargs
        if given.get("latent_embeds") is not None:
            return "latent_embeds was given"
        return super().needs_stock(args, kwargs)

    def forward(self, sample: torch.Tensor, latent_embeds: None = None) -> torch.Tensor:  # noqa: ARG002
        """Latents [N, C, H, W] -> pictures; see diffusers' Decoder.forward."""
        return self.run(sample)

    def stages(self) -> Iterator[tuple[str, Stage]]:
        m: Any = self.module
        yield "conv_in", lambda s: Sum(self.whole_conv(m.conv_in, s.x))
        yield "mid_block", lambda s: self.middle(m.mid_block, s)
        for place, block in enumerate(m.up_blocks):
            yield f"up_blocks.{place}", self._up(block)
        yield "conv_out", lambda s: self.last(m, s)

    def _up(self, block: Any) -> Stage:
        def up(s: Sum) -> Sum:
            *resnets, last = block.resnets
            for resnet in resnets:
                s = self.resnet(resnet, s)
            upsamplers = list(block.upsamplers or ())
            if not upsamplers:
                return self.made(self.resnet(last, s))
            s = self._doubled(upsamplers[0].conv, self.last_conv(last, *self.before_last(last, s)))
            for upsampler in upsamplers[1:]:
                s = self._doubled(upsampler.conv, added(s))
            return s

        return up

    def last(self, m: Any, s: Sum) -> Sum:
        if not self.plan.enabled(_END):
            return super().last(m, s)
        layer, norm = m.conv_out, m.conv_norm_out
        reason = ""
        if type(layer) is not nn.Conv2d:
            reason = no_convolution(layer)
        elif 9 * layer.out_channels > _TAPS:
            reason = f"{layer.out_channels} channels are more than {_TAPS // 9}"
        if reason:
            self.counters.fell_back(_END, reason)
            return super().last(m, s)
        (weight, bias), (norm_weight, norm_bias) = self.weights(layer, s.x), self.weights(norm, s.x)
        options = (norm.num_groups, weight, bias, norm.eps, s.bias, s.residual)
        return Sum(self.end(s.x, norm_weight, norm_bias, *options))

    def _doubled(self, layer: Any, x: torch.Tensor) -> Sum:
        reason = _why_not_folded(layer, x) if self.plan.enabled(_UPSAMPLE) else "off"
        if not reason:
            weight, bias = self.weights(layer, x)
            return Sum(self.upsample(x, weight), bias) if relaid.on_gpu(x) else Sum(self.upsample(x, weight, bias))
        if self.plan.enabled(_UPSAMPLE):
            self.counters.fell_back(_UPSAMPLE, reason)
        return self.conv(layer, repeated(x))

    @staticmethod
    def tiny(**changes: Any) -> nn.Module:
        from diffusers.models.autoencoders.vae import Decoder

        config: dict[str, Any] = {
            "in_channels": 4,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
            "block_out_channels": (8, 16, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        }
        return Decoder(**{**config, **changes}).eval()


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Each pixel twice in both directions, in the layout of x."""
    if x.shape[0] < 64 and 4 * x.numel() < 2**31:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    # The library's channels_last kernel fails for more pictures or elements than that; a copy has no such limit.
    n, c, h, w = x.shape
    y = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return y.reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


def _why_not_folded(conv: Any, x: torch.Tensor) -> str:
    if type(conv) is not nn.Conv2d:
        return no_convolution(conv)
    if x.dtype == torch.bfloat16 and not relaid.on_gpu(x):
        # On a GPU the GroupNorm op, which rounds once less than stock, more than pays for it: error 0.0181 of stock's
        # 0.0208 at 1024x1024 with random weights (0.0177 without).
        return "bfloat16 on a CPU: the summed weights would be rounded once more than stock's"
    return ""


def _plain_upsampler(up: Any) -> bool:
    if type(up).__name__ != "Upsample2D" or up.norm is not None or up.use_conv_transpose or not up.interpolate:
        return False
    return plain_conv(up.conv if up.use_conv and up.name == "conv" else None, 1, 1)
