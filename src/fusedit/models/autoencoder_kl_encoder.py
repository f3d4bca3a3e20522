"""AutoencoderKL: the fused forward of its encoder, for image-to-image and inpainting; sliced and tiled encode too.

As in the decoder, everything runs on channels_last memory. Halving is a convolution with stride 2 over the picture and
a row and a column of zeros at its end: the block before writes into a buffer that has them already.

Letters: N pictures, C channels, H and W rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusedit.models._sum import Sum, added
from fusedit.models._vae import Stage, VaeModel, plain_conv, rewrites, shared_reason
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.runtime import relaid


class AutoencoderKLEncoder(VaeModel):
    stock = "diffusers.models.autoencoders.vae:Encoder"
    name = "vae_encoder"
    path = ("vae", "encoder")
    pipelines = (*Flux.pipelines, *ZImage.pipelines)
    signature = ("sample",)
    known = frozenset({"Attention", "ResnetBlock2D", "UNetMidBlock2D", "DownEncoderBlock2D", "Downsample2D"})
    rewrites = rewrites("vae_encoder", "encoder")

    @classmethod
    def arguments(cls, module: nn.Module) -> dict[str, Any]:
        m: Any = module  # an Encoder has no config: it is a part of a model that has
        return {
            "in_channels": getattr(m.conv_in, "base_layer", m.conv_in).in_channels,  # with a LoRA
            "out_channels": getattr(m.conv_out, "base_layer", m.conv_out).out_channels,
            "double_z": False,  # out_channels are counted already
            "down_block_types": ("DownEncoderBlock2D",) * len(m.down_blocks),
            "block_out_channels": tuple(block.resnets[0].out_channels for block in m.down_blocks),
            "layers_per_block": m.layers_per_block,
            "norm_num_groups": m.conv_norm_out.num_groups,
            "mid_block_add_attention": m.mid_block.attentions[0] is not None,
        }

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        m: Any = module
        reason = shared_reason(m, m.down_blocks, "DownEncoderBlock2D")
        if reason is None and any(
            not _plain_downsampler(down) for block in m.down_blocks for down in block.downsamplers or ()
        ):
            return "a downsampler that is not a convolution with stride 2"
        return reason

    def side(self, latents: int) -> int:
        m: Any = self.module
        halvings = sum(len(block.downsamplers or ()) for block in m.down_blocks)
        return (latents << halvings) + latents % 2  # an odd side of an odd one

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Pictures [N, C, H, W] -> moments of the latents; see diffusers' Encoder.forward."""
        return self.run(sample)

    def stages(self) -> Iterator[tuple[str, Stage]]:
        m: Any = self.module
        yield "conv_in", lambda s: Sum(self.whole_conv(m.conv_in, s.x))
        for place, block in enumerate(m.down_blocks):
            yield f"down_blocks.{place}", self._down(block)
        yield "mid_block", lambda s: self.middle(m.mid_block, s)
        yield "conv_out", lambda s: self.last(m, s)

    def _down(self, block: Any) -> Stage:
        def down(s: Sum) -> Sum:
            *resnets, last = block.resnets
            for resnet in resnets:
                s = self.resnet(resnet, s)
            downsamplers = list(block.downsamplers or ())
            if not downsamplers:
                return self.made(self.resnet(last, s))
            past, h = self.before_last(last, s)
            padded = _with_zeros(h)
            self.last_conv(last, past, h, padded[:, :, :-1, :-1])
            del past, h
            s = self._halved(downsamplers[0].conv, padded)
            for downsampler in downsamplers[1:]:
                s = self._halved(downsampler.conv, F.pad(added(s), (0, 1, 0, 1)))
            return s

        return down

    def _halved(self, layer: Any, padded: torch.Tensor) -> Sum:
        if type(layer) is not nn.Conv2d:  # a LoRA layer
            return Sum(self.called(layer, padded))
        weight, bias = self.weights(layer, padded)
        if relaid.on_gpu(padded):
            return Sum(F.conv2d(padded, weight, stride=2), bias)
        return Sum(F.conv2d(padded, weight, bias, stride=2))

    @staticmethod
    def tiny(**changes: Any) -> nn.Module:
        from diffusers.models.autoencoders.vae import Encoder

        config: dict[str, Any] = {
            "out_channels": 4,
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "block_out_channels": (8, 16, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        }
        return Encoder(**{**config, **changes}).eval()


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    """A channels_last buffer for a picture like x, and a row and a column of zeros behind it."""
    N, C, H, W = x.shape
    padded = torch.empty((N, C, H + 1, W + 1), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    padded[:, :, -1].zero_()
    padded[:, :, :, -1].zero_()
    return padded


def _plain_downsampler(down: Any) -> bool:
    if type(down).__name__ != "Downsample2D" or down.norm is not None or not down.use_conv or down.padding != 0:
        return False
    return plain_conv(down.conv, 2, 0)
