"""The data pack on the device: decoding, compositing with jittered placement, and banks that a step draws from."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image

from tiny.captions import BACKGROUNDS, HELD_OUT, pick_background
from tiny.styles import Style

SCALE_RANGE = (0.74, 0.99)  # of the shorter side
CHUNK_PIXELS = 1 << 25


@dataclass(frozen=True)
class Pack:
    """Training pictures as premultiplied RGBA bytes [P, 4, 256, 256], their records and K background names each."""

    pixels: torch.Tensor
    records: list[dict[str, object]]
    backgrounds: list[list[str]]


def load_pack(folder: Path, device: torch.device, variants: int, limit: int | None = None) -> Pack:
    """Read the pack without the held-out (concept, style) pairs, and draw VARIANTS backgrounds a picture."""
    held_out = set(HELD_OUT)
    records = json.loads((folder / "pictures.json").read_text())
    records = [r for r in records if (r["label"], r["style"]) not in held_out][:limit]
    blob = (folder / "pictures.bin").read_bytes()

    def decode(record: dict[str, int]) -> np.ndarray:
        data = io.BytesIO(blob[record["offset"] : record["offset"] + record["size"]])
        rgba = np.asarray(Image.open(data).convert("RGBA"))
        premultiplied = (rgba[..., :3].astype(np.uint16) * rgba[..., 3:] + 127) // 255
        return np.concatenate([premultiplied.astype(np.uint8), rgba[..., 3:]], axis=-1)

    with ThreadPoolExecutor() as pool:
        pixels = torch.from_numpy(np.stack(list(pool.map(decode, records)))).permute(0, 3, 1, 2)
    rng = random.Random(1)
    backgrounds = [[pick_background(rng) for _ in range(variants)] for _ in records]
    return Pack(pixels.contiguous().to(device), records, backgrounds)


def composite(rgba: torch.Tensor, colours: torch.Tensor, height: int, width: int, gen: torch.Generator) -> torch.Tensor:
    """Place premultiplied bytes [B, 4, S, S] on plain colours [B, 3], jittered; return [B, 3, H, W] in [-1, 1].

    The free space is used up to 80 % along a longer side, so that a picture is never pushed into a far corner.
    """
    batch, short = len(rgba), min(height, width)
    source = rgba.float() / 255
    if short != source.shape[-1]:
        source = F.interpolate(source, size=(short, short), mode="bilinear", antialias=True, align_corners=False)
    low, high = SCALE_RANGE
    side = (low + (high - low) * torch.rand(batch, generator=gen, device=rgba.device)) * short
    shift = 2 * torch.rand(batch, 2, generator=gen, device=rgba.device) - 1
    theta = torch.zeros(batch, 2, 3, device=rgba.device)
    for axis, extent in enumerate((width, height)):
        zoom = extent / side
        room = (zoom - 1) * (1.0 if extent == short else 0.8)
        theta[:, axis, axis] = zoom
        theta[:, axis, 2] = shift[:, axis] * room
    grid = F.affine_grid(theta, [batch, 4, height, width], align_corners=False)
    placed = F.grid_sample(source, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    picture = placed[:, :3] + colours[:, :, None, None] * (1 - placed[:, 3:])
    return picture.clamp(0, 1) * 2 - 1


def composites(pack: Pack, height: int, width: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield every picture in every variant, in order, in chunks of [B, 3, H, W]."""
    device, variants = pack.pixels.device, len(pack.backgrounds[0])
    gen = torch.Generator(device).manual_seed(seed)
    colours = torch.tensor([[BACKGROUNDS[name] for name in row] for row in pack.backgrounds], device=device) / 255
    which = torch.arange(len(pack.records), device=device).repeat_interleave(variants)
    for index in torch.arange(len(which), device=device).split(max(1, CHUNK_PIXELS // (height * width * 4))):
        yield composite(pack.pixels[which[index]], colours.flatten(0, 1)[index], height, width, gen)


def pixel_bank(pack: Pack, height: int, width: int, seed: int) -> torch.Tensor:
    """Return [P * K, 3, H, W] bytes."""
    return torch.cat([((x + 1) * 127.5).round().byte() for x in composites(pack, height, width, seed)])


@torch.no_grad()
def latent_bank(
    pack: Pack, vae: AutoencoderKL, height: int, width: int, seed: int, style: Style | None = None
) -> torch.Tensor:
    """Return [P, K, 16, H / 8, W / 8]: the scaled latents of every picture in every variant, in STYLE, bf16."""
    draw = style or (lambda x: x)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    parts = [
        ((vae.encode(draw(x).to(vae.dtype)).latent_dist.mode().float() - shift) * scale).bfloat16()
        for x in composites(pack, height, width, seed)
    ]
    return torch.cat(parts).unflatten(0, (len(pack.records), -1))
