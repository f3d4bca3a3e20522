"""Put trained weights together as plain diffusers directories.

    python training/export.py --checkpoints DIR [--models tiny-flux tiny-z-image] [--out src/fusedit/assets]

DIR holds what the training scripts wrote. With --untrained the weights are random (for trying a pipeline's layout).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, FluxPipeline, ZImagePipeline
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5TokenizerFast

from tiny import checkpoint, models, tokenizers

MODELS = ("tiny-flux", "tiny-z-image")
HERE = Path(__file__).parent
SHARD = "14MB"


def make_tokenizers(folder: Path, name: str) -> dict[str, object]:
    """Return the stock tokenizer classes over the trained tokenizer.json files."""
    if name == "tiny-flux":
        clip_file, t5_file = (str(folder / kind / "tokenizer.json") for kind in ("clip", "t5"))
        clip = CLIPTokenizer.from_pretrained(Path(clip_file).parent, model_max_length=77)
        t5 = T5TokenizerFast.from_pretrained(Path(t5_file).parent, model_max_length=512, extra_ids=0)
        return {"tokenizer": clip, "tokenizer_2": t5}
    qwen = Qwen2Tokenizer.from_pretrained(folder / "qwen", model_max_length=4096, padding_side="right")
    qwen.eos_token = "<|im_end|>"
    qwen.chat_template = tokenizers.CHAT_TEMPLATE
    return {"tokenizer": qwen}


def assemble(name: str, checkpoints: Path | None, tokenizer_folder: Path) -> DiffusionPipeline:
    """Return the pipeline in bf16, with trained weights where CHECKPOINTS is given."""
    modules, vae = models.make_modules(name), models.make_vae()
    if checkpoints is not None:
        unknown = modules.load_state_dict(checkpoint.load(checkpoints, f"{name}.ema"), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"the checkpoint has weights that {name} has not: {unknown}")
        vae.load_state_dict(checkpoint.load(checkpoints, "vae"))
        vae.register_to_config(**json.loads((checkpoints / "vae.json").read_text())["scaling"])
    parts = {key: module.to(torch.bfloat16).eval() for key, module in modules.items()}
    pipeline = FluxPipeline if name == "tiny-flux" else ZImagePipeline
    return pipeline(
        **parts,
        **make_tokenizers(tokenizer_folder, name),
        vae=vae.to(torch.bfloat16).eval(),
        scheduler=models.make_scheduler(name),
    )


def main() -> None:
    """Write each model's directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="what the training scripts wrote")
    parser.add_argument("--untrained", action="store_true", help="random weights instead")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which; all by default")
    parser.add_argument("--tokenizers", type=Path, default=HERE / "work" / "data" / "tokenizers", help="folder")
    parser.add_argument("--out", type=Path, default=HERE.parent / "src" / "fusedit" / "assets", help="where to write")
    args = parser.parse_args()
    if (args.checkpoints is None) != args.untrained:
        parser.error("give --checkpoints DIR or --untrained")
    for name in args.models:
        pipe = assemble(name, args.checkpoints, args.tokenizers)
        pipe.save_pretrained(args.out / name, max_shard_size=SHARD)
        for config in (args.out / name).rglob("*config.json"):
            tidy(config)
        print(name, sum(f.stat().st_size for f in (args.out / name).rglob("*") if f.is_file()), "bytes")


def tidy(config: Path) -> None:
    """Drop the keys that record where a part came from; name fp32 as the dtype that a plain from_pretrained gives.

    transformers loads in the dtype that config.json names and diffusers in fp32: without this they would differ.
    """
    content = json.loads(config.read_text())
    for key in ("_name_or_path", "name_or_path", "is_local", "local_files_only"):
        content.pop(key, None)
    if "dtype" in content:
        content["dtype"] = "float32"
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
