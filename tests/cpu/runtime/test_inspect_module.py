"""The quick look at inner modules and the one that words a reason ask the same, on every module of the tiny models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fusedit.models.autoencoder_kl import AutoencoderKL
from fusedit.models.flux import Flux
from fusedit.models.z_image import ZImage
from fusedit.runtime import inspect_module
from fusedit.runtime.form import STANDARD
from fusedit.runtime.inspect_module import Difference
from fusedit.runtime.methods import methods_of

MODELS = {"flux": Flux, "z_image": ZImage, "vae": AutoencoderKL}


class _OtherParameter(nn.Parameter):
    pass


class _Incomparable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError(other)


class _Registry:
    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks


def _parameter(name: str) -> Callable[[nn.Module], None]:
    return lambda module: module._parameters.update({name: None})


def _other_class(name: str) -> Callable[[nn.Module], None]:
    return lambda module: module._parameters.update({name: _OtherParameter(module._parameters[name])})


def _setting(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: module.__dict__.update({name: value})


def _gone(name: str) -> Callable[[nn.Module], None]:
    return lambda module: module.__dict__.pop(name)


def _child(name: str, child: nn.Module | None) -> Callable[[nn.Module], None]:
    return lambda module: module._modules.update({name: child})


def changes(module: nn.Module) -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    """What may be done to one module, by name."""
    yield "forward hook", lambda m: m.register_forward_hook(lambda *_: None)
    yield "forward pre-hook", lambda m: m.register_forward_pre_hook(lambda *_: None)
    yield "own forward", _setting("forward", lambda *_: None)
    yield "accelerate hook", _setting("_hf_hook", object())
    yield "diffusers hook", _setting("_diffusers_hook", _Registry(object()))
    yield "no diffusers hook", _setting("_diffusers_hook", _Registry())
    yield "own call", _setting("_call_impl", lambda *_: None)
    for name in methods_of(type(module)):
        yield f"own {name}", _setting(name, lambda *_: None)
    yield "own way to start anew", _setting("reset_parameters", lambda: None)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_parameters", "_modules"):
        yield f"{name} gone", _gone(name)
    yield "new parameter", lambda m: m.register_parameter("other", nn.Parameter(torch.ones(2)))
    yield "no new parameter", lambda m: m.register_parameter("other", None)
    yield "child", _child("other", nn.Linear(2, 2))
    yield "no child", _child("other", None)
    yield "fused projections", _child("to_qkv", nn.Linear(2, 2))
    yield "free attribute", _setting("mine", 3)
    yield "training", lambda m: m.train()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"no {name}", _parameter(name)
            yield f"{name} of another class", _other_class(name)
    for name, value in list(module.__dict__.items()):
        if name in STANDARD or name.startswith("_"):
            continue
        yield f"{name} gone", _gone(name)
        yield f"{name} a tensor", _setting(name, torch.ones(2))
        yield f"{name} an array", _setting(name, numpy.ones(2))
        yield f"{name} not to be compared", _setting(name, _Incomparable())
        if type(value) in (int, float):
            yield f"{name} + 1", _setting(name, value + 1)
            yield f"{name} as a tensor", _setting(name, torch.tensor(value))
            yield f"{name} as an array", _setting(name, numpy.asarray(value))
    for name, child in module._modules.items():
        if child is not None:
            yield f"no {name}", _child(name, None)
            yield f"{name} an Identity", _child(name, nn.Identity())
            yield f"{name} a Dropout", _child(name, nn.Dropout(0.5))
            yield f"{name} twice", _child(name + "_too", copy.deepcopy(child))


def looks(model: Any, module: nn.Module, form: Any) -> tuple[bool, str | None]:
    return inspect_module._as_stock(module, form), inspect_module._first_reason(module, model.known, form)


@pytest.mark.parametrize("name", MODELS)
def test_both_looks_agree_on_every_change_of_every_module(name: str) -> None:
    model: Any = MODELS[name]
    whole = model.tiny()
    form = model.form_of(whole)
    assert looks(model, whole, form) == (True, None)
    differed = same = 0
    for path, module in whole.named_modules():
        if not path:
            continue  # the fused module's own hooks and settings are looked at elsewhere
        for what, change in list(changes(module)):
            space = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
            change(module)
            quick, reason = looks(model, whole, form)
            # A registry without hooks is left after offload: only the slower look opens it, and finds nothing.
            allowed = not quick if what == "no diffusers hook" else quick == (reason is None)
            module.__dict__.clear()
            module.__dict__.update(space)
            module.train(False)
            assert allowed, f"{what} of {path}: quick look {quick}, reason {reason}"
            same, differed = same + (reason is None), differed + (reason is not None)
    assert looks(model, whole, form) == (True, None)
    assert differed > 300
    assert same > 100


def test_a_dropout_that_drops_is_seen_by_both() -> None:
    whole = Flux.tiny()
    form = Flux.form_of(whole)
    drop = next(module for module in whole.modules() if type(module) is nn.Dropout)
    drop.p = 0.5
    assert looks(Flux, whole, form) == (True, None)
    drop.train()
    quick, reason = looks(Flux, whole, form)
    assert not quick
    assert reason is not None
    assert "drops values in training mode" in reason


@pytest.mark.parametrize("layer", ["to_q", "proj_out"])
def test_what_a_lora_layer_wraps_is_seen_by_both(layer: str) -> None:
    from peft import LoraConfig

    whole: Any = Flux.tiny()
    form = Flux.form_of(whole)
    whole.add_adapter(LoraConfig(r=2, target_modules=[layer]))
    assert looks(Flux, whole, form) == (True, None)
    wrapped = [module for module in whole.modules() if hasattr(module, "base_layer")]
    assert wrapped
    for module in wrapped:
        base = module.base_layer
        for change in (
            lambda m: m._parameters.update(bias=None),
            lambda m: m.register_forward_hook(lambda *_: None),
            _gone("_parameters"),
            _setting("forward", lambda *_: None),
        ):
            module.base_layer = copy.deepcopy(base)
            change(module.base_layer)
            quick, reason = looks(Flux, whole, form)
            assert quick == (reason is None), reason
        module.base_layer = nn.Identity()
        quick, reason = looks(Flux, whole, form)
        assert (quick, reason is None) == (False, False)
        module.base_layer = base
    assert looks(Flux, whole, form) == (True, None)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (
            "layers.1.feed_forward",
            _setting("_forward_silu_gating", lambda *_: None),
            ("_forward_silu_gating", __name__),
        ),
        ("layers.1.feed_forward", _setting("_call_impl", object()), ("_call_impl", "replaced by a object")),
        ("", _setting("patchify_and_embed", lambda *_: None), ("patchify_and_embed", "the module", __name__)),
        ("layers.0.ffn_norm1", _gone("_forward_hooks"), ("layers.0.ffn_norm1'", "no _forward_hooks")),
        ("layers.0.ffn_norm1", _setting("eps", numpy.ones(2)), ("eps of", "a ndarray", "1e-05")),
    ],
    ids=["method", "call", "root", "no-hooks", "array"],
)
def test_the_words_for_what_was_set_on_one_module(
    path: str, change: Callable[[nn.Module], None], words: tuple[str, ...]
) -> None:
    whole = ZImage.tiny()
    form = ZImage.form_of(whole)
    change(whole.get_submodule(path))
    quick, reason = looks(ZImage, whole, form)
    assert not quick
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_a_setting_that_cannot_be_compared_is_a_difference() -> None:
    whole: Any = Flux.tiny()
    for value in (numpy.ones(2), torch.ones(2), _Incomparable()):
        whole.transformer_blocks[0].norm1.norm.eps = value
        reason = inspect_module.inner_reason(whole, Flux.known, Flux.form_of(whole))
        assert isinstance(reason, Difference), reason
