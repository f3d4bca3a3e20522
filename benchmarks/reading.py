"""Results files read back for the page, and refused in one sentence where they are not what the benchmarks write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.results import FP8, Row, Run
from fusedit.errors import UsageError
from fusedit.ops._verify import Error
from fusedit.quality.gates import Gates

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
            if name not in data:
                raise _Wrong(f"{where} has no {name!r}")
            _judge(data, name, _at_least_0, "a number, 0 or more", where)
    row = Row.from_dict(data)
    (_judge_pictures if row.benchmark == "pictures" else _judge_again)(row, where)
    return row


def _judge_pictures(row: Row, where: str) -> None:
    """The verdict on pictures is one on medians, by the rule of the plan's tier."""
    if row.error is not None and row.correct is None:
        return
    for name, (right, words) in _PICTURES.items():
        _judge(row.more, name, right, words, where)
    psnr, ssim = (row.more[key] for key in ("psnr_db", "ssim"))
    gates = Gates.of(row.variant, tier=row.plan, on="median")
    if row.correct is not (float(psnr) >= gates.min_psnr and float(ssim) >= gates.min_ssim):
        medians = f"psnr_db {_kind(psnr)} and ssim {_kind(ssim)}"
        raise _Wrong(f"'correct' of {where} is {_kind(row.correct)}, which {medians} beside it contradict")


def _judge_again(row: Row, where: str) -> None:
    """A stored verdict must be what the errors beside it give, by the rule of the measurement."""
    errors = (row.rel_error, row.stock_rel_error, row.peer_rel_error)
    error, stock, peer = (None if e is None else float(e) for e in errors)
    if row.benchmark == "ops":  # green needs this of both its errors, of which one is in the file
        known = error is not None and stock is not None
        right = not row.correct or not known or Error(0.0, error or 0.0).within(Error(0.0, stock or 0.0))
    elif row.benchmark == "convolutions":
        known = error is not None and stock is not None
        right = row.correct is None or (
            known and row.correct is Error(0.0, error or 0.0).within(Error(0.0, stock or 0.0))
        )
    else:
        again = replace(row)
        again.judge(error, stock, peer)
        right = row.correct in (None, again.correct)
    if not right:
        other = "peer" if row.plan in FP8 else "stock"
        beside = f"{other}_rel_error {_kind(errors[2 if other == 'peer' else 1])}"
        said = f"rel_error {_kind(row.rel_error)} and {beside}"
        raise _Wrong(f"'correct' of {where} is {_kind(row.correct)}, which {said} beside it contradict")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} is {_kind(value)}, not an object")
    return value


def _judge(data: Mapping[str, Any], name: str, right: Callable[[Any], bool], words: str, where: str) -> None:
    if right(data.get(name)) if name not in _NEVER_NULL else name not in data or right(data[name]):
        return
    if name not in data:
        raise _Wrong(f"{where} has no {name!r}")
    raise _Wrong(f"{name!r} of {where} must be {words}, not {_kind(data[name])}")


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# -- what each key may be; a key that may be left out may be null, but for those of _NEVER_NULL ---------------------


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_0(value: Any) -> bool:
    return _number(value) and value >= 0


def _whole_above_0(value: Any) -> bool:
    return type(value) is int and value > 0


def _error(value: Any) -> bool:
    return value in WORDS if isinstance(value, str) else _at_least_0(value)


def _decibels(value: Any) -> bool:
    return value == "inf" or _at_least_0(value)


def _above_0(value: Any) -> bool:
    return _number(value) and value > 0


def _or_none(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or right(value)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_at_least_0, value))


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


_NEVER_NULL: Final = ("variant", "versions", "tb_s", "tflop_s", "percent_of_ceiling")
"""Keys that may be left out, and are never written without a value."""
_SHOWN: Final = (
    *("launches", "joules", "peak_bytes", "tb_s", "tflop_s", "percent_of_ceiling"),
    *("weights_bytes", "transformer_peak_bytes", "lay_s"),
    *("import_s", "load_s", "ready_s", "text_s", "denoise_s", "vae_s", "cold_s", "first_step_s", "first_step_ms"),
    *("kernels_compiled", "kernels_loaded", "new_variants"),
)
"""Keys of the table that hold a number, 0 or more."""
_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
_ENVIRONMENT: Final[_Rules] = {
    "device": (_text, "text"),
    "date": (_text, "text"),
    **{name: (_or_none(_text), "text") for name in ("time", "driver", "commit")},
    "power_limit_w": (_or_none(_at_least_0), "a number, 0 or more"),
    "versions": (_texts, "an object of texts"),
}
_ROW: Final[_Rules] = {
    **dict.fromkeys(("benchmark", "model", "size", "plan"), (_text, "text")),
    "variant": (_text, "text"),
    "error": (_or_none(_text), "text"),
    "batch": (_whole_above_0, "a whole number above 0"),
    "steps": (_or_none(_whole_above_0), "a whole number above 0"),
    **{name: (_or_none(_above_0), "a number above 0") for name in ("ms", "floor_ms")},
    "spread": (_or_none(_pair), "two numbers, 0 or more"),
    **{name: (_at_least_0 if name in _NEVER_NULL else _or_none(_at_least_0), "a number, 0 or more") for name in _SHOWN},
    "plan_ms": (_or_none(_number), "a number"),  # a difference
    **{name: (_or_none(_error), "a number, 0 or more") for name in ("rel_error", "stock_rel_error", "peer_rel_error")},
    "correct": (lambda value: value is None or isinstance(value, bool), "true or false"),
}
_PICTURES: Final[_Rules] = {
    "psnr_db": (_decibels, "decibels, or inf"),
    "psnr_lowest_db": (_decibels, "decibels, or inf"),
    "ssim": (_number, "a number"),
    "ssim_lowest": (_number, "a number"),
    "keep_the_rule": (_at_least_0, "a number, 0 or more"),
    "pairs": (_whole_above_0, "a whole number above 0"),
}
