"""Train tiny-flux's transformer and text encoders together.

    python training/train_flux.py --vae DIR --out DIR --minutes 7.4

The first 72 % is plain flow matching with empty captions now and then, at guidance 1. Then the averaged model is frozen
as the teacher and the model learns its guided velocity, at a random guidance scale.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from diffusers import FluxPipeline
from tokenizers import Tokenizer
from torch import nn

from tiny import batches, pictures, tokenizers
from tiny.flux_forward import flux_forward
from tiny.linear import use_fast_linears
from tiny.norm import use_fast_norms
from tiny.trainer import Task, train

GUIDANCE_RANGE = (1.0, 6.0)
CLIP_LENGTHS, T5_LENGTHS = (32, 77), (32, 128)


def image_ids(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the pipeline's image ids [rows * columns, 3]: 0, row, column."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] += torch.arange(rows, device=device)[:, None]
    ids[..., 2] += torch.arange(columns, device=device)
    return ids.flatten(0, 1)


class FluxTask(Task):
    """Flow matching in FluxPipeline's convention: timestep = sigma, velocity = noise - latents."""

    name = "tiny-flux"
    long_texts = (128, 512, 512)

    def read_captions(self, pack: pictures.Pack, files: dict[str, Path]) -> None:
        """Make the token tables of CLIP and T5."""
        clip = Tokenizer.from_file(str(files["clip"]))
        t5 = Tokenizer.from_file(str(files["t5"]))
        encode_clip = partial(self._encode, clip, "<|endoftext|>")
        encode_t5 = partial(self._encode, t5, "<pad>")
        self.clip, self.t5 = batches.caption_tables(
            pack,
            [(encode_clip, *CLIP_LENGTHS, clip.token_to_id("<|endoftext|>")), (encode_t5, *T5_LENGTHS, 0)],
        )
        self.modules["text_encoder_2"].set_attn_implementation("eager")  # type: ignore[operator]
        use_fast_norms(self.modules)
        use_fast_linears(self.modules)

    @staticmethod
    def _encode(tok: Tokenizer, pad: str, texts: list[str], length: int) -> list[list[int]]:
        return tokenizers.encode(tok, texts, length, pad)

    @staticmethod
    def velocity(
        modules: nn.ModuleDict,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        guidance: torch.Tensor,
        ids: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the packed velocity [B, S, 64]."""
        batch, channels, height, width = noisy.shape
        transformer = modules["transformer"]
        dtype, device = transformer.dtype, noisy.device
        pooled = modules["text_encoder"](ids[0]).pooler_output
        # The pipeline masks nothing. A mask of zeros, because making one copies from the host, which no graph allows.
        nothing = torch.zeros(batch, 1, 1, ids[1].shape[1], device=device, dtype=dtype)
        states = modules["text_encoder_2"](ids[1], attention_mask=nothing)[0]
        words = torch.zeros(states.shape[1], 3, device=device)
        output = flux_forward(
            transformer,
            FluxPipeline._pack_latents(noisy.to(dtype), batch, channels, height, width),
            states,
            pooled,
            sigma,
            guidance,
            torch.cat([words, image_ids(height // 2, width // 2, device)]),
        )
        return output.float()

    @torch.no_grad()
    def guided(
        self,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        guidance: torch.Tensor,
        ids: tuple[torch.Tensor, torch.Tensor],
        text: int,
    ) -> torch.Tensor:
        """Return the teacher's velocity without text, moved GUIDANCE times towards the one with text."""
        assert self.teacher is not None
        batch = len(noisy)
        empty = (
            self.clip.empty_ids(ids[0].shape[1], batch, noisy.device),
            self.t5.empty_ids(text, batch, noisy.device),
        )
        both = tuple(torch.cat(pair) for pair in zip(ids, empty, strict=True))
        one = torch.ones(2 * batch, device=noisy.device)
        out = self.velocity(self.teacher, noisy.repeat(2, 1, 1, 1), sigma.repeat(2), one, both)  # type: ignore[arg-type]
        told, untold = out.chunk(2)
        return untold + guidance[:, None, None] * (told - untold)

    def loss(self, kind: batches.Kind) -> torch.Tensor:
        """Return the flow-matching loss of a random batch, or the distance to the guided teacher."""
        clean, at = self.latents.draw(kind, self.divisor)
        batch, channels, height, width = clean.shape
        noise, sigma = torch.randn_like(clean), batches.noise_levels(batch, kind.tokens, clean.device)
        level = sigma[:, None, None, None]
        noisy = (1 - level) * clean + level * noise
        target = FluxPipeline._pack_latents(noise - clean, batch, channels, height, width)
        drop = torch.rand(batch, device=clean.device) < batches.empty_share(kind)
        which = torch.randint(1 << 16, (batch,), device=clean.device)
        clip_text = CLIP_LENGTHS[0] if kind.text == batches.SHORT_TEXT else CLIP_LENGTHS[1]
        ids = (self.clip.draw(at, which, clip_text, drop), self.t5.draw(at, which, kind.text, drop))
        guidance = torch.ones(batch, device=clean.device)
        if kind.distil:
            guidance = guidance.uniform_(*GUIDANCE_RANGE)
            target = self.guided(noisy, sigma, guidance, ids, kind.text)
        return (self.velocity(self.modules, noisy, sigma, guidance, ids) - target).square().mean()


if __name__ == "__main__":
    train(FluxTask, __doc__)
