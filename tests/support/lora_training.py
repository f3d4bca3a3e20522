"""A pack of four drawn pictures, and a LoRA that is trained on them for a few steps."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

from tiny import batches, pictures
from train_lora import Lora

KIND = batches.Kind(128, 128, batches.SHORT_TEXT, False)
COLOURS = {"red apple": "#d22", "blue book": "#25c", "leaf": "#2a3", "moon": "#fc3"}


def write_pack(folder: Path) -> pictures.Pack:
    """Write what prepare_data.py writes, with a disc of one colour for each label, and read it."""
    records, blob = [], b""
    for label, colour in COLOURS.items():
        image = Image.new("RGBA", (256, 256))
        ImageDraw.Draw(image).ellipse((20, 20, 236, 236), fill=colour)
        data = io.BytesIO()
        image.save(data, "webp")
        records.append({"label": label, "style": "flat", "tags": [], "offset": len(blob), "size": data.tell()})
        blob += data.getvalue()
    (folder / "pictures.json").write_text(json.dumps(records))
    (folder / "pictures.bin").write_bytes(blob)
    return pictures.load_pack(folder, torch.device("cpu"), variants=1)


def losses(lora: Lora, steps: int) -> list[float]:
    """Take STEPS updates on one batch of four with the same noise; return each loss before its update."""
    lora.task.latents.prepare(KIND)
    lora.optimizer.rate.fill_(1.0)
    found = []
    for _ in range(steps):
        torch.manual_seed(0)
        loss = lora.task.loss(KIND)
        lora.optimizer.step(torch.autograd.grad(loss, lora.optimizer.weights))
        found.append(float(loss.detach()))
    return found
