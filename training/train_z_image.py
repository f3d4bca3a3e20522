"""Train tiny-z-image's transformer and text encoder together.

    python training/train_z_image.py --vae DIR --out DIR --minutes 7.7

The first 72 % is plain flow matching with empty captions now and then. Then the averaged model is frozen as the teacher
and the model learns its guided velocity, so that sampling needs no guidance.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from tiny import batches, pictures, tokenizers
from tiny.flux_forward import attention, head_norm
from tiny.gate import silu_gate
from tiny.linear import linears, use_fast_linears
from tiny.norm import LAYER, Turn, norm, use_fast_norms
from tiny.trainer import Task, train

GUIDANCE = 3.0
LENGTHS = (32, 64)  # multiples of 32, to which the pipeline pads
PAD = "<|endoftext|>"
MULTIPLE = 32


def positions(text: int, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [S, 3] of the image tokens (padded to a multiple of 32) and of the text tokens."""
    grid = torch.zeros(rows, columns, 3, dtype=torch.long, device=device)
    grid[..., 0].fill_(text + 1)
    grid[..., 1] = torch.arange(rows, device=device)[:, None]
    grid[..., 2] = torch.arange(columns, device=device)
    padding = torch.zeros(-rows * columns % MULTIPLE, 3, dtype=torch.long, device=device)
    words = torch.zeros(text, 3, dtype=torch.long, device=device)
    words[:, 0] = torch.arange(1, text + 1, device=device)
    return torch.cat([grid.flatten(0, 1), padding]), words


