"""Both architectures at their real width and a few layers, each once a file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gpu import freed
from support.gpu_runs import KINDS, GpuKind

from benchmarks.workloads import Workload


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> GpuKind:
    found: GpuKind = request.param
    return found


@pytest.fixture(scope="module")
def shallow(kind: GpuKind) -> Iterator[Workload]:
    """Real width, a few layers."""
    yield kind.make(**kind.shallow)
    freed()
