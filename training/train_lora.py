"""Train a small LoRA for an embedded model on the training pictures, redrawn in one style.

    python training/train_lora.py tiny-flux --style blueprint --minutes 1.5
    python training/train_lora.py tiny-z-image --style risograph --minutes 1.5

The objective is the model's own (train_flux.py, train_z_image.py): plain flow matching first, then the guided velocity
of a frozen copy, because LoRA weights learnt from plain flow matching alone would undo the guidance that is built in.
Only the LoRA learns. Writes OUT/MODEL-STYLE.safetensors and training/logs/MODEL-STYLE.json.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from tiny import batches, loop, pictures
from tiny.device import pick_device
from tiny.lora import RANK, add_lora, frozen_names, save_lora
from tiny.optim import MasterOptimizer
from tiny.styles import STYLES
from tiny.trainer import Task
from train_flux import FluxTask
from train_z_image import ZImageTask

HERE = Path(__file__).parent
ASSETS = HERE.parent / "src" / "fusedit" / "assets"
TASKS: dict[str, type[Task]] = {task.name: task for task in (FluxTask, ZImageTask)}
# The tokenizers that the models were trained with, which prepare_data.py would not make again to the last merge.
TOKENIZERS = {
    "tiny-flux": {"clip": "tokenizer", "t5": "tokenizer_2"},
    "tiny-z-image": {"qwen": "tokenizer"},
}
SIZES = {(256, 256): 0.7, (128, 128): 0.1, (192, 192): 0.1, (320, 320): 0.1}  # a style is learnt where it is looked at
SMALL = {(128, 128): 1.0}
LEARNING_RATE = 2e-3
DISTIL_FROM = 0.6  # as progress, from 0 to 1
LICENCE = "Apache-2.0; trained on MIT and Apache-2.0 pictures, see training/MODEL_CARD.md"


@dataclass
class Lora:
    """An embedded model with a LoRA that learns, its objective and its optimizer."""

    pipe: DiffusionPipeline
    task: Task
    optimizer: MasterOptimizer

    def settle(self) -> None:
        """Put the averaged weights in place of the last ones."""
        names = self.optimizer.average_state()
        with torch.no_grad():
            for name, weight in self.task.modules.named_parameters():
                if name in names:
                    weight.copy_(names[name])


def prepare(name: str, style: str, pack: pictures.Pack, device: torch.device, divisor: int = 1) -> Lora:
    """Load the model and put a fresh LoRA on it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = DiffusionPipeline.from_pretrained(ASSETS / name, dtype=dtype).to(device)
    torch.manual_seed(0)
    modules = add_lora(pipe, name)
    latents = batches.Latents(pack, pipe.vae, STYLES[style])
    files = {kind: ASSETS / name / folder / "tokenizer.json" for kind, folder in TOKENIZERS[name].items()}
    task = TASKS[name](modules, pack, latents, divisor, files)
    optimizer = MasterOptimizer(modules, frozenset(), adam_lr=LEARNING_RATE, frozen=frozen_names(modules))
    return Lora(pipe, task, optimizer)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(TASKS))
    parser.add_argument("--style", choices=sorted(STYLES), required=True)
    parser.add_argument("--minutes", type=float, default=1.5, help="length of the schedule")
    parser.add_argument("--steps", type=int, help="a step count instead of the clock")
    parser.add_argument("--data", type=Path, default=HERE / "work" / "data", help="what prepare_data.py wrote")
    parser.add_argument("--out", type=Path, default=ASSETS / "loras")
    parser.add_argument("--logs", type=Path, default=HERE / "logs")
    parser.add_argument("--limit", type=int, help="use that many pictures only")
    parser.add_argument("--variants", type=int, default=3, help="placements of each picture")
    parser.add_argument("--small", action="store_true", help="128 px only, for a CPU")
    parser.add_argument("--batch-divisor", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train and write."""
    args = options()
    device = pick_device()
    pack = pictures.load_pack(args.data, device, args.variants, args.limit)
    lora = prepare(args.model, args.style, pack, device, args.batch_divisor)
    task, title = lora.task, f"{args.model}-{args.style}"
    sizes = SMALL if args.small else SIZES
    for height, width in sizes:
        task.latents.prepare(batches.Kind(height, width, batches.SHORT_TEXT, False))
    clock = loop.Clock(args.minutes, max_steps=args.steps)

    def on_step(step: int, progress: float) -> None:
        if progress >= DISTIL_FROM and task.teacher is None:
            task.start_distilling(lora.optimizer.average_state())
            print(f"distilling from step {step} on", flush=True)

    def pick(rng: random.Random, _: float) -> batches.Kind:
        height, width = rng.choices(list(sizes), weights=list(sizes.values()))[0]
        return batches.Kind(height, width, batches.SHORT_TEXT, task.teacher is not None)

    stepper = loop.Stepper(task.loss, lora.optimizer)
    steps, losses = loop.run(stepper, clock, pick, rate=loop.two_phases(DISTIL_FROM), log_every=100, on_step=on_step)
    lora.settle()
    for folder in (args.out, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{title}.safetensors"
    about = {"model": args.model, "style": args.style, "rank": RANK, "alpha": RANK, "steps": steps, "licence": LICENCE}
    save_lora(lora.pipe, file, {key: str(value) for key, value in about.items()})
    report = {**about, "seconds": round(clock.seconds(), 1), "device": str(device), "bytes": file.stat().st_size}
    loop.write_report(args.logs / f"{title}.json", report, losses)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
