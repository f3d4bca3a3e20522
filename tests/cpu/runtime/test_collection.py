"""Where Python's collection of cycles is held back: inside a block, however that ends, and while a LoRA is put in."""

from __future__ import annotations

import gc

import pytest
from support.pipes import lora_state
from support.runs import FLUX

import fusedit
from fusedit.lora.adapters import Injection
from fusedit.runtime.collection import no_collection


def test_it_goes_on_behind_the_outermost_block_and_behind_an_error() -> None:
    assert gc.isenabled()
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), no_collection():
        raise ValueError("inside")
    assert gc.isenabled()


def test_it_waits_while_a_lora_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, put = [], Injection.put

    def watched(self: Injection) -> None:
        seen.append(gc.isenabled())
        put(self)

    monkeypatch.setattr(Injection, "put", watched)
    pipe = FLUX.pipe()
    fusedit.load_lora(pipe, lora_state(pipe, names=("proj_out",)), "x")
    assert seen == [False]
    assert gc.isenabled()
