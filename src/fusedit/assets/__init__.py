"""The embedded models and LoRAs: plain diffusers directories and files, trained by the scripts in training/."""

from __future__ import annotations

from pathlib import Path


def embedded_models() -> dict[str, Path]:
    """Return name -> directory of every embedded model: the folders here that hold a model_index.json."""
    return {index.parent.name: index.parent for index in sorted(Path(__file__).parent.glob("*/model_index.json"))}


def embedded_loras() -> dict[str, Path]:
    """Return name -> file of every embedded LoRA, in diffusers' format; a name begins with its model's."""
    return {file.stem: file for file in sorted(Path(__file__).parent.glob("loras/*.safetensors"))}
