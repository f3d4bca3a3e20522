"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.recorded import Recordings, record_graphs


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recordings]:
    """Steps on the CPU are captured, as recordings, by the rules for CUDA graphs."""
    made = record_graphs(monkeypatch)
    yield made
    assert made.packed == []
