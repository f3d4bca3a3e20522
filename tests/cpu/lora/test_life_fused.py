"""fuse_lora on an accelerated pipeline: what stock's does, and unfusing gives the very bits back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.loras import differing, mixed_state, pieces
from support.pipes import lora_state, relative
from support.runs import FLUX, Kind, each_kind, reasons

import fusedit
from fusedit.errors import LoraError
from fusedit.lora import fused
from fusedit.lora.adapters import tuner_layers

CLOSE = 2e-5
pytestmark = pytest.mark.filterwarnings("ignore:Already following adapters were merged")


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    """The transformer's own, whatever LoRA layers stand around them."""
    return {
        name.replace("base_layer.", ""): value.clone()
        for name, value in pipe.transformer.state_dict().items()
        if ".lora_" not in name
    }


def changed(pipe: Any, before: dict[str, torch.Tensor]) -> list[str]:
    now = weights(pipe)
    assert now.keys() == before.keys()
    return [name for name in now if not torch.equal(now[name], before[name])]


def loaded(kind: Kind, dtype: torch.dtype = torch.bfloat16, *names: str) -> tuple[Any, fusedit.Handle]:
    """An accelerated pipeline with a LoRA of each name."""
    pipe = kind.pipe().to(dtype)
    handle = fusedit.accelerate(pipe)
    for i, name in enumerate(names or ("a",)):
        fusedit.load_lora(pipe, mixed_state(pipe, seed=i).tensors, name)
    return pipe, handle


@each_kind
def test_twenty_cycles_of_fuse_and_unfuse_change_no_bit(kind: Kind) -> None:
    """LQ-05: stock's first cycle already leaves an error in bf16."""
    stock = kind.pipe().to(torch.bfloat16)
    fusedit.load_lora(stock, mixed_state(stock).tensors, "a")
    before = weights(stock)
    stock.fuse_lora()
    stock.unfuse_lora()
    assert changed(stock, before) != [], "stock's subtraction rounds: the test shows something"
    pipe, handle = loaded(kind)
    kind.call(pipe)  # packed by now
    for _ in range(20):
        pipe.fuse_lora(lora_scale=0.7)
        assert changed(pipe, before) != []
        pipe.unfuse_lora()
    assert changed(pipe, before) == []
    assert fused.kept_bytes(pipe.transformer) == 0
    assert not any("before fuse_lora" in note for note in handle.report().notes)


@each_kind
def test_every_state_around_fusing_equals_stock(kind: Kind) -> None:
    reference, (pipe, _) = kind.pipe(), loaded(kind, torch.float32, "a", "b")
    plain = kind.call(reference)
    for i, name in enumerate("ab"):
        fusedit.load_lora(reference, mixed_state(reference, seed=i).tensors, name)
    for call in CALLS:
        for each in (reference, pipe):
            call(each)
        assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
        assert pipe.fused_loras == reference.fused_loras
    assert relative(kind.call(pipe), plain) > 1e-2


CALLS: tuple[Callable[[Any], object], ...] = (
    lambda p: p.fuse_lora(lora_scale=0.5),
    lambda p: p.unfuse_lora(),
    lambda p: p.fuse_lora(adapter_names=["b"], safe_fusing=True),
    lambda p: p.fuse_lora(adapter_names=["a"]),
    lambda p: p.unfuse_lora(),
    lambda p: p.set_adapters(["b"], [1.3]),
    lambda p: p.transformer.fuse_lora(),
    lambda p: p.disable_lora(),  # the next forward unmerges
    lambda p: p.enable_lora(),
    lambda p: p.fuse_lora(),
    lambda p: p.unload_lora_weights(),  # its effect stays
)


def test_a_forward_with_the_loras_off_unfuses_bit_for_bit() -> None:
    pipe, _ = loaded(FLUX)
    before = weights(pipe)
    pipe.fuse_lora()
    pipe.disable_lora()
    FLUX.call(pipe)
    assert changed(pipe, before) == []
    assert not any(layer.merged for _, layer in tuner_layers(pipe.transformer))


