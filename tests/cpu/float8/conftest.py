from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import whole_pipes

from fusedit.quantize import quantize


class Folders:
    """Whole tiny pipelines on disk: as they are and quantised; tests that change one take a copy."""

    def __init__(self, place: Path, pipe: Any) -> None:
        self.stock, self.quantised = place / "stock", place / "quantised"
        pipe.save_pretrained(self.stock)
        self.made = quantize(str(self.stock), self.quantised, dtype="fp32")


@pytest.fixture(scope="session", params=["flux", "z_image"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp(request.param), getattr(whole_pipes, f"{request.param}_pipe")())


@pytest.fixture(scope="session")
def flux_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("flux"), whole_pipes.flux_pipe())
