"""What a training step sees: picture sizes and text lengths as real variables, captions as tokens, noise levels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import AutoencoderKL
from torch import nn

from tiny import captions, pictures
from tiny.styles import Style

TOKENS_A_STEP = 40_960
SHORT_TEXT, SHORT_CAPTIONS, LONG_CAPTIONS = 32, 4, 2

EARLY = {(128, 128): 0.95, (256, 256): 0.05}  # shapes are learned where a step holds four times the pictures
LATE = {
    (128, 128): 0.22,
    (192, 192): 0.13,
    (256, 256): 0.34,
    (320, 320): 0.09,
    (192, 256): 0.06,
    (256, 192): 0.06,
    (128, 256): 0.05,
    (256, 128): 0.05,
}
LONG_SHARE, LONG_SIZES = 0.12, ((128, 128), (256, 256))


class Kind(NamedTuple):
    """A kind of step: everything that is static in it."""

    height: int
    width: int
    text: int
    distil: bool

    def __str__(self) -> str:
        return f"{self.width}x{self.height}, {self.text} tokens" + (", distilled" if self.distil else "")

    @property
    def tokens(self) -> int:
        """Return the number of image tokens."""
        return self.height * self.width // 256

    def batch(self, divisor: int) -> int:
        """Return how many pictures make a step."""
        size = TOKENS_A_STEP // (self.tokens + self.text) // divisor
        return max(4, size // 8 * 8)


def pick_kind(rng: random.Random, early: bool, long_texts: tuple[int, ...], distil: bool) -> Kind:
    """Draw a kind of step: small pictures mostly while EARLY, every size later, long texts now and then."""
    sizes = EARLY if early else LATE
    height, width = rng.choices(list(sizes), weights=list(sizes.values()))[0]
    is_long = (height, width) in LONG_SIZES and rng.random() < LONG_SHARE
    return Kind(height, width, rng.choice(long_texts) if is_long else SHORT_TEXT, distil)


def noise_levels(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Draw sigma [B]: logit-normal, further up for larger pictures, with 15 % uniform."""
    location = 0.3 + 0.25 * math.log(tokens / 64)
    sigma = torch.sigmoid(location + 1.1 * torch.randn(batch, device=device))
    uniform = torch.rand(batch, device=device)
    return torch.where(torch.rand(batch, device=device) < 0.15, uniform, sigma).clamp(1e-3, 1.0)


def empty_share(kind: Kind) -> float:
    """Return how many captions are empty: fewer when distilling, where guidance does nothing to those."""
    return 0.03 if kind.distil else 0.1


Encode = Callable[[list[str], int], list[list[int]]]


@dataclass
class Captions:
    """Token tables of one tokenizer: short [P, K, 4, L], long [P, K, 2, M] (a short and a long one), empty ones."""

    short: torch.Tensor
    long: torch.Tensor
    empty: dict[int, torch.Tensor]
    encode: Encode
    pad: int

    def draw(self, at: tuple[torch.Tensor, ...], which: torch.Tensor, text: int, drop: torch.Tensor) -> torch.Tensor:
        """Return ids [B, text] of pictures AT (p, k), caption WHICH (a large random number), empty where DROP."""
        table = self.short if text <= self.short.shape[-1] else self.long
        ids = table[at[0], at[1], which % table.shape[2]].long()[:, :text]
        if text > ids.shape[1]:
            ids = torch.cat([ids, ids.new_full((len(ids), text - ids.shape[1]), self.pad)], dim=1)
        return torch.where(drop[:, None], self.empty_ids(text, len(ids), ids.device), ids)

    def empty_ids(self, text: int, batch: int, device: torch.device) -> torch.Tensor:
        """Return the empty caption's ids [B, text]."""
        if text not in self.empty:
            self.empty[text] = torch.tensor(self.encode([""], text), device=device)
        return self.empty[text].expand(batch, -1)


def caption_tables(pack: pictures.Pack, encoders: list[tuple[Encode, int, int, int]]) -> list[Captions]:
    """Write the captions and tokenise them with each (encode, short length, long length, pad id)."""
    rng = random.Random(2)
    short, long = [], []
    for record, backgrounds in zip(pack.records, pack.backgrounds, strict=True):
        about = (record["label"], record["tags"], record["style"])
        for background in backgrounds:
            short += [captions.caption(rng, *about, background) for _ in range(SHORT_CAPTIONS)]  # type: ignore[arg-type]
            long.append(captions.caption(rng, *about, background))  # type: ignore[arg-type]
            long.append(captions.long_caption(rng, *about, background))  # type: ignore[arg-type]
    device, shape = pack.pixels.device, (len(pack.records), len(pack.backgrounds[0]))

    def table(encode: Encode, texts: list[str], length: int, each: int) -> torch.Tensor:
        return torch.tensor(encode(texts, length), dtype=torch.int16).view(*shape, each, length).to(device)

    return [
        Captions(
            short=table(encode, short, short_length, SHORT_CAPTIONS),
            long=table(encode, long, long_length, LONG_CAPTIONS),
            empty={n: torch.tensor(encode([""], n), device=device) for n in {short_length, long_length}},
            encode=encode,
            pad=pad,
        )
        for encode, short_length, long_length, pad in encoders
    ]


class Latents:
    """Banks of latents by size, made when a size is first needed."""

    def __init__(self, pack: pictures.Pack, vae: AutoencoderKL, style: Style | None = None) -> None:
        self.pack, self.vae, self.style = pack, vae, style
        self.banks: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(self, kind: Kind) -> None:
        """Make the bank of a kind's size."""
        size = (kind.height, kind.width)
        if size not in self.banks:
            self.banks[size] = pictures.latent_bank(self.pack, self.vae, *size, seed=hash(size), style=self.style)

    def draw(self, kind: Kind, divisor: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return latents [B, 16, h, w] in fp32 and where they are in the tables (p, k)."""
        bank, batch = self.banks[kind.height, kind.width], kind.batch(divisor)
        p = torch.randint(bank.shape[0], (batch,), device=bank.device)
        k = torch.randint(bank.shape[1], (batch,), device=bank.device)
        return bank[p, k].float(), (p, k)


def muon_names(modules: nn.ModuleDict) -> frozenset[str]:
    """Name the hidden matrices: those inside blocks; not embeddings, not the first and last projections."""
    inside = ("blocks.", "layers.", "refiner.", ".block.")
    return frozenset(
        name
        for name, weight in modules.named_parameters()
        if weight.ndim == 2 and any(part in name for part in inside) and "relative_attention_bias" not in name
    )
