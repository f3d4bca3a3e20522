"""Modules without constructors are like those with one, and paths lead where torch's own look leads."""

from __future__ import annotations

import pytest
import torch
from support.pipes import flux_pipe, lora_state
from torch import nn

import fusedit
from fusedit.lora.adapters import tuner_layers
from fusedit.lora.blanks import Blank, linear
from fusedit.lora.paths import below, place, submodule


def test_a_blank_has_what_a_constructor_gives_and_shares_no_container() -> None:
    pattern = nn.Linear(3, 2)
    pattern.register_forward_hook(lambda *_: None)
    pattern.kept = {"a": 1}
    blank = Blank(pattern)
    one, two = blank(False), blank(True)
    assert (type(one), one.training, two.training) == (nn.Linear, False, True)
    assert one.__dict__.keys() == nn.Linear(3, 2).__dict__.keys() | {"kept"}
    assert not one._parameters
    assert not one._forward_hooks
    assert one.kept == {"a": 1}
    containers = [key for key, value in one.__dict__.items() if isinstance(value, dict | list | set)]
    assert not any(one.__dict__[key] is other.__dict__[key] for key in containers for other in (two, pattern))
    weight = nn.Parameter(torch.randn(5, 4), requires_grad=False)
    made, x = linear(Blank(nn.Linear(1, 1)), weight, False), torch.randn(2, 4)
    assert torch.equal(made(x), nn.functional.linear(x, weight))
    assert repr(made) == repr(nn.Linear(4, 5, bias=False)).replace("bias=True", "bias=False")
    assert list(made.state_dict()) == ["weight"]


def test_paths() -> None:
    module = nn.Sequential(nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.Identity())
    for path, _ in module.named_modules():
        assert submodule(module, path) is module.get_submodule(path)
    assert place(module, "0.a") == (module[0], "a")
    assert place(module, "1") == (module, "1")
    for wrong in ("0.b", "0.a.weight", "2", "0..a"):
        with pytest.raises(AttributeError):
            submodule(module, wrong)
    assert set(below(module)) == set(module.modules())


def test_a_lora_layer_that_is_held_beyond_its_unloading_holds_no_matrices() -> None:
    pipe = flux_pipe()
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    held = [layer for _, layer in tuner_layers(pipe.transformer)]
    fusedit.unload_lora(pipe, "a")
    assert held
    assert [name for layer in held for name, _ in layer.named_parameters() if ".lora_" in f".{name}"] == []
