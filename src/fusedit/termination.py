"""SIGTERM as an exception, so that a command that is told to end cleans up what it has begun, as after Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any, Final

CODE: Final = 143  # as of a program that SIGTERM ends: 128 + 15


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def watch() -> None:
    """Raise Terminated at the first SIGTERM; further ones, which would break into the cleaning up, are ignored."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else whoever started us wants something else
        signal.signal(signal.SIGTERM, _raise)


def _raise(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
