"""The baseline's own noise: how far stock is from stock when the same picture is drawn twice.

Whatever stock does not repeat, no accelerator can be held to. It is measured before anything is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusedit.drawing import Drawing
from fusedit.quality.metrics import psnr


@dataclass(frozen=True)
class BaselineNoise:
    """Stock against stock, same prompts and seeds.

    Attributes:
        pairs: how many pictures were drawn twice.
        psnr_db_min, psnr_db_median: infinite where stock repeats itself bit for bit; None with no pair.
        max_abs_diff: largest difference of a pixel's colour value.
    """

    pairs: int
    psnr_db_min: float | None
    psnr_db_median: float | None
    max_abs_diff: float

    @property
    def repeats(self) -> bool:
        """Whether every picture came out bit for bit the same."""
        return self.max_abs_diff == 0.0

    @classmethod
    def of(cls, twice: Sequence[tuple[Drawing, Drawing]]) -> BaselineNoise:
        values = [psnr(first.pixels, second.pixels) for first, second in twice]
        return cls(
            pairs=len(values),
            psnr_db_min=min(values, default=None),
            psnr_db_median=statistics.median(values) if values else None,
            max_abs_diff=max((float(abs(a.pixels - b.pixels).max()) for a, b in twice), default=0.0),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "repeats": self.repeats}
