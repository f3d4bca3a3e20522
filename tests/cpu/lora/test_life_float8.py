"""LoRAs over float8 weights: a fused one is a side branch of the layer, since nothing small can be added to codes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.loras import linear_layers, mixed_state
from support.pipes import lora_state, relative
from support.runs import FLUX, Kind, each_kind

import fusedit
from fusedit.errors import LoraError
from fusedit.float8.linear import Float8Linear
from fusedit.lora.adapters import tuner_layers
from fusedit.lora.layers import LoraFile
from fusedit.lora.life import load_file
from fusedit.lora.parsing import parse


class Quantised:
    """An fp8 pipeline.

    Attributes:
        base: what it draws.
        error: of that, the tier's own. Another order of sums moves a few values to the next code, so two ways to the
            same LoRA differ, but by less.
    """

    def __init__(self, kind: Kind) -> None:
        self.pipe = kind.pipe()
        exact = kind.call(self.pipe)
        self.handle = fusedit.accelerate(self.pipe, plan="fp8")
        self.base = kind.call(self.pipe)
        self.error = relative(self.base, exact)


def codes(pipe: Any) -> dict[str, torch.Tensor]:
    return {p: x.weight.detach().view(torch.uint8).clone() for p, x in eights(pipe).items()}


def eights(pipe: Any) -> dict[str, Float8Linear]:
    return {p: x for p, x in linear_layers(pipe.transformer).items() if isinstance(x, Float8Linear)}


@each_kind
@pytest.mark.parametrize("first", ["lora", "fp8"])
def test_both_orders_work_and_the_effect_is_that_on_the_unquantised_model(kind: Kind, first: str) -> None:
    """LQ-01, LQ-02, LQ-07."""
    exact = kind.pipe()
    plain = kind.call(exact)
    state = mixed_state(exact, size=0.15).tensors
    fusedit.load_lora(exact, state, "a")
    effect = kind.call(exact) - plain
    pipe = kind.pipe()
    if first == "lora":
        fusedit.load_lora(pipe, state, "a")
        fusedit.accelerate(pipe, plan="fp8")
    else:
        fusedit.accelerate(pipe, plan="fp8")
        fusedit.load_lora(pipe, state, "a")
    assert eights(pipe)
    with_a = kind.call(pipe)
    base, error = (fresh := Quantised(kind)).base, fresh.error
    for scales in ({"a": 0.0}, {}):
        fusedit.set_loras(pipe, scales)
        assert relative(kind.call(pipe), base) < error
    correlation = torch.corrcoef(torch.stack([effect.flatten(), (with_a - base).flatten()]))[0, 1]
    assert correlation > 0.95
    fusedit.unload_lora(pipe, "a")
    if first == "fp8":
        assert torch.equal(kind.call(pipe), base)
    else:  # codes of modulation weights are chosen by what they read, which the LoRA changed
        assert relative(kind.call(pipe), base) < error


@each_kind
def test_a_fused_one_is_a_side_branch_that_stays_when_unloaded_and_that_is_said(kind: Kind) -> None:
    made = Quantised(kind)
    pipe, error = made.pipe, made.error
    before = codes(pipe)
    fusedit.load_lora(pipe, mixed_state(pipe, size=0.15).tensors, "a", 0.6)
    unfused = kind.call(pipe)
    assert relative(unfused, made.base) > 3 * error
    pipe.fuse_lora()
    assert {p for p, x in codes(pipe).items() if not torch.equal(x, before[p])} == set()
    assert relative(kind.call(pipe), unfused) < error
    count = len(eights(pipe))
    assert any(
        f"fused LoRA 'a' is a side branch of {count} float8 layers" in note for note in made.handle.report().notes
    )
    pipe.unload_lora_weights()
    assert tuner_layers(pipe.transformer) == []
    assert relative(kind.call(pipe), unfused) < error
    fusedit.load_lora(pipe, mixed_state(pipe, size=0.15).tensors, "a", 0.6)
    twice = kind.call(pipe)
    pipe.fuse_lora()
    assert relative(kind.call(pipe), twice) < error
    assert all(set(layer.branches) == {"a", "a 2"} for layer in eights(pipe).values())


@each_kind
def test_unfusing_and_unloading_a_side_branch_give_the_base_back(kind: Kind) -> None:
    made = Quantised(kind)
    pipe, base, error = made.pipe, made.base, made.error
    before = codes(pipe)
    for i, name in enumerate("ab"):
        fusedit.load_lora(pipe, mixed_state(pipe, i, size=0.15).tensors, name)
    both = kind.call(pipe)
    pipe.fuse_lora()
    fusedit.unload_lora(pipe, "b")
    assert all(set(layer.branches) == {"a"} for layer in eights(pipe).values())
    assert relative(kind.call(pipe), both) > error
    pipe.unfuse_lora()
    assert all(layer.branches == {} for layer in eights(pipe).values())
    fusedit.unload_lora(pipe, "a")
    assert relative(kind.call(pipe), base) < 1e-6
    assert {p for p, x in codes(pipe).items() if not torch.equal(x, before[p])} == set()


@pytest.mark.filterwarnings("ignore:Already unmerged")
def test_restore_with_a_side_branch_leaves_the_lora_active_on_the_original_weights() -> None:
    pipe = FLUX.pipe()
    original = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    handle = fusedit.accelerate(pipe, plan="fp8")
    state = mixed_state(pipe, size=0.15).tensors
    fusedit.load_lora(pipe, state, "a")
    pipe.fuse_lora()
    handle.restore()
    assert any(layer.merged for _, layer in tuner_layers(pipe.transformer)), "what is not float8 was merged and stays"
    pipe.unfuse_lora()
    fusedit.unload_lora(pipe, "a")
    now = pipe.transformer.state_dict()
    assert now.keys() == original.keys()
    assert max(relative(now[name], original[name]) for name in now) < 1e-6


def test_nothing_is_lost_to_the_step_of_the_codes() -> None:
    """LQ-03: a delta a hundred times smaller than the step between two codes."""
    layer = Float8Linear.convert(torch.nn.Linear(64, 48, bias=False), activations=False, keep=True)
    from peft.tuners.lora import Linear

    from fusedit.lora import fused
    from fusedit.lora.layers import LoraLayer
    from fusedit.lora.making import Change, Maker, description

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def fuse_lora(self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: Any = None) -> None:  # noqa: ARG002
            for module in self.modules():
                if isinstance(module, Linear):
                    module.merge(safe_merge=safe_fusing, adapter_names=adapter_names)

    step = float(layer.weight_scale.max()) * 2**-3
    down, up = torch.randn(2, 64), torch.randn(48, 2)
    up *= step / 100 / float((up @ down).abs().max())
    change = {"inner": Change(LoraLayer(down, up, None))}
    model, x = Model(), torch.randn(5, 64, dtype=torch.float64)
    base = layer(x)
    model.inner = Maker("a", description(change)).layer(layer, change["inner"], torch.float32)
    fused.install(model)
    model.fuse_lora()
    assert relative(model.inner(x) - base, x @ (up @ down).double().T) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_plain_layer_with_float8_storage_is_refused_by_its_dtype(dtype: torch.dtype) -> None:
    """LQ-04: layerwise casting leaves the class and the configuration as they are."""
    pipe = FLUX.pipe()
    fusedit.accelerate(pipe)
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    layer = pipe.transformer.transformer_blocks[1].attn.to_q.base_layer
    layer.weight.data = layer.weight.data.to(dtype)
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    with pytest.raises(LoraError, match=r"transformer_blocks\.1\.attn\.to_q has float8 weights, into which no LoRA"):
        pipe.fuse_lora()
    now = pipe.transformer.state_dict()
    same = [name for name in now if torch.equal(now[name].view(torch.uint8), before[name].view(torch.uint8))]
    assert len(same) == len(before)
    assert not any(layer.merged for _, layer in tuner_layers(pipe.transformer))


@each_kind
@pytest.mark.parametrize("norms", ["rows", "columns"])
def test_dora_over_float8_works_unfused_and_is_not_fused(kind: Kind, norms: str) -> None:
    exact, made = kind.pipe(), Quantised(kind)
    plain, pipe = kind.call(exact), made.pipe
    file = with_norms(exact, columns=norms == "columns")
    for each in (exact, pipe):
        load_file(each, file, None, "a")
    effects = torch.stack([(kind.call(exact) - plain).flatten(), (kind.call(pipe) - made.base).flatten()])
    assert torch.corrcoef(effects)[0, 1] > 0.95
    before = codes(pipe)
    with pytest.raises(LoraError, match="by more than two matrices"):
        pipe.fuse_lora()
    assert {p for p, x in codes(pipe).items() if not torch.equal(x, before[p])} == set()
    assert not any(layer.merged for _, layer in tuner_layers(pipe.transformer))
    fusedit.unload_lora(pipe, "a")
    assert torch.equal(kind.call(pipe), made.base)


def with_norms(pipe: Any, *, columns: bool) -> LoraFile:
    """A DoRA whose norms are 10 % around those of the weights."""
    file = parse(mixed_state(pipe, size=0.15).tensors)
    generator = torch.Generator().manual_seed(1)
    weights = {path: layer.weight.detach() for path, layer in linear_layers(pipe.transformer).items()}
    layers = {}
    for path, layer in file.layers.items():
        norm = weights[path].norm(dim=0, keepdim=True) if columns else weights[path].norm(dim=1)
        layers[path] = layer._replace(magnitude=norm * (1 + 0.1 * torch.randn(norm.shape, generator=generator)))
    return replace(file, layers=layers)


def test_fused_before_the_weights_became_float8_it_cannot_be_unfused_there() -> None:
    pipe = FLUX.pipe()
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    pipe.fuse_lora()
    handle = fusedit.accelerate(pipe, plan="fp8")
    before = codes(pipe)
    with pytest.raises(LoraError, match="was fused before the weights became float8"):
        pipe.unfuse_lora()
    assert {p for p, x in codes(pipe).items() if not torch.equal(x, before[p])} == set()
    handle.restore()
    assert not any("unmerge" in vars(layer) for _, layer in tuner_layers(pipe.transformer))


def test_a_copy_keeps_the_side_branch() -> None:
    pipe = FLUX.pipe()
    fusedit.accelerate(pipe, plan="fp8", originals="drop")
    fusedit.load_lora(pipe, mixed_state(pipe, size=0.15).tensors, "a")
    pipe.fuse_lora()
    copied = copy.deepcopy(pipe.transformer)
    for _, layer in tuner_layers(copied):
        layer.unmerge()
    assert not any(layer.merged for _, layer in tuner_layers(copied))
    assert all(layer.merged for _, layer in tuner_layers(pipe.transformer))
