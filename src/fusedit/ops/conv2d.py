"""A convolution 3x3 or 1x1 with stride 1, its bias, activation and residual, on channels_last memory.

    y[n,k,h,w] = act(bias[k] + sum_{c,r,s} x[n, c, h + r - R//2, w + s - R//2] weight[k,c,r,s]) + residual[n,k,h,w]

N pictures, C input and K output channels, H, W pixels, R x R taps; x counts as 0 outside. act: `none`, `silu`, `relu`.
x, weight, residual, y of one dtype, bias of any; sums in fp32; on the own kernels rounded once, after the residual.
`algorithm` is `fastest`, by tables of compute capability and shape, from measurements; `library`; or `own`, any of ours
that can take the call. Who serves is asked with `conv2d.backend(...)`:
- `library`: cuDNN, then bias, activation and residual in one pass of ours (torch's own bias is a pass for itself).
- `hopper`: an implicit product, 3x3, tiles by TMA, bias and residual with the products (_conv_hopper.py). A residual
  that is not finite makes NaN of 64 channels of its pixel.
- `direct`: an implicit product by pointers, for few input channels in any layout (_conv_direct.py).
- `gather`: for few outputs, one product with all taps, then sums (_conv_gather.py).
- `plain`: torch, on a CPU.
The result is channels_last; x, residual and `out` may have any strides.
Bytes: x, weight, bias, residual read, y written. FLOPs: 2 N H W C K R^2. Exactness: reordered.
Source: convolution as an implicit product (Chetlur et al. 2014, cuDNN).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check, _conv, _conv_direct, _conv_epilogue, _conv_gather, _conv_hopper, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor
_FEW: Final = 8
"""Input channels up to which `direct` is faster than the library. H200: 3 -> 128 at 1024x1024 121 us against 447; 16 ->
512 at 128x128 39 against 33."""
_OURS: Final[dict[tuple[int, int], frozenset[tuple[int, int]]]] = {
    (9, 0): frozenset({(128, 128), (256, 256), (512, 512), (128, 256), (256, 128), (256, 512), (512, 256)})
}
"""Compute capability -> (C, K) of 3x3 convolutions for which `hopper`, which adds bias and residual on the way, is
faster than the library and a pass behind it. H200, beside a bias (and a residual): 128 channels at 1024x1024 0.437
(0.469) ms against 0.565 (0.622), 256 at 512x512 0.406 (0.425) against 0.468 (0.498), 512 at 256x256 0.388 (0.400)
against 0.428 (0.443). Without anything to add the library's product takes 0.99 to 1.27 times as long as `hopper`'s."""
ALGORITHMS: Final = ("fastest", "library", "own")


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    algorithm: str = "fastest",
) -> Tensor:
    del algorithm
    x, weight, bias, residual = wide(x, weight, bias, residual)
    return plain(x, weight, bias, residual, activation)


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    algorithm: str = "fastest",
    *,
    out: Tensor | None = None,
) -> Tensor:
    del algorithm
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    return _conv_epilogue.in_torch(y, None, residual, activation, out)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: object = "none",
    algorithm: object = "fastest",
) -> tuple[tuple[int, ...]]:
    if algorithm not in ALGORITHMS:
        raise OpError(f"conv2d: algorithm must be one of {', '.join(ALGORITHMS)}, not {_check.show(algorithm)}")
    return (_conv.check("conv2d", (1, 3), x, weight, bias, residual, activation),)


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *_: Any) -> Cost:
    """Bytes and FLOPs of a direct convolution, whatever algorithm computes it."""
    pixels = x.numel() // max(1, x.shape[1])
    moved = x.nbytes + weight.nbytes + pixels * weight.shape[0] * x.element_size()
    moved += sum(t.nbytes for t in (bias, residual) if t is not None)
    return Cost(moved, 2 * pixels * weight.numel())


def reads(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    """The result may lie on the residual, and on nothing else."""
    first = x[:0] if residual is None else residual
    return tuple(t for t in (first, x, weight, bias) if t is not None)


def choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    algorithm: str = "fastest",
) -> Backend:
    """The implementation that serves this call, and why no faster one does.

    Raises:
        OpError: one of ours was asked for, and none can take the call.
    """
    del bias
    usable, why = _triton.status(x.device, x.dtype)
    if usable and x.dtype == torch.float64:
        usable, why = False, "no kernels for float64"
    elif usable and x.is_cuda and x.dtype == torch.float32:
        usable, why = False, "products of float32 are the library's"
    elif usable and not _conv.countable(x):
        usable, why = False, f"{x.shape[0]} pictures of {x.shape[2]} x {x.shape[3]} are too many"
    elif usable and _triton.INTERPRETING and x.dtype == torch.bfloat16:  # it would multiply the bit patterns
        usable, why = False, "triton's interpreter cannot multiply bfloat16"
    if not usable and algorithm == "own":
        raise OpError(f"conv2d: algorithm 'own' cannot serve x {_check.show(x)}: {why}")
    if not x.is_cuda and not (usable and _triton.INTERPRETING):
        return Backend("plain", why)
    if not usable or algorithm == "library":
        return Backend("library", why)
    C, (K, _, R, _) = x.shape[1], weight.shape
    if K * R * R <= _conv_gather.COLUMNS and C >= 16:
        return Backend("gather", "")
    if C <= _FEW or not x.is_cuda:
        return Backend("direct", "")
    reason = _conv_hopper.reason(x, K, R, activation, residual)
    if algorithm == "own":
        return Backend("direct", reason) if reason else Backend("hopper", "")
    reason = reason or _slower(x, K)
    return Backend("library", reason) if reason else Backend("hopper", "")


def _slower(x: Tensor, K: int) -> str:
    """Why `hopper`, which could take the call, is not the fastest, or nothing."""
    capability = _triton.capability(x.device.index or 0)
    if (x.shape[1], K) not in _OURS.get(capability, ()):
        return f"not measured to be slower for {x.shape[1]} -> {K} on {capability}"
    return _conv_hopper.idle(x, K)


def _own(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, y: Tensor
) -> str:
    """Runs one of ours; says which it was."""
    if name == "gather":
        _conv_gather.gather(_conv.dense(x), weight, bias, residual, act, y)
        return name
    residual = None if residual is None else _conv.dense(residual)
    target = y if _conv.fits(y) else _conv.channels_last(y, y.shape)
    if name == "hopper" and _conv_hopper.reason(x, weight.shape[0], 3, act, residual, target):
        name = "direct"  # whatever a caller gave as `out`
    if name == "hopper":
        _conv_hopper.conv(x, _conv_direct.rows_of(weight), bias, residual, act, target)
    else:
        _conv_direct.direct(x, weight, bias, residual, act, target)
    if target is not y:
        y.copy_(target)
    return name


def _as_allocated(made: Tensor) -> Tensor:
    return made.contiguous(memory_format=torch.channels_last)


def builds() -> list[Build]:
    return [*_conv_direct.builds(), *_conv_gather.builds(norm=False), *_conv_epilogue.builds(), *_conv_hopper.builds()]


def _args(N: int, C: int, H: int, W: int, K: int, R: int = 3, layout: str = "channels_last", *more: Any) -> Any:
    return (T((N, C, H, W), layout), T((K, C, R, R), std=(R * R * C) ** -0.5), *more)


_B: Final = T((24,))


def _every_second(x: Tensor, weight: Tensor, *more: Any) -> Any:
    return (x, weight.contiguous(memory_format=torch.channels_last)[::2], *more)


def _some_channels(x: Tensor, weight: Tensor, *more: Any) -> Any:
    return (x[:, :16], weight[:, 5:21], *more)


def _one_output(x: Tensor, weight: Tensor, *more: Any) -> Any:
    return (x, weight[:1].expand_as(weight), *more)


CASES = (
    Case("small", (*_args(1, 64, 5, 7, 24), _B, T((1, 24, 5, 7), "channels_last"), "silu")),
    Case("relu", (*_args(2, 32, 4, 3, 24), _B, None, "relu")),
    Case("no-bias", _args(1, 40, 6, 5, 24)),
    Case("one-by-one", (*_args(2, 72, 3, 5, 24, 1), _B, T((2, 24, 3, 5)))),
    Case("residual", (*_args(1, 48, 5, 3, 24), None, T((1, 24, 5, 3))), alias=lambda *t: t[3]),
    Case("first", (*_args(1, 3, 9, 7, 24), _B), ("small", "odd")),
    Case("first-nchw", (*_args(3, 3, 5, 7, 24, 3, "dense"), _B), ("small", "strided")),
    Case("latents", (*_args(1, 16, 3, 5, 24, 3, "dense"), _B), ("small", "strided")),
    Case("last", (*_args(2, 32, 9, 7, 3), T((3,)), T((2, 3, 9, 7)), "silu"), ("small", "odd")),
    Case("last-odd", (*_args(1, 35, 1, 9, 3), T((3,), "gapped")), ("small", "odd")),
    Case("odd-channels", (*_args(1, 35, 5, 5, 13), T((13,)), T((1, 13, 5, 5))), ("small", "odd")),
    Case("transposed", (*_args(1, 32, 5, 6, 24, 3, "transposed"), _B), ("small", "strided")),
    Case("offset", (*_args(1, 32, 5, 6, 24, 3, "offset"), _B), ("small", "strided")),
    Case("fp32-bias", (*_args(1, 32, 5, 6, 24), T((24,), dtype=torch.float32)), ("small", "mixed")),
    Case("one-pixel", (*_args(3, 32, 1, 1, 24), _B), ("small", "odd")),
    Case("empty", (*_args(0, 32, 4, 4, 24), _B), ("small", "empty")),
    # Weights with gaps between the outputs, or with one output many times.
    Case("every-second-output", (*_args(1, 16, 4, 5, 48), _B), ("small", "strided"), packed=_every_second),
    Case("every-second-of-the-last", (*_args(1, 16, 4, 5, 6), T((3,))), ("small", "strided"), packed=_every_second),
    Case("some-channels", (*_args(1, 24, 4, 5, 40, 1), T((40,))), ("small", "strided"), packed=_some_channels),
    Case(
        "some-channels-of-the-last", (*_args(1, 24, 4, 5, 3, 1), T((3,))), ("small", "strided"), packed=_some_channels
    ),
    Case("one-output", (*_args(1, 16, 4, 5, 24), _B), ("small", "strided"), packed=_one_output),
    *(
        Case(f"vae-{name}", (*_args(1, 128, 200, 256, K), T((128,))), ("real",), packed=packed)
        for name, K, packed in (("every-second", 256, _every_second), ("one-output", 128, _one_output))
    ),
    *(
        Case(
            f"vae-{layer.C}-{layer.K}-{layer.R}x{layer.R}-{512 // layer.scale}",
            _args(1, layer.C, 512 // layer.scale, 512 // layer.scale, layer.K, layer.R, "channels_last", T((layer.K,))),
            ("real",),
        )
        for layer in _conv.VAE
    ),
    Case(
        "vae-residual",
        (*_args(2, 128, 200, 333, 128), T((128,)), T((2, 128, 200, 333), "channels_last")),
        ("real",),
        alias=lambda *t: t[3],
    ),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
    reads=reads,
    allocate=_conv.channels_last,
)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    algorithm: str = "fastest",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """act(conv(x[N,C,H,W], weight[K,C,R,R]) + bias[K]) + residual[N,K,H,W] -> [N,K,H,W] channels_last, R 1 or 3."""
    name = choose(x, weight, bias, residual, activation, algorithm).name
    if name in ("plain", "library"):
        conv2d.ran[name] += 1
    if name == "plain":
        made = conv2d.unchecked(x, weight, bias, residual, activation, out=out)
        return made if out is not None else _as_allocated(made)
    if name == "library":
        made = _as_allocated(F.conv2d(_conv.dense(x), weight, padding=weight.shape[-1] // 2))
        if bias is None and residual is None and activation == "none":
            return made if out is None else out.copy_(made)
        return _conv_epilogue.epilogue(made, bias, residual, activation, made if out is None else out)
    y = _conv.channels_last(x, (x.shape[0], weight.shape[0], *x.shape[2:])) if out is None else out
    conv2d.ran[_own(name, x, weight, bias, residual, activation, y)] += 1
    return y
