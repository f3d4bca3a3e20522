"""`--lora FILE[:SCALE]` of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusedit.errors import LoraError


@dataclass(frozen=True)
class LoraOption:
    """One LoRA that was asked for.

    Attributes:
        text: as given.
        file: that exists.
        scale: 1 where none was given.
    """

    text: str
    file: Path
    scale: float = 1.0

    @classmethod
    def of(cls, text: str) -> LoraOption:
        """Parse it. A colon may be part of the name: what exists as a whole has no scale behind it.

        Raises:
            LoraError: no such file, a folder without one LoRA, or a scale that is no number.
        """
        whole = _found(text)
        if whole is not None:
            return cls(text, whole)
        name, colon, number = text.rpartition(":")
        file = _found(name) if colon else None
        if file is None:
            raise LoraError(f"LoRA {text!r} does not exist; give FILE or FILE:SCALE with a .safetensors file")
        from fusedit.lora.life import checked_scale

        try:
            return cls(text, file, checked_scale(float(number)))
        except ValueError:  # of float(), and a LoraError is one
            raise LoraError(f"LoRA scale {number!r} of {text!r} is no finite number; give one such as 0.8") from None


def lora_options(texts: Sequence[str] | None) -> tuple[LoraOption, ...]:
    return tuple(map(LoraOption.of, texts or ()))


def _found(name: str) -> Path | None:
    """The file of this name, or the one LoRA in the folder of this name."""
    path = Path(name).expanduser()
    if not name or not path.exists():
        return None
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise LoraError(f"LoRA folder {name!r} holds {len(files)} .safetensors files; give the path of one file")
    return files[0]