def block_forward(block: nn.Module, x: torch.Tensor, turn: Turn, adaln: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ZImageTransformerBlock.forward does, each norm with its modulation or gate and residual in one pass."""
    norms = (block.attention_norm1, block.attention_norm2, block.ffn_norm1, block.ffn_norm2)
    weights = torch.stack([layer.weight for layer in norms])[None]
    if adaln is not None:
        scale, gate, mlp_scale, mlp_gate = block.adaLN_modulation(adaln).chunk(4, dim=1)
        weights = weights * torch.stack([1 + scale, gate.tanh(), 1 + mlp_scale, mlp_gate.tanh()], dim=1)
    before, after, mlp_before, mlp_after = weights.unbind(1)
    attn, mlp, eps = block.attention, block.feed_forward, block.attention_norm1.eps

    q, k, v = linears(norm(x, before, eps=eps), attn.to_q, attn.to_k, attn.to_v)
    q, k = head_norm(q, attn.norm_q, turn, attn.norm_q.eps), head_norm(k, attn.norm_k, turn, attn.norm_k.eps)
    out = attn.to_out[0](attention(q, k, v.unflatten(-1, q.shape[2:])))
    x = norm(out, after, residual=x, eps=eps)
    out = mlp.w2(silu_gate(*linears(norm(x, mlp_before, eps=eps), mlp.w1, mlp.w3)))
    return norm(out, mlp_after, residual=x, eps=eps)


def transformer_forward(
    model: nn.Module, x: torch.Tensor, t: torch.Tensor, words: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Do what ZImageTransformer2DModel.forward does, for one size and padded captions: no lists, no masks.

    X is [B, C, h, w], WORDS [B, L, D] of which the first LENGTHS count; the result is [B, C, h, w].
    """
    batch, channels, height, width = x.shape
    rows, columns, device = height // 2, width // 2, x.device
    patches = x.view(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)
    image_ids, word_ids = positions(words.shape[1], rows, columns, device)
    turns = model.rope_embedder(torch.cat([image_ids, word_ids]))
    cos, sin, length = turns.real.contiguous(), turns.imag.contiguous(), len(image_ids)
    adaln = model.t_embedder(t * model.t_scale).type_as(x)

    image = model.all_x_embedder["2-1"](patches)
    padding = model.x_pad_token.expand(batch, len(image_ids) - rows * columns, -1)
    image = torch.cat([image, padding.to(image.dtype)], dim=1)
    for layer in model.noise_refiner:
        image = block_forward(layer, image, (cos[:length], sin[:length]), adaln)

    is_padding = torch.arange(words.shape[1], device=device)[None] >= lengths[:, None]
    words = torch.where(is_padding[..., None], model.cap_pad_token, model.cap_embedder(words))
    for layer in model.context_refiner:
        words = block_forward(layer, words, (cos[length:], sin[length:]))

    unified = torch.cat([image, words], dim=1)
    for layer in model.layers:
        unified = block_forward(layer, unified, (cos, sin), adaln)
    final = model.all_final_layer["2-1"]
    out = final.linear(norm(unified[:, : rows * columns], 1 + final.adaLN_modulation(adaln), kind=LAYER))
    return out.view(batch, rows, columns, 2, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


class ZImageTask(Task):
    """Flow matching in ZImagePipeline's convention: t = 1 - sigma, the output is latents - noise."""

    name = "tiny-z-image"
    long_texts = (64,)
    frozen = ("text_encoder.layers.2.", "text_encoder.norm.")  # the pipeline reads hidden_states[-2]

    def read_captions(self, pack: pictures.Pack, files: dict[str, Path]) -> None:
        """Make the token tables, chat template included."""
        tok = Tokenizer.from_file(str(files["qwen"]))
        self.pad = tok.token_to_id(PAD)
        (self.captions,) = batches.caption_tables(pack, [(partial(self._encode, tok), *LENGTHS, self.pad)])
        use_fast_norms(self.modules)
        use_fast_linears(self.modules)
        model = self.modules["transformer"]
        device = pack.pixels.device
        model.rope_embedder(torch.zeros(1, 3, dtype=torch.long, device=device))  # makes its tables, before any capture

    @staticmethod
    def _encode(tok: Tokenizer, texts: list[str], length: int) -> list[list[int]]:
        return tokenizers.encode(tok, texts, length, PAD, chat=True)

    def velocity(
        self, modules: nn.ModuleDict, noisy: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity noise - latents, [B, C, h, w]."""
        transformer, encoder = modules["transformer"], modules["text_encoder"]
        causal = {"full_attention": None}  # padding is on the right, where a causal encoder does not look
        states = encoder(ids, attention_mask=causal, output_hidden_states=True).hidden_states[-2]
        dtype = next(transformer.parameters()).dtype
        out = transformer_forward(transformer, noisy.to(dtype), 1 - sigma, states, (ids != self.pad).sum(dim=1))
        return -out.float()

    @torch.no_grad()
    def guided(self, noisy: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the frozen teacher's guided velocity (plain where the caption is empty: there both are the same)."""
        assert self.teacher is not None
        empty = self.captions.empty_ids(ids.shape[1], len(ids), ids.device)
        out = self.velocity(self.teacher, noisy.repeat(2, 1, 1, 1), sigma.repeat(2), torch.cat([ids, empty]))
        told, untold = out.chunk(2)
        return untold + GUIDANCE * (told - untold)

    def loss(self, kind: batches.Kind) -> torch.Tensor:
        """Return the flow-matching loss of a random batch, or the distance to the guided teacher."""
        clean, at = self.latents.draw(kind, self.divisor)
        batch = len(clean)
        noise, sigma = torch.randn_like(clean), batches.noise_levels(batch, kind.tokens, clean.device)
        level = sigma[:, None, None, None]
        noisy = (1 - level) * clean + level * noise
        drop = torch.rand(batch, device=clean.device) < batches.empty_share(kind)
        which = torch.randint(1 << 16, (batch,), device=clean.device)
        ids = self.captions.draw(at, which, kind.text, drop)
        target = self.guided(noisy, sigma, ids) if kind.distil else noise - clean
        return (self.velocity(self.modules, noisy, sigma, ids) - target).square().mean()


if __name__ == "__main__":
    train(ZImageTask, __doc__)
