"""Many LoRAs one after another: nothing grows, and nothing is left of one in the next."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from support.loras import mixed_state
from support.pipes import lora_state, relative
from support.runs import FLUX, Kind, each_kind, rows

import fusedit
from fusedit.lora.adapters import tuner_layers
from fusedit.lora.record import _LOADED

CLOSE = 2e-5


@each_kind
def test_a_hundred_cycles_leave_memory_where_it_was(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    states = [mixed_state(pipe, seed=i).tensors for i in range(3)]

    def cycle(i: int) -> list[weakref.ref[Any]]:
        fusedit.load_lora(pipe, states[i % 3], f"n{i % 7}", 0.5)
        if i % 10 == 0:
            kind.call(pipe, num_inference_steps=2)
            pipe.fuse_lora()
        kept = [weakref.ref(layer) for _, layer in tuner_layers(pipe.transformer)]
        fusedit.unload_lora(pipe, f"n{i % 7}")
        return kept

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for i in range(10):
        cycle(i)
    kind.call(pipe, num_inference_steps=2)
    count = tensors()
    for i in range(10, 80):
        cycle(i)
    tracemalloc.start()  # for the last cycles alone, which it makes several times as long
    try:
        traced = [0, 0, 0]
        for moment, cycles in enumerate((range(80, 81), range(81, 100))):
            for i in cycles:
                kept = cycle(i)
            gc.collect()
            traced[moment] = tracemalloc.get_traced_memory()[0]
        fusedit.load_lora(pipe, states[0], "last")
        traced[2] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    fusedit.unload_lora(pipe, "last")
    kind.call(pipe, num_inference_steps=2)
    assert all(reference() is None for reference in kept)
    assert tensors() <= count
    # Python's cache of attribute names fills up by some 0.1 MB; what one LoRA takes, left by 19 of them, is 28 MB.
    assert traced[1] - traced[0] < traced[2] - traced[1]
    assert handle.report().active


def test_an_unloaded_lora_is_freed_without_a_collection_of_cycles() -> None:
    """On a GPU that is memory."""
    pipe = FLUX.pipe()
    fusedit.accelerate(pipe)
    fusedit.load_lora(pipe, mixed_state(pipe).tensors, "a")
    FLUX.call(pipe)
    kept = [weakref.ref(layer.lora_A["a"].weight) for _, layer in tuner_layers(pipe.transformer)]
    assert kept
    gc.disable()
    try:
        fusedit.unload_lora(pipe, "a")
        assert [reference() for reference in kept if reference() is not None] == []
    finally:
        gc.enable()


@each_kind
def test_a_swap_to_another_rank_or_more_layers_equals_a_fresh_pipeline(kind: Kind) -> None:
    """LL-02: rank 4 to rank 6 in the same layers, then to a LoRA with more of them."""
    pipe = kind.pipe()
    fusedit.accelerate(pipe)
    some = ("attn.to_q", "attention.to_q")
    for rank, names in ((4, some), (6, some), (6, (*some, "ff", "feed_forward", "proj_out", "final_layer"))):
        state = lora_state(pipe, rank=rank, names=names)
        fusedit.load_lora(pipe, state, "a")
        fresh = kind.pipe()
        fusedit.load_lora(fresh, state, "a")
        assert relative(kind.call(pipe), kind.call(fresh)) < CLOSE
        fusedit.unload_lora(pipe, "a")
    assert tuner_layers(pipe.transformer) == []


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_hotswap_of_diffusers_is_followed() -> None:
    """LL-02: in place, with the ranks that it pads to."""
    reference, pipe = FLUX.pipe(), FLUX.pipe()
    fusedit.accelerate(pipe)
    states = [lora_state(pipe, rank=rank, seed=rank, names=("attn", "ff")) for rank in (4, 6)]
    for each in (reference, pipe):
        each.enable_lora_hotswap(target_rank=8)
        each.load_lora_weights(dict(states[0]), adapter_name="a")
    first = FLUX.call(pipe)
    assert relative(first, FLUX.call(reference)) < CLOSE
    for each in (reference, pipe):
        each.load_lora_weights(dict(states[1]), adapter_name="a", hotswap=True)
    assert relative(FLUX.call(pipe), FLUX.call(reference)) < CLOSE
    assert relative(FLUX.call(pipe), first) > 1e-3


def test_a_pipeline_that_is_gone_leaves_no_record() -> None:
    pipe = FLUX.pipe()
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    transformer = weakref.ref(pipe.transformer)
    assert transformer() in _LOADED
    del pipe
    gc.collect()
    assert transformer() is None


@each_kind
def test_modulation_tables_are_used_again_once_a_lora_is_gone(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit.models import _modulation

    monkeypatch.setattr(_modulation, "TOKENS_PER_ROW", 1)
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    kind.call(pipe)
    once = rows(handle).hits
    assert once > 0
    fusedit.load_lora(pipe, mixed_state(pipe).tensors, "a")
    kind.call(pipe)
    fusedit.unload_lora(pipe, "a")
    before = rows(handle).hits
    kind.call(pipe)
    assert rows(handle).hits - before == once
