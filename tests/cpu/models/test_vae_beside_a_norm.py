"""What encoder and decoder do on a GPU alone, with plain torch for the ops: convolutions that are left to a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pipes import relative
from torch import nn

from fusedit import ops
from fusedit.models._sum import Sum
from fusedit.models.autoencoder_kl import AutoencoderKL
from fusedit.models.autoencoder_kl_encoder import AutoencoderKLEncoder
from fusedit.ops._op import Backend
from fusedit.plan import Plan
from fusedit.runtime import relaid
from fusedit.runtime.counters import Counters

SHAPES = {AutoencoderKL: (2, 4, 6, 5), AutoencoderKLEncoder: (1, 3, 22, 26)}


def pretend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """That pictures lie on a GPU, and who convolves there."""
    monkeypatch.setattr(relaid, "on_gpu", lambda _: True)
    for op in (ops.conv2d, ops.conv2d_group_norm_silu):
        monkeypatch.setattr(op, "_choose", lambda *_, **__: Backend(backend, ""))


@pytest.fixture(params=["library", "hopper"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pretend(monkeypatch, request.param)
    return str(request.param)


def modules(model: Any, **changes: Any) -> tuple[Any, Counters, Any]:
    torch.manual_seed(1)
    module = model.tiny(block_out_channels=(8, 16, 24), layers_per_block=2)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0, 0.3)
    counters = Counters()
    return module, counters, model(module, Plan(rewrites=changes, cache={"graphs": False}), counters)


@torch.no_grad()
@pytest.mark.parametrize("model", list(SHAPES))
def test_agrees_with_stock(model: Any, backend: str) -> None:
    del backend
    module, counters, fused = modules(model)
    x = torch.randn(SHAPES[model])
    given = x.clone()
    truth = module(x)
    assert relative(fused.forward(x), truth) < 5e-6
    assert torch.equal(x, given)
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in module.modules())
    others = 3 if model is AutoencoderKL else 2  # behind doublings and the last one; the halvings' are torch's
    assert counters.fused[f"{model.name}.conv2d"] == convolutions - others
    assert all(counters.fused[f"{model.name}.{norm}"] for norm in ("group_norm_silu", "residual_norm"))


@torch.no_grad()
@pytest.mark.parametrize("model", list(SHAPES))
def test_who_takes_a_convolution_along(model: Any, backend: str) -> None:
    """A norm behind a residual always; another one only where the convolution is ours."""
    _, _, fused = modules(model)
    residuals: dict[str, list[bool]] = {}
    for name, join in fused.joins.items():

        def counted(*args: Any, name: str = name, join: Any = join, **kwargs: Any) -> Any:
            residuals.setdefault(name, []).append(args[6] is not None)
            return join(*args, **kwargs)

        fused.joins[name] = counted
    fused.forward(torch.randn(SHAPES[model]))
    assert set(residuals.pop(f"{model.name}.residual_norm")) == {True}
    assert {name: set(found) for name, found in residuals.items()} == (
        {f"{model.name}.group_norm_silu": {False}} if backend == "hopper" else {}
    )


@torch.no_grad()
@pytest.mark.parametrize("model", list(SHAPES))
def test_getting_ready_counts_nothing_and_changes_nothing(model: Any, backend: str) -> None:
    del backend
    module, counters, fused = modules(model)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for dtype in (torch.float32, torch.bfloat16):
        fused.rare(torch.randn(SHAPES[model]).to(dtype))
        module.bfloat16()
    assert not counters.fused
    assert not counters.stock
    assert all(torch.equal(value.bfloat16(), module.state_dict()[name]) for name, value in before.items())


@torch.no_grad()
@pytest.mark.parametrize("model", list(SHAPES))
def test_no_pictures(model: Any, backend: str) -> None:
    del backend
    torch.manual_seed(1)
    module = model.tiny(block_out_channels=(8, 16, 24), mid_block_add_attention=False)
    x = torch.randn(0, *SHAPES[model][1:])
    made = model(module, Plan(cache={"graphs": False}), Counters()).forward(x)
    assert made.shape == module(x).shape


@torch.no_grad()
@pytest.mark.parametrize("off", ["conv2d", "residual_norm", "group_norm_silu"])
@pytest.mark.parametrize("model", list(SHAPES))
def test_agrees_with_a_rewrite_off(model: Any, off: str, backend: str) -> None:
    del backend
    name = f"{model.name}.{off}"
    (_, whole, everything), (module, counters, fused) = modules(model), modules(model, **{name: False})
    x = torch.randn(SHAPES[model])
    everything.forward(x)
    assert relative(fused.forward(x), module(x)) < 5e-6
    assert not counters.fused[name]
    if off == "group_norm_silu":  # the others go on as ever
        assert counters.fused == {key: count for key, count in whole.fused.items() if key != name}


@torch.no_grad()
@pytest.mark.parametrize("backend", [None, "library", "hopper"])
@pytest.mark.parametrize("model", list(SHAPES))
def test_what_a_lora_layer_returns_is_never_written_to(
    model: Any, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks run, and may hold the result or give another."""
    from peft import LoraConfig, inject_adapter_in_model

    if backend is not None:
        pretend(monkeypatch, backend)
    module, _, fused = modules(model)
    names = ["conv1", "conv2", "conv_shortcut", "conv", "conv_in", "conv_out", "to_q", "to_out.0"]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=names, init_lora_weights=False), module)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for child in module.modules():
        if type(child).__module__.startswith("peft.") and hasattr(child, "base_layer"):
            child.register_forward_hook(lambda _, __, y: kept.append((y, y.clone())))
            child.base_layer.register_forward_hook(lambda _, __, y: kept.append((y, y.clone())))
    x = torch.randn(SHAPES[model])
    truth = module(x)
    called = len(kept)
    assert relative(fused.forward(x), truth) < 5e-6
    assert len(kept) == 2 * called > 0
    assert all(torch.equal(y, before) for y, before in kept)


@torch.no_grad()
@pytest.mark.parametrize("model", list(SHAPES))
def test_no_stage_leaves_a_convolution_to_the_next(model: Any, backend: str) -> None:
    del backend
    _, _, fused = modules(model)
    s = Sum(torch.randn(SHAPES[model]).contiguous(memory_format=torch.channels_last))
    for _, stage in fused.stages():
        s = stage(s)
        assert s.weight is None
