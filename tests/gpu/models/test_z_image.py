"""What only Z-Image has, on a GPU at the real width: mixed batches, guidance with several images a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.gpu import draw, freed
from support.pipes import relative

import fusedit
from benchmarks.workloads import Workload, z_image_turbo


@pytest.fixture(scope="module")
def shallow() -> Iterator[Workload]:
    """Real width, 3 layers."""
    yield z_image_turbo(n_layers=3)
    freed()


def captions(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(n, 2560, device="cuda", generator=generator).bfloat16() for n in lengths]


@torch.no_grad()
def test_mixed_batch_matches_stock_and_its_solo_runs(shallow: Workload) -> None:
    """BAT-01 at the real width: sizes and caption lengths mixed, the error against fp32 no larger than stock's."""
    model = shallow.pipe.transformer
    images = [torch.randn(16, 1, h, w, device="cuda").bfloat16() for h, w in ((64, 64), (34, 66), (128, 40))]
    texts = captions(5, 200, 70)
    t = torch.tensor([0.3, 0.5, 0.8], device="cuda").bfloat16()
    stock = model(images, t, texts, return_dict=False)[0]
    handle = fusedit.accelerate(shallow.pipe)
    fused = model(images, t, texts, return_dict=False)[0]
    solo = [model(images[i : i + 1], t[i : i + 1], texts[i : i + 1], return_dict=False)[0][0] for i in range(3)]
    handle.restore()
    model.to(torch.float32)
    exact = model([i.float() for i in images], t.float(), [c.float() for c in texts], return_dict=False)[0]
    model.to(torch.bfloat16)
    assert sum(map(relative, fused, exact)) <= 1.05 * sum(map(relative, stock, exact))
    assert sum(map(relative, solo, exact)) <= 1.05 * sum(map(relative, stock, exact))


def test_guidance_and_several_images_a_prompt(shallow: Workload) -> None:
    arguments = {
        "prompt_embeds": captions(40, 200),
        "negative_prompt_embeds": captions(3, 3),
        "guidance_scale": 4.0,
        "num_images_per_prompt": 2,
    }
    stock = draw(shallow, **arguments)
    handle = fusedit.accelerate(shallow.pipe)
    fused = draw(shallow, **arguments)
    handle.restore()
    assert fused.shape[0] == 4
    assert torch.isfinite(fused).all()
    assert relative(fused, stock) < 0.05
