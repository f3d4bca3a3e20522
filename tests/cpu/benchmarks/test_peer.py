"""The peer: which layers it quantises, that its switches stay its own, and what is said where torchao is missing."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel

from benchmarks import peer
from benchmarks.workloads import Workload
from fusedit.errors import MissingExtraError, UsageError


def tuning() -> bool:
    from torch._inductor import config

    return bool(config.coordinate_descent_tuning)


def test_large_layers_of_the_blocks_and_no_modulation(workload: Workload, torchao: Any) -> None:
    before = copy.deepcopy(workload.pipe.transformer.state_dict())
    made = peer.quantise(workload.pipe.transformer)
    assert made.layers == len(torchao.taken) > 10
    assert made.fused is (workload.name == "flux.1-dev")
    assert not [name for name in torchao.taken if any(part in name for part in ("norm", "embed", "adaLN"))]
    assert any("to_qkv" in name for name in torchao.taken) is made.fused
    after = workload.pipe.transformer.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert changed <= {f"{name}.weight" for name in torchao.taken}
    assert made.seconds > 0


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (FluxTransformer2DModel, {"x_embedder", "proj_out", "norm_out.linear", "transformer_blocks.0.norm1.linear"}),
        (ZImageTransformer2DModel, {"cap_embedder.1", "t_embedder.mlp.0", "layers.0.adaLN_modulation.0"}),
    ],
)
def test_what_stays_bf16_in_the_real_models(kind: Any, kept: set[str]) -> None:
    with torch.device("meta"):
        model = kind()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    taken = {name for name, module in linear.items() if peer._takes(module, name)}
    assert kept <= linear.keys() - taken
    assert {"transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_mlp"} <= taken or {
        "layers.0.attention.to_q",
        "noise_refiner.0.feed_forward.w1",
    } <= taken


def test_its_switches_are_set_inside_its_context_only(workload: Workload, torchao: Any) -> None:
    before = (torch.get_float32_matmul_precision(), tuning())
    assert before == ("highest", False)
    made = peer.quantise(workload.pipe.transformer)
    assert torchao.taken
    assert (torch.get_float32_matmul_precision(), tuning()) == before
    for _ in range(2):
        with made.settings():
            assert (torch.get_float32_matmul_precision(), tuning()) == ("high", True)
        assert (torch.get_float32_matmul_precision(), tuning()) == before
    with pytest.raises(KeyError), made.settings():
        raise KeyError
    assert (torch.get_float32_matmul_precision(), tuning()) == before


def test_a_failure_sets_the_switches_back(workload: Workload, torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        torch.set_float32_matmul_precision("high")
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torchao, "quantize_", full)
    with pytest.raises(torch.OutOfMemoryError):
        peer.quantise(workload.pipe.transformer)
    assert torch.get_float32_matmul_precision() == "highest"


def test_without_torchao_it_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    before = copy.deepcopy(workload.pipe.transformer.state_dict())
    with pytest.raises(MissingExtraError, match=r"^the peer needs torchao, which cannot be imported \(.*; install the"):
        peer.quantise(workload.pipe.transformer)
    after = workload.pipe.transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_nothing_to_quantise_is_an_error(workload: Workload, torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "LARGE", 4096)
    with pytest.raises(UsageError, match="no linear layer takes and gives 4096 features or more"):
        peer.quantise(workload.pipe.transformer)
    assert not torchao.taken
