"""Fixtures of the cache tests."""

from __future__ import annotations

from collections import Counter

import pytest
from support.prompts import count_runs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_runs(monkeypatch)
