"""What a model launches once so that nothing compiles later: it has to be callable as it stands."""

from __future__ import annotations

import pytest
import torch

from fusedit import ops
from fusedit.models import registry
from fusedit.plan import Plan
from fusedit.runtime.counters import Counters


@pytest.mark.parametrize(("name", "needed"), [("flux", {"gated_residual", "gelu_tanh"}), ("z_image", {"swiglu"})])
def test_rare_ops_run(name: str, needed: set[str]) -> None:
    kind = registry()[name]
    model = kind(kind.tiny(), Plan(), Counters())
    before = {op: sum(ops.registry()[op].ran.values()) for op in needed}
    with torch.no_grad():
        model.rare(torch.zeros(1, 1, 8))
    assert all(sum(ops.registry()[op].ran.values()) > count for op, count in before.items())


def test_nothing_is_launched_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry()["flux"]
    model = kind(kind.tiny(), Plan(), Counters())
    monkeypatch.setattr(type(model), "rare", lambda *_: pytest.fail("a CPU has nothing to compile"))
    model.make_ready(torch.zeros(1))
