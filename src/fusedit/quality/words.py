"""Numbers as people read them, the same in the terminal and on the page."""

from __future__ import annotations

import math


def decibels(value: float | None) -> str:
    if value is None:
        return "–"
    return "identical" if math.isinf(value) else f"{value:.1f} dB"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def milliseconds(value: float | None) -> str:
    return seconds(None if value is None else value / 1e3)


def size_in_bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f} GiB"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def small(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}" if value < 1e-2 else f"{value:.3f}"


def similarity(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}" if value > 0.9999 else f"{value:.4f}"
