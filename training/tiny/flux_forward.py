"""FluxTransformer2DModel.forward for training: the same weights and arithmetic in fewer passes over memory."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from tiny.linear import joined_linear, linears
from tiny.norm import LAYER, Turn, gated, norm


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend over [B, S, H, D]; the result is [B, S, H * D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def head_norm(x: torch.Tensor, layer: nn.Module, turn: Turn, eps: float) -> torch.Tensor:
    """Return X [B, S, H * D] normed by LAYER in each head and turned, as [B, S, H, D]."""
    weight = cast(torch.Tensor, layer.weight)
    return norm(x.unflatten(-1, (-1, len(weight))), weight[None], turn=turn, eps=eps)


def _double(
    block: nn.Module, image: torch.Tensor, words: torch.Tensor, active: torch.Tensor, turn: Turn
) -> tuple[torch.Tensor, torch.Tensor]:
    attn, length = block.attn, words.shape[1]
    streams = (
        (
            words,
            block.norm1_context,
            block.ff_context,
            attn.to_add_out,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        ),
        (image, block.norm1, block.ff, attn.to_out[0], (attn.to_q, attn.to_k, attn.to_v)),
    )
    norms = ((attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k))
    places = (slice(None, length), slice(length, None))
    modulations = [stream[1].linear(active).chunk(6, dim=1) for stream in streams]
    heads = []
    for (x, *_, projections), (shift, scale, *_), (norm_q, norm_k), place in zip(
        streams, modulations, norms, places, strict=True
    ):
        q, k, v = linears(norm(x, 1 + scale, shift, kind=LAYER), *projections)
        here = (turn[0][place], turn[1][place])
        q, k = head_norm(q, norm_q, here, norm_q.eps), head_norm(k, norm_k, here, norm_k.eps)
        heads.append((q, k, v.unflatten(-1, q.shape[2:])))
    out = attention(*(torch.cat(pair, dim=1) for pair in zip(*heads, strict=True)))
    results = []
    for (x, _, mlp, project, _), (*_, gate, shift, scale, mlp_gate), place in zip(
        streams, modulations, places, strict=True
    ):
        x = gated(x, gate, project(out[:, place]))
        results.append(gated(x, mlp_gate, mlp(norm(x, 1 + scale, shift, kind=LAYER))))
    return results[1], results[0]


def _single(block: nn.Module, x: torch.Tensor, active: torch.Tensor, turn: Turn) -> torch.Tensor:
    attn = block.attn
    shift, scale, gate = block.norm.linear(active).chunk(3, dim=1)
    q, k, v, mlp = linears(norm(x, 1 + scale, shift, kind=LAYER), attn.to_q, attn.to_k, attn.to_v, block.proj_mlp)
    q, k = head_norm(q, attn.norm_q, turn, attn.norm_q.eps), head_norm(k, attn.norm_k, turn, attn.norm_k.eps)
    out = attention(q, k, v.unflatten(-1, q.shape[2:]))
    return gated(x, gate, joined_linear(out, block.act_mlp(mlp), block.proj_out))


def flux_forward(
    model: nn.Module,
    image: torch.Tensor,
    words: torch.Tensor,
    pooled: torch.Tensor,
    sigma: torch.Tensor,
    guidance: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the packed velocity of IMAGE [B, S, 64] with WORDS [B, L, D]; IDS [L + S, 3] are the words' first."""
    image = model.x_embedder(image)
    temb = model.time_text_embed(sigma.to(image.dtype) * 1000, guidance.to(image.dtype) * 1000, pooled)
    active, words = nn.functional.silu(temb), model.context_embedder(words)
    cos, sin = (table[:, 0::2].contiguous() for table in model.pos_embed(ids))
    for block in model.transformer_blocks:
        image, words = _double(block, image, words, active, (cos, sin))
    x, length = torch.cat([words, image], dim=1), words.shape[1]
    for block in model.single_transformer_blocks:
        x = _single(block, x, active, (cos, sin))
    scale, shift = model.norm_out.linear(active).chunk(2, dim=1)
    return cast(torch.Tensor, model.proj_out(norm(x[:, length:], 1 + scale, shift, kind=LAYER)))
