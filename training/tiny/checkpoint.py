"""Checkpoints: bf16 safetensors in shards small enough to move about, and a JSON of progress beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARD_BYTES = 14_000_000


def save(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write FOLDER/NAME-0.safetensors, -1, ..."""
    for old in folder.glob(f"{name}-*.safetensors"):
        old.unlink()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, value in tensors.items():
        value = value.detach().to("cpu", torch.bfloat16).contiguous().clone()
        if size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = value
        size += value.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"{name}-{index}.safetensors")


def load(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Read what `save` wrote, as fp32."""
    files = sorted(folder.glob(f"{name}-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no {name}-*.safetensors in {folder}: train it first")
    return {key: value.float() for file in files for key, value in load_file(file).items()}
