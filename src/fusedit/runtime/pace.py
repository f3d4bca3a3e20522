"""Pace: whether the host or the GPU is the limit of a step, timed once and then seen from step to step without waiting.

Once is not enough: a host that is busy for a while, or only later, takes several times as long to launch the same step
(an H200 beside a busy host: 133.6 ms a step of FLUX.1-dev that the GPU does in 118.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

Tensors = tuple[torch.Tensor, ...]
Body = Callable[[Tensors], torch.Tensor]

LATE: Final = 3
"""Steps in a row that waited for the host until it is called the limit: one may have been interrupted."""


class Pace:
    """How long launching took, and how long the GPU.

    Args:
        host_share: the host is the limit where launching takes more than this share of the GPU's time.
    """

    def __init__(self, host_share: float) -> None:
        event: Any = torch.cuda.Event
        self.host_share = host_share
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._host_ms: float | None = None
        self._late = 0

    def run(self, body: Body, given: Tensors) -> torch.Tensor:
        """`body(given)`, with its beginning and end noted."""
        self._host_ms = None  # nothing is known of a body that fails
        began = time.perf_counter()
        self._start.record()
        output = body(given)
        self._host_ms = 1e3 * (time.perf_counter() - began)
        self._end.record()
        return output

    def timed(self, body: Body, given: Tensors) -> tuple[torch.Tensor, bool]:
        """`body(given)`, and whether the host was the limit. Waits for the GPU before and after."""
        torch.cuda.current_stream().synchronize()
        output = self.run(body, given)
        self._end.synchronize()
        return output, self._slow_host()

    def behind(self) -> bool:
        """Before a step: whether the GPU had nothing left to do in each of the last few, for the host was too slow.

        Where the GPU is still busy with the last one it is the limit, and launching may only have waited for it.
        """
        if self._host_ms is None:
            return False
        self._late = self._late + 1 if self._end.query() and self._slow_host() else 0
        return self._late >= LATE

    def _slow_host(self) -> bool:
        assert self._host_ms is not None
        return self._host_ms > self.host_share * float(self._start.elapsed_time(self._end))