@each_kind
def test_unload_lora_of_a_fused_one_unfuses_it_and_keeps_the_other_fused(kind: Kind) -> None:
    pipe, _ = loaded(kind, torch.bfloat16, "a", "b")
    before = weights(pipe)
    pipe.fuse_lora(adapter_names=["b"])
    with_b = weights(pipe)
    pipe.unfuse_lora()
    pipe.fuse_lora(adapter_names=["a"])
    pipe.fuse_lora(adapter_names=["b"])
    assert pipe.num_fused_loras == 2
    fusedit.unload_lora(pipe, "a")
    assert changed(pipe, with_b) == []
    assert pipe.fused_loras == {"b"}
    fusedit.unload_lora(pipe, "b")
    assert changed(pipe, before) == []
    assert pipe.fused_loras == set()
    assert tuner_layers(pipe.transformer) == []


def test_unloading_by_diffusers_keeps_the_effect_and_frees_the_copies_at_once() -> None:
    pipe, handle = loaded(FLUX)
    pipe.fuse_lora()
    merged = weights(pipe)
    copies = [layer.__dict__["unmerge"] for _, layer in tuner_layers(pipe.transformer)]
    assert any("MiB of weights from before fuse_lora are kept on the CPU" in note for note in handle.report().notes)
    assert fused.kept_bytes(pipe.transformer) > 0
    references = [t.untyped_storage() for copy in copies for t in copy.tensors.values()]
    gc.disable()
    try:
        pipe.unload_lora_weights()
        assert changed(pipe, merged) == []
        assert fused.kept_bytes(pipe.transformer) == 0
        assert all(copy._layer() is None for copy in copies), "a layer waits for a collection of cycles"
    finally:
        gc.enable()
    assert len(references) > 0


def test_scales_that_change_while_fused_do_not_matter_to_unfusing() -> None:
    """Stock subtracts the new scale, not the one that it has added."""
    pipe, _ = loaded(FLUX)
    before = weights(pipe)
    pipe.fuse_lora(lora_scale=0.5)
    pipe.set_adapters(["a"], [2.0])
    pipe.unfuse_lora()
    assert changed(pipe, before) == []


def test_weights_edited_while_fused_keep_the_edit_and_that_is_said() -> None:
    pipe, _ = loaded(FLUX, torch.float32)
    before = weights(pipe)
    pipe.fuse_lora()
    layer = pipe.transformer.proj_out.base_layer
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.warns(UserWarning, match="edited or converted while a LoRA was fused"):
        pipe.unfuse_lora()
    assert relative(layer.weight, before["proj_out.weight"] + 1.0) < 1e-6
    assert changed(pipe, before) == ["proj_out.weight"]


