"""Source: where a module was loaded from, for reading a weight of it again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fusedit.cache.checksum import checksums
from fusedit.errors import ArgumentError, RestoreError

INDEX: Final = "diffusion_pytorch_model.safetensors.index.json"
SINGLE: Final = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class Elsewhere:
    """The weight of one layer, in a file.

    Attributes:
        source: the files.
        path: of the layer.
        checksum: of the weight when it was given up.
    """

    source: Source
    path: str
    checksum: int

    @classmethod
    def of(cls, source: Source, path: str, weight: torch.Tensor) -> Elsewhere:
        return cls(source, path, checksums([weight])[0])

    def same(self, weight: torch.Tensor) -> bool:
        """Whether this is that weight, by its checksum: without reading the file."""
        return weight.dtype == self.source.dtype and checksums([weight])[0] == self.checksum

    def __call__(self) -> torch.Tensor:
        """The weight, on the CPU.

        Raises:
            RestoreError: the file is gone or holds something else by now.
        """
        weight = self.source.weight(self.path)
        if weight is None or checksums([weight])[0] != self.checksum:
            raise RestoreError(
                f"{self.path}.weight of {str(self.source)!r} is not what was converted; put the former files there "
                "again"
            )
        return weight


class Source:
    """The safetensors files of one diffusers model.

    Args:
        folder: that holds them.
        dtype: what the weights were converted to when they were loaded.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype

    @classmethod
    def of(cls, module: Any) -> Source:
        """Where this module was loaded from.

        Raises:
            ArgumentError: it does not say, or there are no safetensors files.
        """
        name = getattr(getattr(module, "config", None), "_name_or_path", None) or ""
        folder = _folder(str(name))
        if folder is None:
            raise ArgumentError(
                f"originals='reload' needs the files that {type(module).__name__} was loaded from, and {str(name)!r} "
                "holds no safetensors of it; use originals='cpu'"
            )
        return cls(folder, module.dtype)

    def weight(self, path: str) -> torch.Tensor | None:
        """The weight of this layer as it was when loaded, on the CPU; None where there is none any more."""
        from safetensors import SafetensorError, safe_open

        key = f"{path}.weight"
        try:
            with safe_open(self.folder / self._file(key), "pt") as file:
                return file.get_tensor(key).to(self.dtype)  # type: ignore[no-any-return]
        except (OSError, KeyError, ValueError, SafetensorError):
            return None

    def _file(self, key: str) -> str:
        """Which file holds a key: read anew each time, since files may be put there again."""
        index = self.folder / INDEX
        return str(json.loads(index.read_text(encoding="utf-8"))["weight_map"][key]) if index.is_file() else SINGLE

    def __str__(self) -> str:
        return str(self.folder)


def _folder(name: str) -> Path | None:
    """The folder with a transformer's files for what `from_pretrained` was given, in the local hub cache too."""
    if not name:
        return None
    places = [Path(name), Path(name) / "transformer"]
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        for file in (INDEX, SINGLE):
            for inside in (f"transformer/{file}", file):
                found = try_to_load_from_cache(name, inside)
                if isinstance(found, str):
                    places.append(Path(found).parent)
    return next((p for p in places if (p / INDEX).is_file() or (p / SINGLE).is_file()), None)
