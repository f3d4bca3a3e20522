"""Settings for the tests on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedit import calibration


@pytest.fixture(scope="session", autouse=True)
def _small_calibration() -> Iterator[None]:
    """A plan in fp8 looks at four steps of small pictures before it converts; tests that need more say so.

    For the whole session, so that what fixtures of a session convert has the codes that tests convert.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "STEPS", 4)
        patch.setattr(calibration, "SIDE", 64)
        yield