def test_a_failure_halfway_leaves_weights_and_scales_as_they_were() -> None:
    pipe, _ = loaded(FLUX, torch.bfloat16, "a", "b")
    pipe.fuse_lora(adapter_names=["a"])
    before, scales = weights(pipe), [dict(layer.scaling) for _, layer in tuner_layers(pipe.transformer)]
    with torch.no_grad():
        pipe.transformer.proj_out.lora_B["b"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        pipe.fuse_lora(adapter_names=["b"], lora_scale=0.5, safe_fusing=True)
    assert changed(pipe, before) == []
    assert [dict(layer.scaling) for _, layer in tuner_layers(pipe.transformer)] == scales
    assert all(layer.merged_adapters == ["a"] for _, layer in tuner_layers(pipe.transformer))
    pipe.unfuse_lora()
    plain = FLUX.pipe().to(torch.bfloat16).transformer.state_dict()
    assert changed(pipe, plain) == []


def test_fused_before_accelerate_is_unfused_by_subtraction_and_unload_lora_says_so() -> None:
    pipe = FLUX.pipe()
    plain = FLUX.call(pipe)
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    pipe.fuse_lora()
    fusedit.accelerate(pipe)
    merged = weights(pipe)
    with pytest.raises(LoraError, match="fused before accelerate"):
        fusedit.unload_lora(pipe, "a")
    assert changed(pipe, merged) == []
    pipe.unfuse_lora()
    fusedit.unload_lora(pipe, "a")
    assert relative(FLUX.call(pipe), plain) < CLOSE


def test_scales_of_a_fused_one_are_frozen_and_that_is_said() -> None:
    """LL-05."""
    pipe, _ = loaded(FLUX, torch.float32)
    pipe.fuse_lora()
    with_a = FLUX.call(pipe)
    with pytest.raises(LoraError, match="'a' is fused into the weights, so scales are frozen"):
        fusedit.set_loras(pipe, {"a": 0.5})
    with pytest.warns(UserWarning, match="scale 0.5 has no effect on LoRA 'a'"):
        frozen = FLUX.call(pipe, joint_attention_kwargs={"scale": 0.5})
    assert torch.equal(frozen, with_a)
    with pytest.raises(LoraError, match="is fused into it"):
        fusedit.load_lora(pipe, mixed_state(pipe).tensors, "b")
    pipe.unfuse_lora()
    half = FLUX.call(pipe, joint_attention_kwargs={"scale": 0.5})
    assert relative(half, with_a) > 1e-3


def test_restore_takes_the_wrapper_out_and_leaves_the_lora_fused() -> None:
    pipe, handle = loaded(FLUX)
    assert isinstance(vars(pipe.transformer)["fuse_lora"], fused.FuseLora)
    pipe.fuse_lora()
    merged = weights(pipe)
    handle.restore()
    assert "fuse_lora" not in vars(pipe.transformer)
    assert not any("unmerge" in vars(layer) for _, layer in tuner_layers(pipe.transformer))
    assert changed(pipe, merged) == []
    assert pipe.fused_loras == {"a"}


def test_two_pipelines_that_share_the_transformer_share_the_wrapper() -> None:
    first = FLUX.pipe()
    second = type(first)(**first.components)
    handles = [fusedit.accelerate(pipe) for pipe in (first, second)]
    handles[0].restore()
    assert isinstance(vars(first.transformer)["fuse_lora"], fused.FuseLora)
    handles[1].restore()
    assert "fuse_lora" not in vars(first.transformer)


def test_copies_and_pickles_are_stock() -> None:
    pipe, _ = loaded(FLUX, torch.float32)
    plain = FLUX.call(FLUX.pipe())
    pipe.fuse_lora()
    copied = copy.deepcopy(pipe)
    file = io.BytesIO()
    torch.save(pipe.transformer, file)
    file.seek(0)
    for transformer in (copied.transformer, torch.load(file, weights_only=False)):
        assert not any(isinstance(value, fused.FuseLora) for value in vars(transformer).values())
        for _, layer in tuner_layers(transformer):
            layer.unmerge()
        assert all(not layer.merged for _, layer in tuner_layers(transformer))
    pickle.loads(pickle.dumps(copied.transformer))
    assert relative(FLUX.call(copied), plain) > 1e-3  # unmerged, and active again
    copied.unload_lora_weights()
    assert relative(FLUX.call(copied), plain) < CLOSE
    assert all(layer.merged for _, layer in tuner_layers(pipe.transformer))


@each_kind
def test_a_fused_and_unloaded_lora_runs_fused_kernels_again(kind: Kind) -> None:
    pipe, handle = loaded(kind, torch.float32)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    before = len(reasons(handle))
    kind.call(pipe)
    assert len(reasons(handle)) == before
    assert not any("peft" in reason for reason in reasons(handle))


def test_nothing_is_left_of_a_lora_that_was_fused_and_unloaded_by_us() -> None:
    pipe = FLUX.pipe()
    before = pieces(pipe)
    handle = fusedit.accelerate(pipe)
    fusedit.load_lora(pipe, mixed_state(pipe).tensors, "a")
    FLUX.call(pipe)
    pipe.fuse_lora()
    FLUX.call(pipe)
    fusedit.unload_lora(pipe, "a")
    handle.restore()
    for name in ("lora_scale", "_safe_fusing"):  # stock's fuse_lora leaves them
        del vars(pipe.transformer)[name]
    assert differing(pieces(pipe), before) == []
