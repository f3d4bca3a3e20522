"""Results files read back for the page, and refused in one sentence where they are not what the benchmarks write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.results import Row, Run
from fusedit.errors import UsageError

WORDS: Final = ("nan", "inf", "-inf")
"""What numbers that JSON lacks are in the files."""


def read(paths: Sequence[Path]) -> list[Run]:
    """Runs, oldest first.

    Raises:
        UsageError: a file cannot be read, or holds something else; says which and what.
    """
    return sorted(map(_run, paths), key=lambda run: (run.when, run.name))


class _Wrong(Exception):
    """What is wrong with a file, as the end of a sentence."""


def _run(path: Path) -> Run:
    try:
        data = _object(_json(path), "the file")
        rows = data.pop("rows", None)
        for name, (right, words) in _ENVIRONMENT.items():
            _judge(data, name, right, words, "the file")
        if not isinstance(rows, list):
            raise _Wrong("it has no rows")
        return Run(path.name, data, tuple(_row(row, f"row {place}") for place, row in enumerate(rows, 1)))
    except _Wrong as wrong:
        raise UsageError(
            f"{str(path)!r} is no results file of these benchmarks: {wrong}; name one that --json has written"
        ) from None


def _json(path: Path) -> Any:
    def refuse(word: str) -> NoReturn:
        raise _Wrong(f"it holds {word}, which is no JSON")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise _Wrong(f"it cannot be read ({(error.strerror or str(error)).lower()})") from None
    except UnicodeDecodeError:
        raise _Wrong("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        ends = not error.doc[error.pos :].strip()
        what = "it is empty" if not error.doc.strip() else "it ends too early" if ends else "it is not JSON"
        raise _Wrong(f"{what} (line {error.lineno}, column {error.colno})") from None
    except ValueError:  # a whole number of thousands of digits
        raise _Wrong("it holds a number that is too long") from None
    except RecursionError:
        raise _Wrong("it is nested too deep") from None


def _row(value: Any, where: str) -> Row:
    data = _object(value, where)
    for name, (right, words) in _ROW.items():
        _judge(data, name, right, words, where)
    if data["benchmark"] == "ceiling":
        for name in ("tb_s", "tflop_s"):
            _judge(data, name, _number, "a number", where)
    return Row.from_dict(data)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} is {_kind(value)}, not an object")
    return value


def _judge(data: Mapping[str, Any], name: str, right: Callable[[Any], bool], words: str, where: str) -> None:
    if right(data.get(name)):
        return
    if name not in data:
        raise _Wrong(f"{where} has no {name!r}")
    raise _Wrong(f"{name!r} of {where} must be {words}, not {_kind(data[name])}")


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# -- what each key may be; a key that may be left out may be null ---------------------------------------------------


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _above_0(value: Any) -> bool:
    return _number(value) and value > 0


def _or_none(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or right(value)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
_ENVIRONMENT: Final[_Rules] = {
    "device": (_text, "text"),
    "date": (_text, "text"),
    **{name: (_or_none(_text), "text") for name in ("time", "driver", "commit")},
    "power_limit_w": (_or_none(_number), "a number"),
    "versions": (_or_none(_texts), "an object of texts"),
}
_ROW: Final[_Rules] = {
    **dict.fromkeys(("benchmark", "model", "size", "plan"), (_text, "text")),
    **{name: (_or_none(_text), "text") for name in ("variant", "error")},
    "batch": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    **{name: (_or_none(_above_0), "a number above 0") for name in ("ms", "floor_ms")},
    "spread": (_or_none(_pair), "two numbers"),
    **{name: (_or_none(_number), "a number") for name in ("launches", "joules", "peak_bytes")},
    **{name: (_or_none(_number), "a number") for name in ("tb_s", "tflop_s", "percent_of_ceiling")},
    **{
        name: (lambda value: value is None or value in WORDS or _number(value), "a number")
        for name in ("rel_error", "stock_rel_error")
    },
    "correct": (lambda value: value is None or isinstance(value, bool), "true or false"),
}
