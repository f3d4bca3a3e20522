"""Train the autoencoder that both embedded models hold a copy of.

    python training/train_vae.py --minutes 3.4 --out DIR

Writes DIR/vae-0.safetensors and DIR/vae.json (scaling and shift of the latents, PSNR, losses).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from tiny import checkpoint, loop, models, pictures
from tiny.device import pick_device
from tiny.optim import MasterOptimizer

KINDS = {"128": (128, 64), "256": (256, 16)}  # side, batch: the same number of pixels a step
KL_WEIGHT, GRADIENT_WEIGHT, SQUARE_WEIGHT, SCALES = 3e-3, 0.5, 4.0, 3
PEAK, PEAK_WEIGHT = 3.5, 0.05


def reconstruction_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """L1 at three scales and on the differences of neighbours; squares, so that no spot is worth its while."""
    edges = (x.diff(dim=-1) - y.diff(dim=-1)).abs().mean() + (x.diff(dim=-2) - y.diff(dim=-2)).abs().mean()
    loss = GRADIENT_WEIGHT * edges + SQUARE_WEIGHT * (x - y).square().mean()
    for scale in range(SCALES):
        loss = loss + (x - y).abs().mean()
        if scale < SCALES - 1:
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return loss


class VaeTask:
    """A batch from a bank of composited pictures, through the autoencoder."""

    def __init__(self, vae: AutoencoderKL, banks: dict[str, torch.Tensor], batch_divisor: int = 1) -> None:
        self.vae, self.banks, self.divisor = vae, banks, batch_divisor

    def loss(self, kind: str) -> torch.Tensor:
        """Return the loss on a random batch."""
        bank, batch = self.banks[kind], max(1, KINDS[kind][1] // self.divisor)
        index = torch.randint(len(bank), (batch,), device=bank.device)
        x = bank[index].float() / 127.5 - 1
        mean, logvar = self.vae.encoder(x.to(self.vae.dtype)).float().chunk(2, dim=1)
        logvar = logvar.clamp(-30, 20)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        y = self.vae.decoder(z.to(self.vae.dtype)).float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        peaks = (mean.abs() - PEAK).clamp(min=0).square().sum(dim=1).mean()
        return reconstruction_loss(x, y) + KL_WEIGHT * kl + PEAK_WEIGHT * peaks


@torch.no_grad()
def measure(vae: AutoencoderKL, banks: dict[str, torch.Tensor], count: int = 512) -> dict[str, object]:
    """Return PSNR by size (mean over pictures) and the mean and deviation of the latents, the mode as in sampling."""
    result: dict[str, object] = {}
    for kind, bank in banks.items():
        values, latents = [], []
        for x in bank[:: max(1, len(bank) // count)].split(32):
            x = x.float() / 127.5 - 1
            z = vae.encode(x.to(vae.dtype)).latent_dist.mode()
            y = vae.decode(z).sample.float().clamp(-1, 1)
            values.append(-10 * ((x - y).square().mean(dim=(1, 2, 3)) / 4).log10())
            latents.append(z.float().flatten())
        flat = torch.cat(latents)
        result[f"psnr_db_{kind}"] = round(float(torch.cat(values).mean()), 2)
        result[f"latents_{kind}"] = {"mean": float(flat.mean()), "std": float(flat.std())}
    return result


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.2)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "work" / "data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="go on from the weights that an earlier call wrote there")
    parser.add_argument("--steps", type=int, help="a step count instead of the clock")
    parser.add_argument("--limit", type=int, help="use that many pictures only")
    parser.add_argument("--batch-divisor", type=int, default=1)
    args = parser.parse_args()
    device = pick_device()
    clock = loop.Clock(args.minutes, max_steps=args.steps)
    torch.manual_seed(0)
    pack = pictures.load_pack(args.data, device, variants=4, limit=args.limit)
    banks = {kind: pictures.pixel_bank(pack, side, side, seed=side) for kind, (side, _) in KINDS.items()}
    print(f"banks ready after {clock.seconds():.1f} s", flush=True)
    vae = models.make_vae()
    if args.start:
        vae.load_state_dict(checkpoint.load(args.start, "vae"))
    vae = vae.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    optimizer = MasterOptimizer(vae, frozenset(), adam_lr=1.5e-3, average=0.998)
    stepper = loop.Stepper(VaeTask(vae, banks, args.batch_divisor).loss, optimizer)

    def pick(rng: random.Random, _progress: float) -> str:
        return "256" if rng.random() < 0.3 else "128"

    args.out.mkdir(parents=True, exist_ok=True)
    steps, losses = loop.run(stepper, clock, pick)
    vae.load_state_dict(optimizer.average_state())
    result = measure(vae, banks)
    latents = result["latents_256"]
    assert isinstance(latents, dict)
    scaling = {"scaling_factor": round(1 / latents["std"], 5), "shift_factor": round(latents["mean"], 5)}
    checkpoint.save(args.out, "vae", optimizer.average_state())
    report = {"steps": steps, "seconds": round(clock.seconds(), 1), **result, "scaling": scaling}
    loop.write_report(args.out / "vae.json", report, losses)
    print(report, flush=True)


if __name__ == "__main__":
    main()
