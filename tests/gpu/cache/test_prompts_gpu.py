"""The prompt cache on a GPU: offload, moving between devices, and checksums that are the same on both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.prompts import embeds, equal, latents, prompts_of, quiet
from support.whole_pipes import flux_pipe, z_image_pipe

import fusedit
from fusedit.cache.checksum import checksums

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[flux_pipe, z_image_pipe])
def pipe(request: pytest.FixtureRequest) -> Any:
    return quiet(request.param()).to(torch.bfloat16)


def test_a_kept_prompt_leaves_the_encoders_on_the_cpu(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.hooks import CpuOffload

    moved: Counter[str] = Counter()
    move = CpuOffload.pre_forward

    def pre_forward(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        moved[type(module).__name__] += 1
        return move(self, module, *args, **kwargs)

    monkeypatch.setattr(CpuOffload, "pre_forward", pre_forward)
    pipe.enable_model_cpu_offload()
    encoders = {
        type(getattr(pipe, name)).__name__ for name in ("text_encoder", "text_encoder_2") if hasattr(pipe, name)
    }
    handle = fusedit.accelerate(pipe)
    first = latents(pipe)
    assert first.is_cuda
    counts = {name: moved[name] for name in encoders}
    assert all(counts.values())
    assert torch.equal(latents(pipe), first)
    assert {name: moved[name] for name in encoders} == counts
    report = prompts_of(handle)
    assert (report.hits, report.misses, report.reasons) == (1, 1, {})
    kept = embeds(pipe)
    with handle.paused():
        assert equal(kept, embeds(pipe))
    assert {name: moved[name] for name in encoders} == {name: 2 * count for name, count in counts.items()}


def test_a_change_while_offloaded_is_followed(pipe: Any, runs: Counter[str]) -> None:
    pipe.enable_model_cpu_offload()
    handle = fusedit.accelerate(pipe)
    before = embeds(pipe)
    pipe.maybe_free_model_hooks()
    count = runs.total()
    assert equal(embeds(pipe), before)
    assert runs.total() == count
    next(p for p in pipe.text_encoder.parameters() if p.ndim == 2).data.mul_(2)
    now = embeds(pipe)
    with handle.paused():
        assert equal(now, embeds(pipe))
    assert not equal(now, before)


def test_another_device_starts_anew_and_frees_what_was_kept(pipe: Any, runs: Counter[str]) -> None:
    pipe.to("cuda")
    handle = fusedit.accelerate(pipe)
    on_gpu = embeds(pipe)
    embeds(pipe, "cat")
    assert all(tensor.is_cuda for tensor in on_gpu)
    two = prompts_of(handle).bytes
    pipe.to("cpu")
    count = runs.total()
    on_cpu = embeds(pipe)
    assert not any(tensor.is_cuda for tensor in on_cpu)
    assert runs.total() > count
    assert prompts_of(handle).bytes < two
    pipe.to("cuda")
    assert equal(embeds(pipe), on_gpu)


def test_checksums_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(4096, 1024, generator=generator).bfloat16(),
        torch.randn(1000, 333, generator=generator),
        torch.randn(77, generator=generator).bfloat16(),
        torch.arange(13, dtype=torch.int8),
    ]
    expected = checksums(tensors)
    moved = [tensor.cuda() for tensor in tensors]
    assert checksums(moved) == expected
    moved[0][4095, 1023] += 1
    assert checksums(moved) != expected
