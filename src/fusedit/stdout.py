"""Standard output of the command line, on which results may meet a full disk or a reader that has gone."""

from __future__ import annotations

import io
import sys
from typing import Any, Final

GONE: Final = 141  # as of a program that SIGPIPE ends: 128 + 13
UNWRITABLE: Final = 2


class _Guarded(io.FileIO):
    """The file behind standard output. The first write that fails ends the program; what is left goes nowhere."""

    failed = False

    def write(self, data: Any, /) -> int:
        if self.failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:  # `fusedit models | head`
            self.failed = True
            raise SystemExit(GONE) from None
        except OSError as error:
            self.failed = True
            sys.stderr.write(f"fusedit: standard output cannot be written: {error.strerror}\n")
            raise SystemExit(UNWRITABLE) from None


def guard() -> None:
    """Put it in the place of sys.stdout, for whoever prints: us, rich, or click's help."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):  # closed, or already somebody else's
        return
    try:
        stream.flush()
        number = stream.fileno()
    except (OSError, ValueError):  # no file behind it, or one that cannot be written: whoever prints finds out
        return
    made = io.BufferedWriter(_Guarded(number, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(
        made,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
