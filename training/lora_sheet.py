"""Draw what the embedded LoRAs do: in each row a prompt and seed, without and with, by the stock pipelines.

python training/lora_sheet.py --out training/sheets/loras.webp
python training/lora_sheet.py --loras DIR --names tiny-flux-blueprint --size 128x128 --out sheet.webp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from fusedit.assets import embedded_loras
from PIL import Image, ImageDraw

from sample_sheet import ASSETS, DEFAULTS, LABEL_HEIGHT, Sampler

PROMPTS = (
    "red apple, 3d style",
    "house, 3d style",
    "butterfly, 3d style",
    "sailboat, flat style",
    "mushroom, noto style",
    "birthday cake, 3d style",
    "penguin, 3d style",
    "cactus, noto style",
)


def draw_all(sampler: Sampler, width: int, height: int) -> list[Image.Image]:
    """Draw PROMPTS, each with its own seed."""
    drawn = (sampler.draw(prompt, seed, width, height) for seed, prompt in enumerate(PROMPTS))
    return [Image.fromarray((picture * 255).round().astype(np.uint8)) for picture in drawn]


def sheet(loras: dict[str, Path], models: Path, width: int, height: int) -> Image.Image:
    """Return two rows a LoRA, without and with it, and a column a prompt."""
    grid = Image.new("RGB", (len(PROMPTS) * width, 2 * len(loras) * (height + LABEL_HEIGHT)), "white")
    pen, y = ImageDraw.Draw(grid), 0
    for name, file in loras.items():
        sampler = Sampler(next(model for model in DEFAULTS if name.startswith(model)), models)
        for label in ("without", "with LoRA"):
            if label != "without":
                sampler.pipe.load_lora_weights(file.parent, weight_name=file.name)
            for column, (prompt, picture) in enumerate(zip(PROMPTS, draw_all(sampler, width, height), strict=True)):
                grid.paste(picture, (column * width, y))
                pen.text((column * width + 2, y + height), f"{prompt}, {label}", fill="black")
            y += height + LABEL_HEIGHT
    return grid


def main() -> None:
    """Draw the sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loras", type=Path, help="folder with LoRAs; the embedded ones by default")
    parser.add_argument("--names", nargs="+", help="which; all by default")
    parser.add_argument("--models-at", type=Path, default=ASSETS, help="folder with the models")
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT")
    parser.add_argument("--out", type=Path, required=True, help="picture file")
    args = parser.parse_args()
    found = {f.stem: f for f in sorted(args.loras.glob("*.safetensors"))} if args.loras else embedded_loras()
    unknown = set(args.names or ()) - set(found)
    if unknown or not found:
        parser.error(
            f"no LoRA called {', '.join(sorted(unknown)) or 'anything'}; there are: {', '.join(found) or 'none'}"
        )
    width, height = (int(part) for part in args.size.split("x"))
    chosen = {name: found[name] for name in args.names or found}
    sheet(chosen, args.models_at, width, height).save(args.out, quality=85)


if __name__ == "__main__":
    main()
