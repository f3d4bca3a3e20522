"""Difference maps: error of each pixel as a colour, amplified until the largest one shows, with the factor stated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Dark to bright through violet and orange; ordered in lightness, so that it also reads without colour.
_RAMP: Final = (
    (0, 0, 4),
    (40, 17, 89),
    (101, 26, 128),
    (183, 55, 121),
    (237, 105, 83),
    (253, 180, 99),
    (252, 253, 191),
)


def difference_map(reference: NDArray[np.float32], picture: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """The largest difference of the three colour values at each pixel, amplified.

    Returns:
        float32 [height, width, 3] in [0, 1], and the factor; 1 for identical pictures, whose map is black.
    """
    import numpy as np

    return amplified(np.abs(picture - reference).max(axis=2))


def amplified(error: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """An error map [height, width] as colours, and the factor it was multiplied by.

    The factor is the largest of 1, 2, 5, 10, 20, ... that leaves the largest error at or below 1: nothing is clipped.
    """
    import numpy as np

    largest = float(error.max(initial=0.0))
    factors = [lead * 10**zeros for zeros in range(9) for lead in (1, 2, 5)]
    factor = max((f for f in factors if largest * f <= 1.0), default=1) if largest > 0.0 else 1
    ramp = np.asarray(_RAMP, dtype=np.float32) / 255
    place = np.clip(error * factor, 0.0, 1.0) * (len(ramp) - 1)
    low = np.minimum(place.astype(np.int64), len(ramp) - 2)
    share = (place - low)[..., None]
    return (ramp[low] * (1 - share) + ramp[low + 1] * share).astype(np.float32), factor
