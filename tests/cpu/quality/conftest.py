from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import broken_rewrites
import tiny_pipes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by threads, and on a busy machine by a factor of twenty."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def flux() -> Any:
    """A tiny FluxPipeline; tests that change it take a deepcopy."""
    return tiny_pipes.flux_pipe()


@pytest.fixture(scope="session")
def z_image() -> Any:
    return tiny_pipes.z_image_pipe()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[broken_rewrites.Rewrites]:
    """accelerate() replaced by one whose rewrites do what a test tells them to."""
    return broken_rewrites.install(monkeypatch)
