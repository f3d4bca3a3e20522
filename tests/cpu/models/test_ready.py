"""What a model launches once so that nothing compiles later: it has to be callable as it stands."""

from __future__ import annotations

import importlib

import pytest
import torch
from support.fp8 import converted
from support.pipes import flux_pipe

import fusedit
from fusedit import ops
from fusedit.models import _lora_ready, registry
from fusedit.models._lora_ready import lora_ready, widths_of
from fusedit.ops._op import Backend
from fusedit.plan import Plan
from fusedit.runtime.counters import Counters


@pytest.mark.parametrize(
    ("name", "needed"), [("flux", {"gated_residual", "gelu_tanh"}), ("z_image", {"swiglu", "linear_swiglu"})]
)
def test_rare_ops_run(name: str, needed: set[str]) -> None:
    kind = registry()[name]
    model = kind(kind.tiny(), Plan(), Counters())
    before = {op: sum(ops.registry()[op].ran.values()) for op in needed}
    with torch.no_grad():
        model.rare(torch.zeros(1, 1, 8))
    assert all(sum(ops.registry()[op].ran.values()) > count for op, count in before.items())


@pytest.mark.parametrize("name", ["linear_gelu", "linear_swiglu"])
def test_a_hopper_product_is_ready_whatever_serves_the_first_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few tiles at the first size, enough at the second: the kernel is compiled at the first."""
    module, hopper = (importlib.import_module(f"fusedit.ops.{m}") for m in (name, "_hopper"))
    monkeypatch.setattr(module, "choose", lambda *_: Backend("separate", "too few tiles"))
    monkeypatch.setattr(hopper, "_known", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launched: list[int] = []
    monkeypatch.setattr(module, "launch", lambda x, *_: launched.append(x.shape[-1]))
    x, weight = torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
    rest = (torch.zeros(256, dtype=torch.bfloat16), 128) if name == "linear_gelu" else ()
    with torch.no_grad():
        for _ in range(2):
            ops.registry()[name](x, weight, *rest)
    assert launched == [64]


def test_nothing_is_launched_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry()["flux"]
    model = kind(kind.tiny(), Plan(), Counters())
    monkeypatch.setattr(type(model), "rare", lambda *_: pytest.fail("a CPU has nothing to compile"))
    model.make_ready(torch.zeros(1))


def test_activations_of_every_width_are_quantised_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are called as they are, for DoRA or to verify a LoRA, compile nothing when one is loaded."""
    pipe = flux_pipe()
    fusedit.accelerate(pipe, "fp8")
    read = {layer.weight.shape[1] for layer in converted(pipe).values() if layer.activations}
    ran: list[int] = []
    monkeypatch.setattr(_lora_ready, "quantise", lambda x: ran.append(x.shape[-1]))
    lora_ready(torch.zeros(1, 1, 8), bias=True, widths=widths_of(pipe.transformer))
    assert set(ran) == read
    assert len(ran) == len(read) > 1
