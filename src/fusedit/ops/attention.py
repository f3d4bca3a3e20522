"""Attention by the fastest library kernel present, chosen by device, dtype, shape and mask, with no global switch.

    o[b,s,h,:] = sum_t softmax_t(scale * q[b,s,h,:] . k[b,t,h,:]) v[b,t,h,:]     over t with key_mask[b,t], or all t

B batch, S queries, T keys, H heads, D head size; scale None: D^-0.5. q, k, v any strides (slices of a packed buffer);
the result is dense [B,S,H,D], so that flatten(2) copies nothing. Softmax and accumulation in fp32 inside the library
kernels. An item none of whose keys counts gets zeros, as from torch's scaled_dot_product_attention.

Order on CUDA: products (two and a softmax, for head sizes above 256), cuDNN (compute capability 9.0 and newer), flash,
memory-efficient, mathematical; each by its own aten entry point. A backend is passed over where it cannot take
the call, where torch.backends.cuda has it switched off, or where it once failed for these sizes;
`attention.backend(...)` says which one serves and why no earlier one does, and `attention.ran` counts. On any other
device: torch's scaled_dot_product_attention.
`out` costs a copy: the library kernels choose where they write.
Measured on one H200 (B1 H24 S4608 D128, bf16): cuDNN 607, flash 313, memory-efficient 162 TFLOP/s.
Bytes: q, k, v read, o written. FLOPs: 4 B H S T D. Exactness: reordered.
Source: Vaswani et al. 2017; the libraries are cuDNN's SDPA, FlashAttention-2 and the memory-efficient kernel in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _attention_products, _check, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op
from fusedit.ops._values import wide

Tensor = torch.Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    q, k, v = wide(q, k, v)
    heads = []
    for h in range(q.shape[2]):  # one head at a time: all logits of a picture at once would not fit everywhere
        logits = q[:, :, h] @ k[:, :, h].transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if key_mask is not None:
            logits = logits.masked_fill(~key_mask[:, None], float("-inf"))
        p = logits.softmax(-1)
        if key_mask is not None:
            p = p.masked_fill(~key_mask.any(1)[:, None, None], 0.0)
        heads.append(p @ v[:, :, h])
    return torch.stack(heads, dim=2)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    mask = None if key_mask is None else key_mask[:, None, None]
    q, scale = _upright(q, scale)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    return o.contiguous() if out is None else out.copy_(o)


def _upright(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """The same logits by a scale that is not negative: with one, flash and cuDNN give NaN."""
    return (q, scale) if scale is None or scale >= 0 else (-q, -scale)


def check(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> tuple[torch.Size]:
    return checked("attention", q, k, v, key_mask, scale)


def checked(
    name: str, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None
) -> tuple[torch.Size]:
    """`check` for an op of this name with the arguments of attention."""
    _check.activation(name, "q", q, "BSHD")
    B, _S, H, D = q.shape
    _check.activation(name, "k", k, "BTHD")
    _check.like(name, "k", k, q, (B, k.shape[1], H, D))
    _check.like(name, "v", v, q, k.shape)
    if key_mask is not None:
        if not isinstance(key_mask, Tensor) or key_mask.dtype is not torch.bool:
            raise OpError(f"{name}: key_mask must be bool, True where a key counts, not {_check.show(key_mask)}")
        if tuple(key_mask.shape) != (B, k.shape[1]) or key_mask.device != q.device:
            raise OpError(
                f"{name}: key_mask must be [B, T] = [{B}, {k.shape[1]}] on {q.device}, not {_check.show(key_mask)}"
            )
    if scale is not None and (type(scale) is not float or not math.isfinite(scale)):
        _check.number(name, "scale", scale, "finite or None")
    return (q.shape,)


def cost(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Cost:
    B, S, H, D = q.shape
    return Cost(2 * q.nbytes + k.nbytes + v.nbytes, 4 * B * H * S * k.shape[1] * D)


# -- the libraries: each takes q, k, v [B,H,*,D] and an additive bias [B,1,1,T] or None --


def _products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    assert bias is None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return _attention_products.products(q, k, v, scale).transpose(1, 2)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    return cast(
        Tensor,
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, False, False, scale=scale)[0],
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    assert bias is None
    return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[0])


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return cast(
        Tensor,
        torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, False, scale=scale)[0],
    )


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    return cast(
        Tensor, torch.ops.aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, False, None, scale=scale)[0]
    )


_LIBRARIES: Final[dict[str, Callable[..., Tensor]]] = {
    "products": _products,
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
_HALVES: Final = (torch.float16, torch.bfloat16)
_failed: dict[tuple[Any, ...], str] = {}


def _bias(key_mask: Tensor, q: Tensor) -> Tensor:
    """0 where a key counts, -inf elsewhere, as [B,1,1,T] with rows on 16 bytes, which the kernels ask for."""
    B, T_ = key_mask.shape
    padded = torch.zeros((B, -(-T_ // 8) * 8), dtype=q.dtype, device=q.device)
    return padded[:, :T_].masked_fill_(~key_mask, float("-inf"))[:, None, None]


def lies_well(t: Tensor) -> Tensor:
    """[B,S,H,D] as it lies, or a dense copy where its rows are not dense or not on 16 bytes."""
    size = t.element_size()
    rows = all(n == 1 or s * size % 16 == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    if t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and rows:
        return t
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a dense tensor, misaligned as it is


def _key(name: str, q: Tensor, k: Tensor, masked: bool) -> tuple[Any, ...]:
    return (name, q.device.index, q.dtype, tuple(q.shape), k.shape[1], masked)


def _refusal(name: str, q: Tensor, k: Tensor, masked: bool) -> str:
    """Why this backend cannot serve the call, or ""."""
    flags: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    capability = _triton.capability(q.device.index or 0)
    D, half = q.shape[-1], q.dtype in _HALVES
    dtype = str(q.dtype).removeprefix("torch.")
    if name == "products":
        if masked:
            return "takes no mask"
        if not half or D % 8:
            return f"takes half precision and head sizes in steps of 8, not {dtype} and {D}"
        usable, reason = _triton.status(q.device, q.dtype)
        if not usable:
            return reason
    elif name == "cudnn":
        if capability < (9, 0):
            return f"slower than flash on compute capability {capability[0]}.{capability[1]}"
        if not flags.cudnn_sdp_enabled():
            return "switched off in torch.backends.cuda"
        if not cudnn.is_available():
            return "cuDNN is not available"
        if not half or D % 8 or D > 256:
            return f"takes half precision and head sizes in steps of 8 up to 256, not {dtype} and {D}"
        if masked:
            return _cudnn_mask(q.device.index or 0)
    elif name == "flash":
        if capability < (8, 0):
            return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
        if not flags.flash_sdp_enabled():
            return "switched off in torch.backends.cuda"
        if masked:
            return "takes no mask"
        if not half or D % 8 or D > 256:
            return f"takes half precision and head sizes in steps of 8 up to 256, not {dtype} and {D}"
    elif name == "efficient":
        if not flags.mem_efficient_sdp_enabled():
            return "switched off in torch.backends.cuda"
        step = 8 if half else 4
        if q.dtype is torch.float64 or (q.dtype is torch.bfloat16 and capability < (8, 0)) or D % step:
            return f"takes head sizes in steps of {step} in {dtype}, not {D}"
    return _failed.get(_key(name, q, k, masked), "")


_mask_answers: dict[int, str] = {}


def _cudnn_mask(index: int) -> str:
    """Whether cuDNN gives zeros to an item none of whose keys counts: asked once a device, outside graph capture."""
    if index not in _mask_answers:
        if torch.cuda.is_current_stream_capturing():
            return "its masks were not tried before a graph capture"
        _mask_answers[index] = _try_cudnn_mask(torch.device("cuda", index))
    return _mask_answers[index]


def _try_cudnn_mask(device: torch.device) -> str:
    with torch.no_grad(), torch.cuda.device(device):
        x = torch.ones((2, 2, 64, 64), dtype=torch.bfloat16, device=device)
        mask = torch.arange(64, device=device)[None] < torch.tensor([[0], [40]], device=device)
        try:
            o = _cudnn(x, x, x, _bias(mask, x), None).float()
        except RuntimeError as error:
            return f"failed on a masked call ({_first_line(error)})"
        right = bool((o[0] == 0).all()) and bool((o[1] - 1).abs().max() < 0.01)
    return "" if right else "does not give zeros where no key counts"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def choose(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Backend:
    """The backend that serves this call, and why each faster one does not."""
    del v, scale
    if q.device.type != "cuda":
        return Backend("plain", f"scaled_dot_product_attention of torch on {q.device.type}")
    reasons: list[str] = []
    for name in _LIBRARIES:
        if name == "products" and q.shape[-1] <= 256:  # what it was not made for needs no reason
            continue
        reason = _refusal(name, q, k, key_mask is not None)
        if not reason:
            return Backend(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return Backend("plain", "; ".join(reasons))


_Q, _K = (2, 5, 4, 16), (2, 7, 4, 16)


def _packed(qkv: Tensor, *rest: Any) -> tuple[Any, ...]:
    return (*qkv.unbind(2), *rest)


def _no_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    mask[0] = False
    return q, k, v, mask


CASES = (
    Case("small", (T(_Q), T(_K), T(_K)), alias=lambda q, *_: q),
    Case("packed", (T((2, 9, 3, 4, 16)),), ("small", "strided"), packed=_packed),
    Case("joint", (T((2, 9, 3, 4, 16), "joint"),), ("small", "strided"), packed=_packed),
    Case("masked", (T(_Q), T(_K), T(_K), T((2, 7), fill="mask"))),
    Case("no-key-counts", (T(_Q), T(_K), T(_K), T((2, 7), fill="mask")), packed=_no_key),
    Case("scale", (T(_Q), T(_K), T(_K), None, 0.5)),
    Case("negative-scale", (T(_Q), T(_K), T(_K), None, -0.5)),
    Case("one-query", (T((1, 1, 2, 24)), T((1, 9, 2, 24)), T((1, 9, 2, 24))), ("small", "odd")),
    Case("odd-head", (T((1, 5, 2, 15)), T((1, 9, 2, 15)), T((1, 9, 2, 15))), ("small", "odd")),
    Case("transposed", (T(_Q, "transposed"), T(_K, "gapped"), T(_K, "offset")), ("small", "strided")),
    Case("empty-queries", (T((2, 0, 4, 16)), T(_K), T(_K)), ("small", "empty")),
    Case("vae-small", (T((1, 64, 1, 512)), T((1, 64, 1, 512)), T((1, 64, 1, 512)))),
    Case("flux", (T((1, 4608, 3, 24, 128)),), ("real",), packed=_packed),
    Case("z-image", (T((1, 4352, 3, 30, 128)),), ("real",), packed=_packed),
    Case("z-image-masked", (T((2, 1056, 3, 30, 128)), T((2, 1056), fill="mask")), ("real",), packed=_packed),
    Case("vae", (T((1, 4096, 1, 512)), T((1, 4096, 1, 512)), T((1, 4096, 1, 512))), ("real",)),
    Case("vae-1024", (T((1, 16384, 1, 512)), T((1, 16384, 1, 512)), T((1, 16384, 1, 512))), ("real",)),
    Case("vae-odd", (T((2, 1001, 3, 264)), T((2, 777, 3, 264)), T((2, 777, 3, 264))), ("real",)),
)


def builds() -> list[Build]:
    return _attention_products.builds()


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    builds=builds,
    backend=choose,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v -> [B,S,H,D] dense; scale None: D^-0.5; key_mask[B,T]: True where a key counts."""
    if k.shape[1] == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    name = choose(q, k, v, key_mask).name
    if name == "plain":
        attention.ran["plain"] += 1
        return plain(q, k, v, key_mask, scale, out=out)
    q, scale = _upright(q, scale)
    masked = key_mask is not None
    lying = [lies_well(t).transpose(1, 2) for t in (q, k, v)]
    bias = None if key_mask is None else _bias(key_mask, q)
    while True:
        try:
            o = _LIBRARIES[name](*lying, bias, scale).transpose(1, 2)
            break
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if name == "math":
                raise
            _failed[_key(name, q, k, masked)] = f"failed for these sizes ({_first_line(error)})"
            name = choose(q, k, v, key_mask).name
    attention.ran[name] += 1
    return o.contiguous() if out is None else out.copy_(o)
