"""read_tensors(): the tensors of a safetensors file, or one sentence that says why not. Never unpickles anything."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fusedit.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor

_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_CONVERT: Final = (
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'out.safetensors') converts one you trust"
)


def read_tensors(path: str | PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file by key, on the CPU, in the file's dtypes.

    Args:
        path: the file, or a folder with exactly one .safetensors file in it.

    Raises:
        LoraError: no such file, an empty or truncated one, a pickle (refused, whatever its name), or no safetensors.
    """
    return open_file(locate(path))[0]


def locate(path: str | PathLike[str]) -> Path:
    """The one file meant.

    Raises:
        LoraError: it does not exist, or the folder does not hold exactly one .safetensors file.
    """
    where = Path(path).expanduser()
    try:
        inside = sorted(where.glob("*.safetensors")) if where.is_dir() else None
        exists, plain = where.exists(), where.is_file()
    except (OSError, ValueError) as error:
        raise LoraError(f"{str(path)!r} cannot be read ({error}); give the path of a .safetensors file") from None
    if inside is not None:
        if len(inside) != 1:
            raise LoraError(f"folder {str(path)!r} holds {len(inside)} .safetensors files; name the LoRA file itself")
        return inside[0]
    if not plain:
        what = "is neither a file nor a folder" if exists else "does not exist"
        raise LoraError(f"{str(path)!r} {what}; give the path of a .safetensors file")
    return where


def open_file(where: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file; raises as `read_tensors`."""
    from safetensors import SafetensorError, safe_open

    _refuse_pickle(where)
    try:
        opener: Any = safe_open(where, framework="pt")  # its stubs leave the methods untyped
        with opener as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        raise LoraError(_damaged(where, error)) from None


def _refuse_pickle(path: Path) -> None:
    """By what it holds, not only by its name: a pickle runs code when it is loaded."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise LoraError(f"{str(path)!r} cannot be read ({error.strerror}); check its permissions") from None
    if not start:
        raise LoraError(f"{str(path)!r} is empty; download or save it again")
    # protocol 2 and above begin with 0x80; torch's zip archives with PK; a safetensors header is a length, then "{"
    pickled = start[:2] == b"PK" or (start[0] == 0x80 and start[1:2] <= b"\x05" and start[8:9] != b"{")
    if pickled:
        raise LoraError(
            f"{str(path)!r} is a pickle, which can run any code when loaded, so it was not opened; {_CONVERT}"
        )
    if path.suffix.lower() in _PICKLES:
        raise LoraError(
            f"{str(path)!r} has the name of a pickle, which runs code where others load it, so it was not opened; "
            f"rename it to .safetensors if it is in that format, else: {_CONVERT}"
        )


def _damaged(path: Path, error: Exception) -> str:
    """Truncated, or something else altogether: told by the length that the header states."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(min(length, size)) if 8 + length <= size else b""
    try:
        header = json.loads(head)
        end = 8 + length + max(value["data_offsets"][1] for key, value in header.items() if key != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        end = 0
    if end > size:
        return f"{str(path)!r} is truncated: {size} bytes of {end}; download it again"
    return f"{str(path)!r} is no safetensors file ({str(error).splitlines()[0]}); give a LoRA saved as safetensors"
