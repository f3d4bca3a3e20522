"""Attention by the fastest library kernel present, chosen by device, dtype, shape and mask, with no global switch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Backend, Cost, op, wide

Tensor = torch.Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    q, k, v = wide(q, k, v)
    logits = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], float("-inf"))
    p = torch.nan_to_num(logits.softmax(-1), nan=0.0) if key_mask is not None else logits.softmax(-1)
    return torch.einsum("bhst,bthd->bshd", p, v)


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
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    ).transpose(1, 2)
    return o.contiguous() if out is None else out.copy_(o)


def check(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> tuple[torch.Size]:
    _check.activation("attention", "q", q, "BSHD")
    B, _, H, D = q.shape
    _check.activation("attention", "k", k, "BTHD")
    _check.like("attention", "k", k, q, (B, k.shape[1], H, D))
    _check.like("attention", "v", v, q, k.shape)
    if key_mask is not None:
        if not isinstance(key_mask, Tensor) or key_mask.dtype is not torch.bool:
            raise OpError(f"attention: key_mask must be bool, True where a key counts, not {_check.show(key_mask)}")
        if tuple(key_mask.shape) != (B, k.shape[1]) or key_mask.device != q.device:
            raise OpError(
                f"attention: key_mask must be [B, T] = [{B}, {k.shape[1]}] on {q.device}, not {_check.show(key_mask)}"
            )
    return (q.shape,)


def choose(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Backend:
    return Backend("plain", "torch's scaled_dot_product_attention")


def cost(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Cost:
    B, S, H, D = q.shape
    return Cost(2 * q.nbytes + k.nbytes + v.nbytes, 4 * B * H * S * k.shape[1] * D)


CASES = (Case("small", (T((2, 5, 4, 16)), T((2, 7, 4, 16)), T((2, 7, 4, 16)))),)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
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
    """softmax(q k^T * scale) v -> [B,S,H,D] contiguous; scale None: D^-0.5; key_mask[B,T]: True where a key counts."""
    return plain(q, k, v, key_mask, scale, out=out)
