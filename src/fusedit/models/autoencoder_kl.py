"""AutoencoderKL: the fused forward of its decoder, so that decode is faster, sliced and tiled decode too.

Everything runs on channels_last memory, where GroupNorm and SiLU are one op and attention needs no transposition. The
convolutions' weights stay as stock has them: the library reorders them in each call, which costs less than a
thousandth. Doubling a picture by repeating pixels and then convolving it 3x3 equals a transposed convolution 4x4 of
stride 2 with sums of the same weights: 4/9 of the products and no larger picture in between (Shi et al. 2016, "Is the
deconvolution layer the same as a convolutional layer?"). The sums are taken in each call from the weights as they are.

Letters: N pictures, C channels, H and W rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusedit import ops
from fusedit.models._model import FusedModel, Rewrite
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.plan import Plan
from fusedit.runtime.counters import Counters
from fusedit.runtime.linear import linear

_UPSAMPLE = "vae.upsample_conv"
_LAYOUT = "vae.channels_last"


class AutoencoderKL(FusedModel):
    stock = "diffusers.models.autoencoders.vae:Decoder"
    path = ("vae", "decoder")
    denoiser = False
    pipelines = (*Flux.pipelines, *ZImage.pipelines)
    signature = ("sample", "latent_embeds")
    known = frozenset({"Attention", "ResnetBlock2D", "UNetMidBlock2D", "UpDecoderBlock2D", "Upsample2D"})
    rewrites = (
        Rewrite(_LAYOUT, "reordered", "the whole decoder on channels_last memory"),
        Rewrite("vae.group_norm_silu", "reordered", "GroupNorm and SiLU as one op"),
        Rewrite("vae.attention", "reordered", "attention of the middle block by the fastest library kernel"),
        Rewrite(_UPSAMPLE, "reordered", "doubling and 3x3 convolution as one transposed convolution"),
    )
    notes = ("vae: encode stays stock; decode is accelerated, sliced and tiled decode too",)

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        super().__init__(module, plan, counters)
        self.norm = self.site("vae.group_norm_silu", ops.group_norm_silu)
        self.attention = self.site("vae.attention", ops.attention)

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
        if type(m.conv_norm_out) is not nn.GroupNorm:
            return f"norm {type(m.conv_norm_out).__name__} instead of GroupNorm"
        if type(m.mid_block).__name__ != "UNetMidBlock2D":
            return f"middle block {type(m.mid_block).__name__}"
        for block in m.up_blocks:
            if type(block).__name__ != "UpDecoderBlock2D":
                return f"up block {type(block).__name__}"
            if any(not _plain_upsampler(up) for up in block.upsamplers or ()):
                return "an upsampler that is not doubling and convolution"
        for resnet in (*m.mid_block.resnets, *(resnet for block in m.up_blocks for resnet in block.resnets)):
            reason = _resnet_reason(resnet)
            if reason is not None:
                return reason
        return None

    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        m: Any = self.module
        given = dict(zip(self.signature, args, strict=False)) | kwargs
        if given.get("latent_embeds") is not None:
            return "latent_embeds was given"
        sample = given["sample"]
        if sample.ndim != 4:
            return f"the latents have {sample.ndim} dimensions, not 4"
        if sample.dtype == torch.float16:
            return "float16, which overflows"
        from diffusers.models.attention_processor import AttnProcessor2_0

        for attn in m.mid_block.attentions:
            if attn is not None and type(attn.processor) is not AttnProcessor2_0:
                return f"attention processor {type(attn.processor).__name__}"
        return None

    def forward(self, sample: torch.Tensor, latent_embeds: None = None) -> torch.Tensor:  # noqa: ARG002
        """Latents [N, C, H, W] -> pictures; see diffusers' Decoder.forward."""
        m: Any = self.module
        x = sample
        if self.plan.enabled(_LAYOUT):
            self.counters.ran(_LAYOUT)
            x = x.contiguous(memory_format=torch.channels_last)
        x = self._resnet(m.mid_block.resnets[0], m.conv_in(x))
        for attn, resnet in zip(m.mid_block.attentions, list(m.mid_block.resnets)[1:], strict=True):
            if attn is not None:
                x = self._attend(attn, x)
            x = self._resnet(resnet, x)
        for block in m.up_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x)
            for up in block.upsamplers or ():
                x = self._doubled(up.conv, x)
        y: torch.Tensor = m.conv_out(self._normed(m.conv_norm_out, x))
        return y.contiguous()

    def _normed(self, norm: nn.GroupNorm, x: torch.Tensor, silu: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu)
        return y

    def _resnet(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = block.conv1(self._normed(block.norm1, x))
        h = block.conv2(self._normed(block.norm2, h))
        return h.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))

    def _attend(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
        n = self._normed(attn.group_norm, x, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        heads = (*n.shape[:2], attn.heads, -1)
        q, k, v = (linear(layer, n).view(heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        y = linear(attn.to_out[0], self.attention(q, k, v).flatten(2))
        return y.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2).add_(x)

    def _doubled(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        if self.plan.enabled(_UPSAMPLE):
            reason = _why_not_transposed(conv, x)
            if reason is None:
                self.counters.ran(_UPSAMPLE)
                return F.conv_transpose2d(x, transposed_weight(conv.weight), conv.bias, stride=2, padding=1)
            self.counters.fell_back(_UPSAMPLE, reason)
        y: torch.Tensor = conv(repeated(x))
        return y

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


def transposed_weight(weight: torch.Tensor) -> torch.Tensor:
    """[O, I, 3, 3] of a convolution after doubling -> [I, O, 4, 4] of the transposed convolution that equals both."""
    w = weight.float() if weight.dtype == torch.bfloat16 else weight
    for dim in (2, 3):
        before, here, after = w.unbind(dim)
        w = torch.stack((after, here + after, before + here, before), dim)
    return w.transpose(0, 1).to(weight.dtype)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Each pixel twice in both directions, in the layout of x."""
    if x.shape[0] < 64 and 4 * x.numel() < 2**31:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    # The library's channels_last kernel fails for more pictures or elements than that; a copy has no such limit.
    n, c, h, w = x.shape
    y = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return y.reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


def _why_not_transposed(conv: Any, x: torch.Tensor) -> str | None:
    if type(conv) is not nn.Conv2d:
        return f"the convolution is a {type(conv).__module__.partition('.')[0]} {type(conv).__name__} layer"
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        # On a GPU the GroupNorm op, which rounds once less than stock, more than pays for it: error 0.0181 of stock's
        # 0.0208 at 1024x1024 with random weights (0.0177 without), and 28.6 instead of 32.7 ms on an H200.
        return "bfloat16 on a CPU: the summed weights would be rounded once more than stock's"
    return None


def _plain_upsampler(up: Any) -> bool:
    if type(up).__name__ != "Upsample2D" or up.norm is not None or up.use_conv_transpose or not up.interpolate:
        return False
    conv = up.conv if up.use_conv and up.name == "conv" else None
    conv = getattr(conv, "base_layer", conv)
    return (
        isinstance(conv, nn.Conv2d)
        and conv.kernel_size == (3, 3)
        and conv.padding == (1, 1)
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _resnet_reason(block: Any) -> str | None:
    if type(block).__name__ != "ResnetBlock2D":
        return f"residual block {type(block).__name__}"
    if type(block.nonlinearity) is not nn.SiLU:
        return f"activation {type(block.nonlinearity).__name__} instead of SiLU"
    if block.time_emb_proj is not None or block.upsample is not None or block.downsample is not None:
        return "a residual block with a time embedding or resampling"
    if block.output_scale_factor != 1:
        return f"output_scale_factor {block.output_scale_factor}"
    return None
