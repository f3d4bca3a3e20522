"""Output files: whole or not at all, and checked for before anything is drawn.

A file is written under a temporary name in its own folder, flushed to disk and then renamed, so that a reader never
sees half of one and an interrupted run leaves none. Files that belong together are all written before the first rename.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fusedit.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEXT_KEY: Final = "fusedit"  # the PNG text chunk that holds the settings


def check_folder(folder: str | Path) -> Path:
    """Prove that files can be written below `folder`, which need not exist yet, and leave no trace.

    Raises:
        OutputError: a file is in the way, or the nearest existing folder takes no files.
    """
    path = Path(folder)
    if "\0" in str(path):
        raise OutputError(f"cannot write to {str(path)!r}: the name holds a NUL byte; choose another place")
    try:
        nearest = path
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise OutputError(f"cannot write to {str(path)!r}: {str(nearest)!r} is not a folder; choose another place")
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputError(f"cannot write to {str(path)!r}: {_why(error)}; choose another place") from None
    return path


def check_file(path: str | Path, suffix: str) -> Path:
    """Prove that a file of this name can be written.

    Raises:
        OutputError: it is a folder, has another suffix, or its folder takes no files.
    """
    target = Path(path)
    if target.suffix.lower() != suffix:
        raise OutputError(f"output {str(target)!r} does not end in {suffix}; name a {suffix} file")
    check_folder(target.parent)
    if target.is_dir():
        raise OutputError(f"output {str(target)!r} is a folder; name a {suffix} file")
    return target


def check_replaceable(path: Path, *marks: set[str]) -> None:
    """Prove that a JSON file of this name is absent, or an earlier one of fusedit's, which may be replaced.

    Args:
        marks: the keys by which ours is known; any one of the sets is enough.

    Raises:
        OutputError: the file is something else, for example a plan.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):  # the last: nested too deep for Python to read
        content = None
    if not isinstance(content, dict) or not any(mark <= content.keys() for mark in marks):
        raise OutputError(f"{str(path)!r} is there and is not from fusedit; choose another output, or move it away")


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: all of their bytes reach the disk before the first name appears.

    Raises:
        OutputError: any of them cannot be written; none of the temporary files is left.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            staged[path] = _stage(path, data)
        for path, temporary in list(staged.items()):
            os.replace(temporary, path)
            del staged[path]
    except OSError as error:
        raise OutputError(f"cannot write {str(error.filename or path)!r}: {_why(error)}") from None
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def png_bytes(pixels: NDArray[np.floating[Any]], settings: Mapping[str, Any] | None = None) -> bytes:
    """Encode float pixels [height, width, 3] in [0, 1] as 8-bit PNG, with the settings in its text chunk."""
    import numpy as np
    from PIL import Image, PngImagePlugin

    image = Image.fromarray((np.clip(pixels, 0.0, 1.0) * 255).round().astype("uint8"))
    info = PngImagePlugin.PngInfo()
    if settings is not None:
        info.add_text(TEXT_KEY, json.dumps(plain(settings), allow_nan=False))  # ASCII, so plain tEXt can hold it
    out = io.BytesIO()
    image.save(out, format="PNG", pnginfo=info)
    return out.getvalue()


def json_bytes(data: Any) -> bytes:
    """Valid JSON: infinities and NaN become the strings "inf", "-inf" and "nan"."""
    return (json.dumps(plain(data), indent=2, allow_nan=False) + "\n").encode()


def plain(data: Any) -> Any:
    """The same data with only JSON types and no number that JSON lacks."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return "nan" if math.isnan(data) else "inf" if data > 0 else "-inf"
    if isinstance(data, str | int | float) or data is None:
        return data
    return str(data)


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings that `png_bytes` put into a PNG's text chunk; empty if it has none."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        text = getattr(image, "text", {}).get(TEXT_KEY, "{}")
    settings = json.loads(text)
    return settings if isinstance(settings, dict) else {}


def _stage(path: Path, data: bytes) -> Path:
    # Opened by hand: tempfile.mkstemp makes files that only their owner can read.
    temporary = path.parent / f".{path.name[:80]}.{secrets.token_hex(6)}.part"
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
