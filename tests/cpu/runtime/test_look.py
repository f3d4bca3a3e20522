"""Looks: the numbers of a call's look are those of the call before just where nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusedit.runtime.look import Looks


class Model(nn.Module):
    """Two layers and a LoRA layer with two adapters, as peft makes it."""

    def __init__(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        torch.manual_seed(0)
        self.free, self.inner = nn.Linear(4, 4), nn.ModuleDict({"linear": nn.Linear(4, 4)})
        config = {"r": 2, "lora_alpha": 4, "target_modules": ["linear"], "init_lora_weights": False}
        for name in ("a", "b"):
            inject_adapter_in_model(LoraConfig(**config), self.inner, adapter_name=name)
        self.layer.set_adapter(["a"])
        self.eval()

    @property
    def layer(self) -> Any:
        return self.inner["linear"]


def _assign(model: Any) -> None:
    model.layer.lora_A["a"].weight = nn.Parameter(torch.ones(2, 4))


def _swap_data(model: Any) -> None:
    model.layer.lora_A["a"].weight.data = torch.ones(2, 4)


def _drop(model: Any) -> None:
    model.layer.lora_dropout["a"] = nn.Dropout(0.5).eval()


def _hook_on_nothing(model: Any) -> None:
    model.layer.lora_dropout["a"].register_forward_hook(lambda *_: None)


def _other_forward(model: Any) -> None:
    model.layer.lora_B["a"].forward = lambda x: x


OF_STATE: dict[str, Callable[[Any], Any]] = {
    "a matrix": _assign,
    "data elsewhere": _swap_data,
    "a transposed view": lambda m: setattr(m.free.weight, "data", m.free.weight.data.t()),
    "another dtype": lambda m: m.free.half(),
    "a scale": lambda m: m.layer.scaling.update(a=0.5),
    "active": lambda m: m.layer.set_adapter(["a", "b"]),
    "off": lambda m: m.layer.enable_adapters(False),
    "merged": lambda m: m.layer.merge(adapter_names=["a"]),
    "deleted": lambda m: m.layer.delete_adapter("b"),
    "a bias": lambda m: setattr(m.layer.lora_B["a"], "bias", nn.Parameter(torch.ones(4))),
    "dropout": _drop,
    "a hook": lambda m: m.layer.lora_A["a"].register_forward_pre_hook(lambda *_: None),
    "a hook on what does nothing": _hook_on_nothing,
    "a hook on the wrapped layer": lambda m: m.layer.base_layer.register_forward_hook(lambda *_: None),
    "another forward": _other_forward,
    "unwrapped": lambda m: m.inner.update({"linear": m.layer.base_layer}),
}


@pytest.mark.parametrize("name", OF_STATE)
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
@pytest.mark.filterwarnings("ignore:Merging lora module")
def test_a_change_gives_other_numbers_once(name: str) -> None:
    model, looks = Model(), Looks()
    first = looks(model)
    assert looks(model) == first
    OF_STATE[name](model)
    second = looks(model)
    assert second.state > first.state
    assert second.content > first.content
    assert looks(model) == second


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_dropout_that_is_there_counts_by_its_mode() -> None:
    model, looks = Model(), Looks()
    _drop(model)
    first = looks(model)
    model.layer.lora_dropout["a"].train()
    assert looks(model).state > first.state


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_writes_in_place_are_other_content_in_the_same_state() -> None:
    model, looks = Model(), Looks()
    first = looks(model)
    with torch.no_grad():
        model.layer.lora_B["a"].weight.mul_(2)
    second = looks(model)
    assert (second.state, second.content > first.content) == (first.state, True)
    assert looks(model) == second


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_nothing_is_kept_alive() -> None:
    import weakref

    model, looks = Model(), Looks()
    looks(model)
    gone = [weakref.ref(model), weakref.ref(model.layer.lora_A["a"].weight)]
    del model
    assert [ref() for ref in gone] == [None, None]


def test_branches_fused_beside_codes_count() -> None:
    from fusedit.float8.linear import Float8Linear

    layer, looks = Float8Linear.convert(nn.Linear(16, 16), activations=True, keep=False), Looks()
    first = looks(layer)
    layer.branches["x"] = [(torch.ones(2, 16), torch.ones(16, 2), 1.0)]
    second = looks(layer)
    assert second.state > first.state
    layer.branches["x"][0][0].mul_(2)
    assert looks(layer) != second
