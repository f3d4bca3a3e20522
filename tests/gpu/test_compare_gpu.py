"""compare(), draw() and doctor on a GPU: event timing, memory peaks, the bf16 yardstick, running out of memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support import whole_pipes

import fusedit
from fusedit.defaults import request_for
from fusedit.doctor import examine
from fusedit.drawing import draw
from fusedit.errors import DeviceMemoryError, NonFiniteError

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["flux_pipe", "z_image_pipe"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return getattr(whole_pipes, request.param)().to("cuda", torch.bfloat16)


def test_the_yardstick_on_the_gpu(pipe: Any) -> None:
    prompts = ["red fox", "blue cat", "green apple", ""]
    result = fusedit.compare(pipe, prompts, seeds=range(5), reference="fp32", width=128, height=96, steps=4)
    assert result.verdict.passed, result.verdict.reasons
    assert (result.device, result.dtype) == ("cuda", "bf16")
    assert len([pair for pair in result.pairs if pair.stock_fp32_db is not None]) == 20
    for arm in (result.stock, result.fused):
        assert arm.peak_bytes is not None
        assert arm.peak_bytes > 0
        assert arm.step_ms is not None
        assert arm.total_s is not None
        assert 4 * arm.step_ms < 2e3 * arm.total_s
    assert result.environment["gpu"]
    assert pipe.transformer.dtype == torch.bfloat16


def test_the_seed_alone_makes_the_picture(pipe: Any) -> None:
    request = request_for(pipe, "red fox", 7, width=64, height=64, steps=2)
    own = pipe(
        prompt="red fox",
        width=64,
        height=64,
        num_inference_steps=2,
        guidance_scale=request.guidance,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type="np",
    ).images[0]
    assert np.abs(draw(pipe, request).pixels - own).max() < 1e-6


def test_nan_names_its_step_without_stopping_the_queue(pipe: Any) -> None:
    calls: list[int] = []
    bad = copy.deepcopy(pipe)

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        calls.append(1)
        if len(calls) != 2:
            return output
        first = output[0]
        return ([item * float("nan") for item in first] if isinstance(first, list) else first * float("nan"),)

    bad.transformer.register_forward_hook(hook)
    with pytest.raises(NonFiniteError, match="after step 2 of 4") as error:
        draw(bad, request_for(bad, "fox", 0, width=64, height=64, steps=4, guidance=0.0))
    assert error.value.step == 1


def test_out_of_memory_leaves_the_pipeline_usable(pipe: Any) -> None:
    request = request_for(pipe, "fox", 0, width=64, height=64, steps=1)
    before = draw(pipe, request).pixels
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.004)
    try:
        with pytest.raises(DeviceMemoryError, match="smaller size"):
            draw(pipe, request_for(pipe, "fox", 0, width=4096, height=4096, steps=1))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert np.array_equal(draw(pipe, request).pixels, before)


def test_an_offloaded_pipeline_stays_offloaded(pipe: Any) -> None:
    pipe.to("cpu")
    pipe.enable_model_cpu_offload()
    result = fusedit.compare(pipe, "fox", seeds=[0], width=64, height=64, steps=2)
    assert result.verdict.passed, result.verdict.reasons
    assert result.device == "cuda"
    assert all(p.device.type == "cpu" for p in pipe.transformer.parameters())
    assert draw(pipe, request_for(pipe, "fox", 0, width=64, height=64, steps=2)).size == result.size


def test_doctor_sees_the_gpu() -> None:
    found = examine()
    assert found["cuda"]["usable"], found["cuda"]["reason"]
    assert found["gpus"][0]["name"]
    assert all(op["works"] for op in found["ops"]), found["ops"]
