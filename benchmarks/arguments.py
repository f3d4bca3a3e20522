"""What the command line takes: checked before anything is measured, refused in one sentence."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from benchmarks import gpu
from fusedit.errors import ArgumentError, FuseditError
from fusedit.files import check_file, check_replaceable

Command = TypeVar("Command", bound=Callable[..., Any])
Size = tuple[int, int]


def reporting(command: Command) -> Command:
    """Turn wrong use into one sentence and exit code 2; a defect keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except FuseditError as error:
            typer.echo(f"benchmarks: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def need_gpu(benchmark: str) -> None:
    if not gpu.present():
        raise ArgumentError(
            f"the {benchmark} benchmark needs a CUDA GPU and none is visible; run it where there is one"
        )


def names(text: str, known: Sequence[str], what: str) -> list[str]:
    """A comma-separated list of known names, each once."""
    chosen = list(dict.fromkeys(_items(text, what)))
    for name in chosen:
        if name not in known:
            raise ArgumentError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return chosen


def sizes(text: str) -> list[Size]:
    """A comma-separated list of WIDTHxHEIGHT, each once."""
    return list(dict.fromkeys(map(_size, _items(text, "size"))))


def batches(text: str) -> list[int]:
    """A comma-separated list of batch sizes, each once."""
    made = []
    for part in _items(text, "batch"):
        if not re.fullmatch(r"[0-9]{1,3}", part) or not 1 <= int(part) <= 64:
            raise ArgumentError(f"batch {part!r} is not a whole number from 1 to 64")
        made.append(int(part))
    return list(dict.fromkeys(made))


def _items(text: str, what: str) -> list[str]:
    """What stands between the commas, without spaces around it."""
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise ArgumentError(f"{what} is {text!r}; give at least one {what}")
    if not all(parts):
        raise ArgumentError(
            f"{what} is {text!r}, with nothing before or after a comma; give a {what} there, or drop it"
        )
    return parts


def _size(text: str) -> Size:
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text)
    if match is None:
        raise ArgumentError(f"size {text!r} is not WIDTHxHEIGHT, for example 1024x768")
    width, height = int(match[1]), int(match[2])
    for side in (width, height):
        if side % 16 or not 16 <= side <= 4096:
            raise ArgumentError(f"size {text!r} has a side of {side}; sides are multiples of 16 up to 4096")
    return width, height


def seconds(value: float) -> float:
    if not math.isfinite(value) or not 0 < value <= 600:
        raise ArgumentError(f"seconds is {value}; give a number above 0 and up to 600")
    return value


def count(value: int, what: str) -> int:
    if not 1 <= value <= 1000:
        raise ArgumentError(f"{what} is {value}; give a whole number from 1 to 1000")
    return value


def destination(path: Path | None) -> Path | None:
    """A JSON file that can be written, and replaces none that is not a results file."""
    if path is None:
        return None
    check_replaceable(check_file(path, ".json"), {"rows", "device"})
    return path
