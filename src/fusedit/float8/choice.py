"""How the codes of a converted layer were chosen: words that every layer carries, so that a report counts what is so.

A layer's codes may be replaced after its conversion (in a pause, by `load_state_dict`), so what was said of all layers
at the conversion would not stay true. An empty choice says nothing: nearest codes as the plan asked for, or codes that
were in a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

READ: Final = "rounded for what they read in small pictures"
MADE_UP: Final = "rounded for made-up inputs"
LOADED: Final = "those that were loaded"
_NEAREST: Final = "the nearest ones: "


def nearest(reason: str) -> str:
    """The choice of codes that were to be rounded and could not be."""
    return _NEAREST + reason


def why_nearest(choices: Iterable[str]) -> list[str]:
    """The reasons among these choices."""
    return [choice.removeprefix(_NEAREST) for choice in choices if choice.startswith(_NEAREST)]


def sentences(choices: Iterable[str]) -> list[str]:
    """How many layers have which codes."""
    return [
        f"the codes of {count} layers are {choice}" if count > 1 else f"the codes of 1 layer are {choice}"
        for choice, count in Counter(choices).items()
        if choice
    ]
