from __future__ import annotations

from typing import Any

import pytest
from support import broken_rewrites, whole_pipes


@pytest.fixture(scope="session")
def flux() -> Any:
    """A tiny FluxPipeline; tests that change it take a deepcopy."""
    return whole_pipes.flux_pipe()


@pytest.fixture(scope="session")
def z_image() -> Any:
    return whole_pipes.z_image_pipe()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[broken_rewrites.Rewrites]:
    """accelerate() replaced by one whose rewrites do what a test tells them to."""
    return broken_rewrites.install(monkeypatch)
