"""Draw a model's sample sheet with the stock pipeline, or measure what its card states.

python training/sample_sheet.py tiny-flux --size 256x256 --out sheet.webp
python training/sample_sheet.py tiny-z-image --measure
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from tiny.captions import HELD_OUT

ASSETS = Path(__file__).parents[1] / "src" / "fusedit" / "assets"
SEEN = (
    "grinning face, 3d style",
    "cat face, noto style",
    "house, flat style",
    "sailboat, 3d style",
    "mushroom, noto style",
    "alarm clock, 3d style",
    "birthday cake, flat style",
    "bicycle, noto style",
    "butterfly, 3d style",
    "tropical fish, flat style",
    "soccer ball, noto style",
    "a red heart, 3d style, blue background",
    "banana, 3d style, pink background",
    "palm tree, flat style",
    "airplane, 3d style",
    "dog face, noto style",
)
PROMPTS = (*(f"{label}, {style} style" for label, style in HELD_OUT), *SEEN)
COLUMNS, LABEL_HEIGHT = 8, 12
DEFAULTS = {
    "tiny-flux": {"num_inference_steps": 20, "guidance_scale": 3.5},
    "tiny-z-image": {"num_inference_steps": 9, "guidance_scale": 0.0},
}


class Sampler:
    """Draws with one of the embedded models."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.pipe = DiffusionPipeline.from_pretrained(folder / name, torch_dtype=dtype)
        self.pipe.set_progress_bar_config(disable=True)
        self.settings = DEFAULTS[name]

    def draw(self, prompt: str, seed: int, width: int, height: int, **changes: float) -> np.ndarray:
        """Return a picture [H, W, 3] in [0, 1]."""
        images = self.pipe(
            prompt=prompt,
            width=width,
            height=height,
            max_sequence_length=32,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
            **{**self.settings, **changes},
        ).images
        return np.asarray(images[0])


def sheet(sampler: Sampler, width: int, height: int) -> Image.Image:
    """Return all PROMPTS in a grid: held-out combinations in the upper half."""
    rows = -(-len(PROMPTS) // COLUMNS)
    grid = Image.new("RGB", (COLUMNS * width, rows * (height + LABEL_HEIGHT)), "white")
    pen = ImageDraw.Draw(grid)
    for index, prompt in enumerate(PROMPTS):
        x, y = index % COLUMNS * width, index // COLUMNS * (height + LABEL_HEIGHT)
        pixels = (sampler.draw(prompt, index, width, height) * 255).round().astype(np.uint8)
        grid.paste(Image.fromarray(pixels), (x, y))
        pen.text((x + 2, y + height), prompt, fill="black")
    return grid


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    return float(-10 * np.log10(np.square(a - b).mean()))


def measure(name: str, folder: Path, width: int, height: int) -> dict[str, dict[str, float]]:
    """Return minimum, median and maximum over four prompts of what changes a picture: seed, dtype, step count."""
    prompts = PROMPTS[::8]
    full, half = Sampler(name, folder), Sampler(name, folder, torch.bfloat16)
    pictures = [full.draw(p, 0, width, height) for p in prompts]
    others = {
        "another seed": [full.draw(p, 1, width, height) for p in prompts],
        "bf16": [half.draw(p, 0, width, height) for p in prompts],
        "50 steps": [full.draw(p, 0, width, height, num_inference_steps=50) for p in prompts],
    }
    result = {}
    for kind, drawn in others.items():
        values = [psnr(a, b) for a, b in zip(pictures, drawn, strict=True)]
        result[kind] = {
            "min_db": round(min(values), 1),
            "median_db": round(statistics.median(values), 1),
            "max_db": round(max(values), 1),
        }
    return result


def main() -> None:
    """Draw or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(DEFAULTS))
    parser.add_argument("--models-at", type=Path, default=ASSETS, help="folder with the models")
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT")
    parser.add_argument("--out", type=Path, help="picture file of the sheet")
    parser.add_argument("--measure", action="store_true", help="print PSNR between seeds, dtypes, step counts")
    args = parser.parse_args()
    width, height = (int(part) for part in args.size.split("x"))
    if args.measure:
        print(json.dumps(measure(args.model, args.models_at, width, height), indent=1))
    elif args.out:
        sheet(Sampler(args.model, args.models_at), width, height).save(args.out, quality=80)
    else:
        parser.error("give --out FILE or --measure")


if __name__ == "__main__":
    main()
