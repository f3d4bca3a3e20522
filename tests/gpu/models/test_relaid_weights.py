"""On a GPU the convolutions' weights of a fused VAE lie channels_last; restore() gives their bits and strides back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pipes import parameters_of
from torch import nn

import fusedit
from benchmarks.workloads import Workload, z_image_turbo
from fusedit.plan import Plan
from fusedit.runtime import relaid
from fusedit.runtime.homes import lies_channels_last


@pytest.fixture(scope="module")
def workload() -> Iterator[Workload]:
    torch.manual_seed(0)
    yield z_image_turbo(n_layers=1)
    torch.cuda.empty_cache()


@torch.no_grad()
def run(vae: Any, part: str) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(2)
    shape = (1, 16, 32, 40) if part == "decoder" else (1, 3, 256, 320)
    x = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    y: torch.Tensor = vae.decode(x).sample if part == "decoder" else vae.encode(x).latent_dist.parameters
    return y


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [child.weight for child in module.modules() if type(child) is nn.Conv2d]


def same_bits(pipe: Any, before: dict[str, Any]) -> bool:
    return all(torch.equal(a[0], before[name][0]) for name, a in parameters_of(pipe).items())


@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_weights_lie_channels_last_until_restore(workload: Workload, part: str) -> None:
    pipe, vae = workload.pipe, workload.pipe.vae
    module, before, stock = getattr(vae, part), parameters_of(workload.pipe), run(vae, part)
    handle = fusedit.accelerate(pipe, Plan(cache={"graphs": False}))
    fused = run(vae, part)
    assert all(map(lies_channels_last, weights(module)))
    assert same_bits(pipe, before)
    assert any(relaid.LAID in note for note in handle.report().notes)
    vae.to("cpu")
    vae.to("cuda")
    assert torch.equal(run(vae, part), fused)
    with handle.paused():
        assert torch.equal(run(vae, part), stock)
        assert all(w.is_contiguous() for w in weights(module))
    assert torch.equal(run(vae, part), fused)
    handle.restore()
    after = parameters_of(pipe)
    assert same_bits(pipe, before)
    assert all(after[name][1:] == before[name][1:] for name in before)
    assert torch.equal(run(vae, part), stock)
