"""Training a LoRA: the styles, a few steps on a CPU, and the file that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors import safe_open
from support.lora_training import losses, write_pack
from tiny import batches, styles
from tiny.lora import save_lora
from train_lora import Lora, prepare

from fusedit.assets import embedded_models

STEPS = 8
BLOCKS = {"tiny-flux": 12 + 10 * 5, "tiny-z-image": 12 * 7}  # layers with a LoRA: attention and feed-forward of each


@pytest.fixture(scope="module", params=sorted(BLOCKS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Lora, list[float]]:
    """Name, LoRA and losses of a model trained for STEPS steps."""
    pack = write_pack(tmp_path_factory.mktemp("pack"))
    lora = prepare(request.param, "blueprint", pack, torch.device("cpu"), divisor=9999)
    return request.param, lora, losses(lora, STEPS)


def test_the_loss_falls(trained: tuple[str, Lora, list[float]]) -> None:
    assert trained[2][-1] < 0.9 * trained[2][0]


def test_only_the_lora_learns(trained: tuple[str, Lora, list[float]]) -> None:
    name, lora, _ = trained
    stock = dict(DiffusionPipeline.from_pretrained(embedded_models()[name]).transformer.named_parameters())
    learnt = [key for key, weight in lora.pipe.transformer.named_parameters() if weight.requires_grad]
    assert len(learnt) == 2 * BLOCKS[name]
    for key, weight in lora.pipe.transformer.named_parameters():
        if key not in learnt:
            assert torch.equal(weight, stock[key.replace(".base_layer", "")]), key


def test_the_file_gives_another_pipeline_the_same_lora(trained: tuple[str, Lora, list[float]], tmp_path: Path) -> None:
    name, lora, _ = trained
    lora.settle()
    file = tmp_path / f"{name}-blueprint.safetensors"
    save_lora(lora.pipe, file, {"model": name, "steps": str(STEPS)})
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["model"] == name
        assert {opened.get_tensor(key).dtype for key in opened.keys()} == {torch.bfloat16}  # noqa: SIM118
    other = DiffusionPipeline.from_pretrained(embedded_models()[name])
    other.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="default")
    loaded = dict(other.transformer.named_parameters())
    learnt = {key: weight for key, weight in lora.pipe.transformer.named_parameters() if weight.requires_grad}
    assert learnt.keys() == {key for key in loaded if "lora_" in key}
    for key, weight in learnt.items():
        assert torch.equal(loaded[key], weight.bfloat16().float()), key
    assert all(weight.abs().max() > 0 for weight in learnt.values())


def test_a_frozen_copy_teaches_what_the_lora_has_learnt(trained: tuple[str, Lora, list[float]]) -> None:
    _, lora, _ = trained
    lora.task.start_distilling(lora.optimizer.average_state())
    try:
        teacher = dict(lora.task.teacher.named_parameters())  # type: ignore[union-attr]
        assert not any(weight.requires_grad for weight in teacher.values())
        assert all(torch.equal(teacher[key], value) for key, value in lora.optimizer.average_state().items())
        kind = batches.Kind(128, 128, batches.SHORT_TEXT, True)
        assert 0 < float(lora.task.loss(kind).detach()) < 10
    finally:
        lora.task.teacher = None


@pytest.mark.parametrize("name", sorted(styles.STYLES))
def test_a_style_is_deterministic_and_keeps_size_and_range(name: str) -> None:
    pictures = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    before = pictures.clone()
    drawn = styles.STYLES[name](pictures)
    assert drawn.shape == pictures.shape
    assert drawn.abs().max() <= 1
    assert torch.equal(pictures, before)
    assert torch.equal(drawn, styles.STYLES[name](pictures))
    assert torch.equal(drawn[1:], styles.STYLES[name](pictures[1:]))  # one picture does not change another


def test_a_blueprint_does_not_depend_on_the_backgrounds_colour() -> None:
    empty = torch.ones(2, 3, 64, 64) * torch.tensor([-0.8, 0.9])[:, None, None, None]
    drawn = styles.blueprint(empty)
    assert torch.equal(drawn[0], drawn[1])
    assert drawn[:, 2].mean() > drawn[:, 0].mean() + 0.5


def test_a_risograph_prints_the_paper_bare_where_a_picture_is_white_and_full_where_it_is_black() -> None:
    white, black = styles.risograph(torch.stack([torch.ones(3, 64, 64), -torch.ones(3, 64, 64)]))
    assert (white == white[:, :1, :1]).all()
    assert white.mean() > 0.6
    assert black.mean() < -0.6
