"""Settings for the whole suite."""

from __future__ import annotations

import pytest
import torch

from fusedit import calibration

# The models here are tiny: a second thread costs more in waiting than it brings, many times more on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _small_calibration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a plan in fp8 looks at one step of small pictures before it converts; tests that need more say so."""
    if "gpu" not in request.path.parts:
        monkeypatch.setattr(calibration, "STEPS", 1)
        monkeypatch.setattr(calibration, "SIDE", 64)
