"""What the fused encoder and decoder of a VAE share: residual blocks and attention on channels_last memory.

On a GPU a convolution leaves its bias to whoever reads its result next: GroupNorm, which moves its means by it, or the
addition of the residual, which happens in the pass that takes the next GroupNorm's statistics, or, with the statistics
too, in the convolution itself, which is left to its reader as a whole for that. `Sum` is such a result; whoever
takes it may overwrite it.

Letters: N pictures, C channels, H and W rows and columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.nn import functional as F

from fusedit import ops
from fusedit.errors import OpError
from fusedit.models._model import FusedModel, Rewrite
from fusedit.models._products import linear
from fusedit.models._sum import Sum, added, total
from fusedit.plan import Plan
from fusedit.runtime import relaid, widened
from fusedit.runtime.branches import from_peft
from fusedit.runtime.counters import Counters
from fusedit.runtime.inspect_module import offload_hook

Tensor = torch.Tensor
CONVERSIONS: Final = "conversions between NCHW and channels_last"
Stage = Callable[[Sum], Sum]


def rewrites(name: str, whole: str) -> tuple[Rewrite, ...]:
    """Those that encoder and decoder share, under this name."""
    return (
        Rewrite(f"{name}.channels_last", "reordered", f"the whole {whole} on channels_last memory"),
        Rewrite(f"{name}.conv2d", "reordered", "convolutions 3x3 and 1x1, bias and residual in one pass behind them"),
        Rewrite(f"{name}.group_norm_silu", "reordered", "GroupNorm and SiLU as one op"),
        Rewrite(f"{name}.residual_norm", "reordered", "residual, GroupNorm and SiLU as one op"),
        Rewrite(f"{name}.attention", "reordered", "attention of the middle block by the fastest kernels"),
    )


class VaeModel(FusedModel):
    """Base of the two; `name` is what their rewrites begin with."""

    name: ClassVar[str]
    denoiser = False
    overflows = True

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        super().__init__(module, plan, counters)
        self.norm = self.site(f"{self.name}.group_norm_silu", ops.group_norm_silu)
        self.convolve = self.site(f"{self.name}.conv2d", ops.conv2d)
        self.attention = self.site(f"{self.name}.attention", ops.attention)
        self.residual_norm = self.site(f"{self.name}.residual_norm", ops.residual_group_norm_silu)
        self.joins = {
            f"{self.name}.{norm}": self.site(f"{self.name}.{norm}", ops.conv2d_group_norm_silu)
            for norm in ("group_norm_silu", "residual_norm")
            if plan.enabled(f"{self.name}.conv2d") and plan.enabled(f"{self.name}.{norm}")
        }

    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        m: Any = self.module
        sample = args[0] if args else kwargs.get("sample")
        if not isinstance(sample, Tensor) or sample.ndim != 4:
            return f"the input has {getattr(sample, 'ndim', 'no')} dimensions, not 4"
        weight = getattr(m.conv_in, "base_layer", m.conv_in).weight
        if sample.dtype != weight.dtype:
            return f"the input is {_named(sample.dtype)}, the weights are {_named(weight.dtype)}"
        if sample.device != weight.device:
            return f"the input is on {sample.device}, the weights are on {weight.device}"
        if sample.shape[1] != weight.shape[1]:
            return f"the input has {sample.shape[1]} channels, not {weight.shape[1]}"
        from diffusers.models.attention_processor import AttnProcessor2_0

        for attn in m.mid_block.attentions:
            if attn is not None and type(attn.processor) is not AttnProcessor2_0:
                return f"attention processor {type(attn.processor).__name__}"
        if sample.dtype == torch.float16 and any(map(from_peft, m.modules())):
            return "float16 with a LoRA layer: only the whole of stock can be widened"
        return None

    def run_stock(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In float32 where all is float16, as the fused forward computes it."""
        return widened.call(self.module, stock, args, kwargs, self.counters)

    @abstractmethod
    def stages(self) -> Iterator[tuple[str, Stage]]:
        """The forward in pieces, by the names of the stock modules they stand for."""

    def run(self, sample: Tensor) -> Tensor:
        """All stages, on channels_last memory, in float32 where the sample is float16; the result in the sample's
        dtype and dense NCHW (stock's is channels_last on a CPU where there are several pictures)."""
        if sample.dtype == torch.float16:
            self.counters.event(widened.WIDENED)
        offloaded = offload_hook(self.module)
        self._lay_weights(sample, offloaded)  # not in a step: a graph takes the weights for granted where they lie
        self.make_ready(sample)
        refused = "weights move between calls (offload)" if offloaded else ""
        return self.graphs.run((), self.module, (sample,), self._step, refused)

    def _step(self, tensors: tuple[Tensor, ...]) -> Tensor:
        x = sample = tensors[0]
        if self.plan.enabled(f"{self.name}.channels_last"):
            self.counters.ran(f"{self.name}.channels_last")
            self.counters.event(CONVERSIONS)
            x = ops.nchw_to_nhwc(x)
        held = [Sum(x.float() if x.dtype == torch.float16 else x)]
        for _, stage in self.stages():
            held.append(stage(held.pop()))  # a name for what goes in would keep it until the stage is over
        y = held.pop().x
        if not y.is_contiguous():
            self.counters.event(CONVERSIONS)
            y = ops.nhwc_to_nchw(y)
        return y.to(sample.dtype)

    def _lay_weights(self, sample: Tensor, offloaded: bool) -> None:
        """On a GPU weights lie as the pictures do that they are convolved with, elsewhere as stock has them."""
        if not relaid.on_gpu(sample) or not self.plan.enabled(f"{self.name}.channels_last"):
            relaid.put_back(self.module)
            return
        dtype = torch.float32 if sample.dtype == torch.float16 else sample.dtype
        relaid.lay(self.module, sample.device, dtype, self.counters, offloaded=offloaded)

    def rare(self, x: Tensor) -> None:
        """What a picture's size decides: whether rows end on 16 bytes, and who convolves; small ones the library."""
        other = type(self)(self.module, self.plan, Counters())
        for side in (8, 3):  # of the latents
            side = self.side(side)
            other._step((x.new_zeros((1, x.shape[1], side, side)),))
        if x.dtype in (torch.float16, torch.float32):  # both are computed in float32, which is the library's
            return
        h = x.new_zeros((1, 128, 16, 16)).contiguous(memory_format=torch.channels_last)
        weight = x.new_zeros((128, 128, 3, 3))
        for bias in (weight[:, 0, 0, 0], weight[:, 0, 0, 0].float()):  # of one layer, or of two
            try:
                ops.conv2d(h, weight, bias, h, "none", "own")
            except OpError:  # none of ours runs here
                return

    def side(self, latents: int) -> int:
        """The input's side where that of the latents is this."""
        return latents

    def unpack(self) -> None:
        relaid.put_back(self.module)

    # -- layers ------------------------------------------------------------------------------------------------------

    def weights(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a layer in the dtype that x has."""
        weight, bias = layer.weight, layer.bias
        if weight.dtype == torch.float16 and x.dtype == torch.float32:
            return weight.float(), None if bias is None else bias.float()
        return weight, bias

    def called(self, layer: Any, x: Tensor) -> Tensor:
        """A LoRA layer in the place of a convolution, as the module that it is; the result in memory of our own, since
        a hook of the layer may hold or give what it returns, and sums are made in place."""
        if self.plan.enabled(f"{self.name}.conv2d"):
            self.counters.fell_back(f"{self.name}.conv2d", no_convolution(layer))
        y: Tensor = layer(x)
        return y.clone()

    def conv(self, layer: Any, x: Tensor) -> Sum:
        """A convolution with stride 1; on a GPU its bias is left to the next op."""
        if type(layer) is not nn.Conv2d:  # a LoRA layer
            return Sum(self.called(layer, x))
        weight, bias = self.weights(layer, x)
        if relaid.on_gpu(x):
            return Sum(self.convolve(x, weight), bias)
        return Sum(self.convolve(x, weight, bias))

    def whole_conv(self, layer: Any, x: Tensor) -> Tensor:
        """A convolution with its bias."""
        if type(layer) is not nn.Conv2d:
            return self.called(layer, x)
        y: Tensor = self.convolve(x, *self.weights(layer, x))
        return y

    def normed(self, norm: nn.GroupNorm, s: Sum, silu: bool = True, *, spent: bool = False) -> tuple[Sum, Tensor]:
        """What the sum came to, as far as it had to be added, and its norm; in place where the sum is `spent`."""
        s = s.taken()
        weight, bias = self.weights(norm, s.x)
        options = (weight, bias, norm.num_groups, norm.eps, silu)
        if s.weight is not None:
            if s.residual is not None or _ours(s):
                self.counters.ran(f"{self.name}.conv2d")
                join = self.joins[self._norm_of(s.residual is not None)]
                onto = self._onto(s, s.weight)
                x, n = join(s.x, s.weight, *options[:3], s.bias, s.residual, *options[3:], out=onto)
                return Sum(x), n
            s = Sum(self.convolve(s.x, s.weight), s.bias)
        if s.residual is None:
            return s, self.norm(s.x, *options, s.bias, out=s.x if spent and relaid.on_gpu(s.x) else None)
        if self.plan.enabled(f"{self.name}.residual_norm"):
            out = (s.x, torch.empty_like(s.x)) if relaid.on_gpu(s.x) else None
            x, n = self.residual_norm(s.x, s.residual, *options, s.bias, out=out)
            return Sum(x), n
        x = added(s)
        return Sum(x), self.norm(x, *options)

    def _norm_of(self, residual: bool) -> str:
        return f"{self.name}.{'residual_norm' if residual else 'group_norm_silu'}"

    def resnet(self, block: Any, s: Sum) -> Sum:
        """A residual block; its last convolution may be left to the next norm, in place of the block's input."""
        past, h = self.before_last(block, s)
        return self.later(block.conv2, h, residual=True).beside(past)

    def later(self, layer: Any, x: Tensor, *, residual: bool) -> Sum:
        """A convolution that may be left to a norm, which then overwrites x."""
        if self._norm_of(residual) in self.joins and relaid.on_gpu(x) and type(layer) is nn.Conv2d:
            weight, bias = self.weights(layer, x)
            return Sum(x, bias, None, weight)
        return self.conv(layer, x)

    @staticmethod
    def _onto(s: Sum, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the sum and its norm: that of the residual and of what is convolved. Without a residual nobody
        wants the sum, so both in one place."""
        x, shape = s.x, (s.x.shape[0], weight.shape[0], *s.x.shape[2:])
        if s.residual is not None and x.shape == shape:
            return s.residual, x
        new = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        return new if s.residual is None else s.residual, new

    def made(self, s: Sum) -> Sum:
        """The same sum with its convolution computed, so that each stage pays for its own."""
        if s.weight is None:
            return s
        if _ours(s):
            return Sum(self.convolve(s.x, s.weight, s.bias, s.residual, out=s.residual))
        return Sum(self.convolve(s.x, s.weight), s.bias, s.residual)

    def before_last(self, block: Any, s: Sum) -> tuple[Sum, Tensor]:
        """What passes by a block's convolutions, and what the last of them reads."""
        layer = block.conv_shortcut
        if type(layer) is nn.Conv2d and s.residual is None:  # first, so that the norm can take the input's place
            past = self._past(layer, s)
            h = self.normed(block.norm1, s, spent=True)[1]
        else:
            s, h = self.normed(block.norm1, s)
            past = s if layer is None else self._past(layer, s)
        del s  # of which `past` is all that is still needed
        made = self.later(block.conv1, h, residual=False)
        del h  # the memory of the first norm before that of the second
        return past, self.normed(block.norm2, made, spent=True)[1]

    def last_conv(self, block: Any, past: Sum, h: Tensor, out: Tensor | None = None) -> Tensor:
        """The end of a block whose result no GroupNorm reads: everything is added behind its last convolution."""
        if not relaid.on_gpu(h) or type(block.conv2) is not nn.Conv2d:
            return added(self.conv(block.conv2, h).beside(past), out)
        weight, bias = self.weights(block.conv2, h)
        y: Tensor = self.convolve(h, weight, total(bias, past.bias), past.x, out=past.x if out is None else out)
        return y

    def _past(self, layer: Any, s: Sum) -> Sum:
        """A block's shortcut, in new memory; a bias may be left to come."""
        if type(layer) is not nn.Conv2d or not relaid.on_gpu(s.x) or not self.plan.enabled(f"{self.name}.conv2d"):
            x = s.x if s.bias is None else s.x + s.bias.to(s.x.dtype)[:, None, None]
            return Sum(self.called(layer, x)) if type(layer) is not nn.Conv2d else self.conv(layer, x)
        # One tap: a product, through which the bias of its input goes apart.
        self.counters.ran(f"{self.name}.conv2d")
        weight, bias = self.weights(layer, s.x)
        matrix = weight[:, :, 0, 0]
        if s.bias is not None:
            bias = total(bias, matrix.float() @ s.bias.float())
        (N, C, H, W), K = s.x.shape, len(matrix)
        flat = s.x.permute(0, 2, 3, 1).reshape(-1, C)
        return Sum((flat @ matrix.t()).view(N, H, W, K).permute(0, 3, 1, 2), bias)

    def attend(self, attn: Any, s: Sum) -> Sum:
        s, n = self.normed(attn.group_norm, s, silu=False)
        n = n.permute(0, 2, 3, 1).flatten(1, 2)
        heads = (*n.shape[:2], attn.heads, -1)
        q, k, v = (self.product(layer, n).view(heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        y = self.product(attn.to_out[0], self.attention(q, k, v).flatten(2))
        y = y if type(attn.to_out[0]) is nn.Linear else y.clone()  # as in `called`
        return Sum(y.view(s.x.shape[0], *s.x.shape[2:], -1).permute(0, 3, 1, 2), s.bias, s.x)

    def product(self, layer: Any, x: Tensor) -> Tensor:
        if type(layer) is nn.Linear and layer.weight.dtype != x.dtype:
            return F.linear(x, *self.weights(layer, x))
        return linear(layer, x)

    def last(self, m: Any, s: Sum) -> Sum:
        """The norm and the convolution at the end of encoder or decoder."""
        return Sum(self.whole_conv(m.conv_out, self.normed(m.conv_norm_out, s)[1]))

    def middle(self, block: Any, s: Sum) -> Sum:
        s = self.resnet(block.resnets[0], s)
        for attn, resnet in zip(block.attentions, list(block.resnets)[1:], strict=True):
            s = self.resnet(resnet, s if attn is None else self.attend(attn, s))
        return self.made(s)


def _ours(s: Sum) -> bool:
    """Whether the convolution that is left to do would run in our kernel, which adds bias and residual on its way and
    takes the statistics of a norm, none of which changes the answer."""
    return s.weight is not None and ops.conv2d.backend(s.x, s.weight, s.bias, s.residual).name == "hopper"


def no_convolution(layer: Any) -> str:
    """What a layer is that only stands for a convolution."""
    return f"the convolution is a {type(layer).__module__.partition('.')[0]} {type(layer).__name__} layer"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def block_reason(block: Any) -> str | None:
    """Why a residual block cannot be served."""
    if type(block).__name__ != "ResnetBlock2D":
        return f"residual block {type(block).__name__}"
    if type(block.nonlinearity) is not nn.SiLU:
        return f"activation {type(block.nonlinearity).__name__} instead of SiLU"
    if block.time_emb_proj is not None or block.upsample is not None or block.downsample is not None:
        return "a residual block with a time embedding or resampling"
    if block.output_scale_factor != 1:
        return f"output_scale_factor {block.output_scale_factor}"
    return None


def shared_reason(module: Any, blocks: Any, kind: str) -> str | None:
    """Why an encoder or decoder with these up or down blocks cannot be served."""
    if type(module.conv_norm_out) is not nn.GroupNorm:
        return f"norm {type(module.conv_norm_out).__name__} instead of GroupNorm"
    if type(module.mid_block).__name__ != "UNetMidBlock2D":
        return f"middle block {type(module.mid_block).__name__}"
    for block in blocks:
        if type(block).__name__ != kind:
            return f"{'up' if kind.startswith('Up') else 'down'} block {type(block).__name__}"
    if not all(len(block.resnets) for block in blocks):
        return "a block without residual blocks"
    for resnet in (*module.mid_block.resnets, *(resnet for block in blocks for resnet in block.resnets)):
        reason = block_reason(resnet)
        if reason is not None:
            return reason
    return None


def plain_conv(conv: Any, stride: int, padding: int) -> bool:
    """Whether this is a 3x3 convolution as VAEs resample with, or a LoRA layer around one."""
    conv = getattr(conv, "base_layer", conv)
    return (
        isinstance(conv, nn.Conv2d)
        and conv.kernel_size == (3, 3)
        and conv.padding == (padding, padding)
        and conv.stride == (stride, stride)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )
