"""What train_flux.py and train_z_image.py share: options, data, resuming, the run and its checkpoints."""

from __future__ import annotations

import argparse
import json
import random
from abc import ABC, abstractmethod
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from tiny import batches, checkpoint, loop, models, pictures
from tiny.device import pick_device
from tiny.optim import MasterOptimizer

VARIANTS = 5
EARLY_UNTIL, DISTIL_FROM = 0.33, 0.72  # as progress, from 0 to 1


class Task(ABC):
    """One model's training objective."""

    name: str
    long_texts: tuple[int, ...]
    frozen: tuple[str, ...] = ()  # prefixes of parameters that sampling never uses

    def __init__(
        self,
        modules: nn.ModuleDict,
        pack: pictures.Pack,
        latents: batches.Latents,
        divisor: int,
        tokenizer_files: dict[str, Path],
    ) -> None:
        self.modules, self.latents, self.divisor = modules, latents, divisor
        self.teacher: nn.ModuleDict | None = None
        self.read_captions(pack, tokenizer_files)

    @abstractmethod
    def read_captions(self, pack: pictures.Pack, files: dict[str, Path]) -> None:
        """Make the token tables from the tokenizer.json FILES of `clip`, `t5` and `qwen`, as far as needed."""

    @abstractmethod
    def loss(self, kind: batches.Kind) -> torch.Tensor:
        """Return the loss of a random batch."""

    @torch.no_grad()
    def start_distilling(self, averages: dict[str, torch.Tensor]) -> None:
        """Make the teacher, which has the averaged weights."""
        self.teacher = deepcopy(self.modules).requires_grad_(False)
        for name, weight in self.teacher.named_parameters():
            if name in averages:
                weight.copy_(averages[name])


def options(doc: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="the whole schedule, over all calls")
    parser.add_argument("--stop-after", type=float, help="minutes after which this call ends")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "work" / "data")
    parser.add_argument("--vae", type=Path, required=True, help="where train_vae.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="a step count instead of the clock")
    parser.add_argument("--limit", type=int, help="use that many pictures only")
    parser.add_argument("--batch-divisor", type=int, default=1)
    return parser.parse_args()


def load_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return the trained autoencoder with its latents' scaling."""
    vae = models.make_vae()
    vae.load_state_dict(checkpoint.load(folder, "vae"))
    vae.register_to_config(**json.loads((folder / "vae.json").read_text())["scaling"])
    return vae.to(device, dtype).eval().requires_grad_(False)


def train(task_class: type[Task], doc: str | None) -> None:
    """Train as the command line says and write the checkpoint and the losses."""
    args = options(doc)
    device, name = pick_device(), task_class.name
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    args.out.mkdir(parents=True, exist_ok=True)
    report_file = args.out / f"{name}.json"
    past = json.loads(report_file.read_text()) if args.resume else {"steps": 0, "seconds": 0.0, "losses": []}
    stop_after = 60 * args.stop_after if args.stop_after else None
    clock = loop.Clock(args.minutes, past["seconds"], max_steps=args.steps, stop_after=stop_after)
    torch.manual_seed(past["steps"])

    pack = pictures.load_pack(args.data, device, VARIANTS, args.limit)
    latents = batches.Latents(pack, load_vae(args.vae, device, dtype))  # type: ignore[arg-type]
    modules = models.make_modules(name).to(device, dtype)
    tokenizer_files = {kind: args.data / "tokenizers" / kind / "tokenizer.json" for kind in ("clip", "t5", "qwen")}
    task = task_class(modules, pack, latents, args.batch_divisor, tokenizer_files)
    print(f"data ready after {clock.seconds() - past['seconds']:.1f} s", flush=True)
    frozen = frozenset(n for n, _ in modules.named_parameters() if n.startswith(task.frozen))
    optimizer = MasterOptimizer(
        modules, batches.muon_names(modules) - frozen, muon_lr=0.015, adam_lr=1.5e-3, frozen=frozen
    )
    if args.resume:
        optimizer.load(checkpoint.load(args.out, f"{name}.raw"), checkpoint.load(args.out, f"{name}.ema"))
        if past.get("distilling"):
            task.start_distilling(checkpoint.load(args.out, f"{name}.teacher"))
    stepper = loop.Stepper(task.loss, optimizer)

    def on_step(step: int, progress: float) -> None:
        if progress >= DISTIL_FROM and task.teacher is None:
            task.start_distilling(optimizer.average_state())
            print(f"distilling from step {step} on", flush=True)

    def pick(rng: random.Random, progress: float) -> batches.Kind:
        kind = batches.pick_kind(rng, progress < EARLY_UNTIL, task.long_texts, task.teacher is not None)
        latents.prepare(kind)
        return kind

    steps, losses = loop.run(
        stepper, clock, pick, rate=loop.two_phases(DISTIL_FROM), first_step=past["steps"], on_step=on_step
    )
    checkpoint.save(args.out, f"{name}.raw", optimizer.state())
    checkpoint.save(args.out, f"{name}.ema", optimizer.average_state())
    if task.teacher is not None:
        checkpoint.save(args.out, f"{name}.teacher", dict(task.teacher.named_parameters()))
    report = {"steps": steps, "seconds": round(clock.seconds(), 1), "distilling": task.teacher is not None}
    loop.write_report(report_file, report, past["losses"] + losses)
    print(f"{name}: {steps} steps, {clock.seconds():.0f} s", flush=True)
