"""RMSNorm of queries and keys over the head, then rotary embedding, from the packed QKV, in one pass."""

from __future__ import annotations

import torch

from fusedit.errors import OpError
from fusedit.ops import _check
from fusedit.ops._cases import Case, T
from fusedit.ops._op import Cost, op, wide
from fusedit.ops._rows import plain_rms

Tensor = torch.Tensor


def reference(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    qkv, q_weight, k_weight, cos, sin = wide(qkv, q_weight, k_weight, cos, sin)
    c, s = cos[:, :, None], sin[:, :, None]
    made = []
    for x, weight in ((qkv[:, :, 0], q_weight), (qkv[:, :, 1], k_weight)):
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        n = n if weight is None else n * weight
        x0, x1 = n[..., 0::2], n[..., 1::2]
        made.append(torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2))
    return made[0], made[1]


def plain(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    turn = torch.complex(cos, sin).unsqueeze(2)
    made = []
    for place, weight in enumerate((q_weight, k_weight)):
        x = qkv[:, :, place]
        n = plain_rms(x, weight, eps).contiguous()  # as fp32, and never x itself
        pairs = torch.view_as_complex(n.unflatten(-1, (-1, 2)))
        if pairs.dtype is turn.dtype:
            pairs.mul_(turn)
        else:
            n = torch.view_as_real(pairs * turn).flatten(-2)
        made.append(n.to(x.dtype) if out is None else out[place].copy_(n))
    return made[0], made[1]


def check(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[torch.Size, torch.Size]:
    name = "qk_norm_rope"
    if not isinstance(qkv, Tensor) or qkv.ndim != 5 or qkv.shape[2] != 3:
        raise OpError(f"{name}: qkv must be [B, S, 3, H, D], not {_check.show(qkv)}")
    _check.activation(name, "qkv", qkv, "BS3HD")
    B, S, _, H, D = qkv.shape
    if D % 2 or D > 256:
        raise OpError(f"{name}: the head size D must be even and at most 256, not {D} (qkv {_check.show(qkv)})")
    for label, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _check.vector(name, label, weight, qkv, (D,), "D")
    for label, table in (("cos", cos), ("sin", sin)):
        rows = table.shape[0] if isinstance(table, Tensor) and table.ndim == 3 and table.shape[0] in (1, B) else B
        _check.vector(name, label, table, qkv, (rows, S, D // 2), ("B or 1", "S", "D/2"))
        if table.dtype not in (torch.float32, torch.float64):
            raise OpError(f"{name}: {label} must be float32, not {_check.show(table)}")
    if cos.shape != sin.shape:
        raise OpError(f"{name}: cos {_check.show(cos)} and sin {_check.show(sin)} must have one shape")
    return torch.Size((B, S, H, D)), torch.Size((B, S, H, D))


def reads(qkv: Tensor, *rest: Tensor | None, **more: Tensor | None) -> tuple[Tensor, ...]:
    others = (t for t in (*rest, *more.values()) if isinstance(t, Tensor))
    return (qkv[:, :, 0], qkv[:, :, 1], *others)


def cost(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> Cost:
    part = qkv.nbytes // 3 * 2
    small = sum(t.nbytes for t in (q_weight, k_weight, cos, sin) if t is not None)
    return Cost(2 * part + small, qkv.numel() // 3 * 2 * 7)


CASES = (
    Case(
        "small",
        (
            T((2, 5, 3, 4, 16)),
            T((16,)),
            T((16,)),
            T((1, 5, 8), dtype=torch.float32, fill="cos"),
            T((1, 5, 8), dtype=torch.float32, fill="sin"),
        ),
        alias=lambda qkv, *_: (qkv[:, :, 0], qkv[:, :, 1]),
    ),
)


@op(
    exactness="reordered",
    reference=reference,
    plain=plain,
    check=check,
    cost=cost,
    cases=CASES,
    reads=reads,
    mixed=True,
)
def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """rope(RMS(q) * q_weight), rope(RMS(k) * k_weight) of qkv[B,S,3,H,D] -> (q, k), each [B,S,H,D].

    `out` may be (qkv[:, :, 0], qkv[:, :, 1]): in place, the fast path.
    """
    return plain(qkv, q_weight, k_weight, cos, sin, eps, out=out)
