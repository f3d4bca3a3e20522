"""What a LoRA layer is made of is looked for once a call, however many ask, and anew in the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.pipes import lora_state
from support.runs import FLUX, Z_IMAGE, Kind

import fusedit
from fusedit.runtime import branches
from fusedit.runtime.branches import looked_at_once, split_for_packing
from fusedit.session import Session


class _Looks:
    """Counts how often each layer is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[int, int] = {}
        split = branches.split

        def counted(layer: Any) -> Any:
            self.counts[id(layer)] = self.counts.get(id(layer), 0) + 1
            return split(layer)

        monkeypatch.setattr(branches, "split", counted)


def test_once_inside_and_anew_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, layer = _Looks(monkeypatch), torch.nn.Linear(2, 2)
    with looked_at_once():
        assert split_for_packing(layer) is split_for_packing(layer)
        with ThreadPoolExecutor(1) as other:  # where another call may run
            other.submit(split_for_packing, layer).result()
        with looked_at_once():
            split_for_packing(layer)
    split_for_packing(layer)
    split_for_packing(layer)
    assert looks.counts == {id(layer): 5}


def test_each_time_where_that_is_off_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, layer = _Looks(monkeypatch), torch.nn.Linear(2, 2)
    with looked_at_once(False):
        split_for_packing(layer)
        split_for_packing(layer)
    with pytest.raises(ValueError, match="inside"), looked_at_once():
        raise ValueError("inside")
    split_for_packing(layer)
    split_for_packing(layer)
    assert looks.counts == {id(layer): 4}


@pytest.mark.parametrize("kind", [FLUX, Z_IMAGE], ids=str)
@pytest.mark.parametrize("plan", ["exact", "fp8"])
def test_a_call_of_a_model_looks_once_at_each_layer(kind: Kind, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = kind.pipe()
    fusedit.accelerate(pipe, plan)
    fusedit.load_lora(pipe, lora_state(pipe), "x")
    kind.call(pipe)
    looks, call = _Looks(monkeypatch), Session.call
    most = []

    def watched(*args: Any) -> Any:
        looks.counts.clear()
        made = call(*args)
        most.append(max(looks.counts.values()))
        return made

    monkeypatch.setattr(Session, "call", watched)
    kind.call(pipe)
    assert len(most) == 3
    assert set(most[1:]) == {1}  # in the first it is looked whether other LoRAs are active, too
