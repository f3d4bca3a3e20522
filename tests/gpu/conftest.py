"""Everything here needs a CUDA GPU; without one it is skipped, and says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, none is visible"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
