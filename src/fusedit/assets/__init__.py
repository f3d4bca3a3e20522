"""The embedded models: plain diffusers directories, trained by the scripts in training/."""

from __future__ import annotations

from pathlib import Path


def embedded_models() -> dict[str, Path]:
    """Return name -> directory of every embedded model: the folders here that hold a model_index.json."""
    return {index.parent.name: index.parent for index in sorted(Path(__file__).parent.glob("*/model_index.json"))}
