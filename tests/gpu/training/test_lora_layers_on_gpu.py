"""What the training kernels do with a layer that a LoRA is wrapped around, and with frozen layers under one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "training"))

from tiny.linear import joined_linear, linears, use_fast_linears


@pytest.fixture
def layer() -> nn.Module:
    """A Linear(48, 32) with a LoRA that does something; only the LoRA learns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32)).cuda().requires_grad_(False)
    use_fast_linears(model)
    wrapped = inject_adapter_in_model(
        LoraConfig(r=4, lora_alpha=4, target_modules=["0"], init_lora_weights=False), model
    )[0]
    assert isinstance(wrapped, nn.Module)
    return wrapped


def test_a_layers_lora_is_applied(layer: nn.Module) -> None:
    x, base = torch.randn(5, 48, device="cuda"), layer.base_layer
    (out,) = linears(x, layer)
    assert torch.equal(out, layer(x))
    assert (out - nn.functional.linear(x, base.weight, base.bias)).abs().max() > 1e-3  # type: ignore[arg-type,union-attr]
    assert torch.equal(joined_linear(x[:, :16], x[:, 16:], layer), out)


def test_gradients_reach_the_input_and_the_lora_and_nothing_else(layer: nn.Module) -> None:
    x = torch.randn(5, 48, device="cuda", requires_grad=True)
    linears(x, layer)[0].square().sum().backward()
    weights = dict(layer.named_parameters())
    dense = weights["base_layer.weight"] + weights["lora_B.default.weight"] @ weights["lora_A.default.weight"]
    expected = 2 * (x @ dense.T + weights["base_layer.bias"]) @ dense
    torch.testing.assert_close(x.grad, expected.detach(), rtol=1e-2, atol=1e-2)  # products may be in tf32
    assert {name for name, weight in weights.items() if weight.grad is not None} == {
        "lora_A.default.weight",
        "lora_B.default.weight",
    }
