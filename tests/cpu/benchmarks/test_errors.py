"""The error of a step: against stock in fp32 on the same input, inside the pipeline, each item of a batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.pipes import relative

import fusedit
from benchmarks import errors
from benchmarks.errors import step_errors, truth
from benchmarks.workloads import Workload


def in_fp32(workload: Workload, batch: int) -> dict[str, Any]:
    """The transformer in fp32, and arguments for it."""
    workload.pipe.transformer.float()

    def wide(value: Any) -> Any:
        if isinstance(value, list):
            return [item.float() for item in value]
        return value.float() if isinstance(value, torch.Tensor) else value

    return {name: wide(value) for name, value in workload.arguments(64, 48, batch).items()}


def test_stock_in_fp32_has_no_error(workload: Workload) -> None:
    found = truth(workload, in_fp32(workload, 3))
    assert found.stock_error is not None
    assert found.stock_error < 1e-5
    error, seconds = found.check(workload.pipe)
    assert error == found.stock_error
    assert seconds > 0


def test_bf16_has_one_and_the_weights_are_as_before(workload: Workload) -> None:
    before = copy.deepcopy(workload.pipe.transformer.state_dict())
    found = truth(workload, workload.arguments(64, 48, 2))
    assert found.stock_error is not None
    assert 1e-4 < found.stock_error < 0.5
    after = workload.pipe.transformer.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert len(found.stock.latents) == errors.STEPS
    assert found.exact is not None
    assert found.exact.shape == found.stock.prediction.shape


def test_a_wrong_pipeline_is_seen(workload: Workload) -> None:
    found = truth(workload, workload.arguments(64, 48, 1))
    assert found.stock_error is not None
    same = workload.with_components(transformer=copy.deepcopy(workload.pipe.transformer))
    assert found.check(same.pipe)[0] == found.stock_error
    wrong = copy.deepcopy(workload.pipe.transformer)
    wrong.register_forward_hook(
        lambda _module, _args, output: (
            ([1.5 * item for item in output[0]],) if isinstance(output[0], list) else (1.5 * output[0],)
        )
    )
    error, _ = found.check(workload.with_components(transformer=wrong).pipe)
    assert error == pytest.approx(0.5, rel=0.2)


def test_the_same_input_whatever_the_plan_did_before(workload: Workload) -> None:
    """A pipeline that is wrong in its first step only has stock's error in the last."""
    found = truth(workload, workload.arguments(64, 48, 1))
    calls: list[int] = []

    def first_only(_module: torch.nn.Module, _args: object, output: tuple[object, ...]) -> object:
        calls.append(1)
        if len(calls) > 1:
            return output
        value = output[0]
        return ([7.0 * item for item in value],) if isinstance(value, list) else (7.0 * value,)  # type: ignore[operator]

    late = copy.deepcopy(workload.pipe.transformer)
    late.register_forward_hook(first_only)
    assert found.check(workload.with_components(transformer=late).pipe)[0] == found.stock_error
    assert len(calls) == errors.STEPS


def test_fp32_that_does_not_fit_leaves_the_row_unchecked(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(errors, "_in_fp32", full)
    found = truth(workload, workload.arguments(64, 48, 1))
    assert found.stock_error is None
    assert found.check(workload.pipe)[0] is None


def test_items_of_a_batch_have_their_own_reference(workload: Workload) -> None:
    arguments = in_fp32(workload, 2)
    found = truth(workload, arguments)
    solo = truth(workload, {k: v[:1] if k.endswith("embeds") else v for k, v in arguments.items()})
    assert found.exact is not None
    assert solo.exact is not None
    assert relative(found.exact[:1], solo.exact) < 1e-4
    assert relative(found.exact[1:], solo.exact) > 1e-2


def test_step_errors_of_an_accelerated_pipeline(workload: Workload) -> None:
    handle = fusedit.accelerate(workload.pipe)
    ours, stock = step_errors(workload, handle, workload.arguments(64, 48, 2))
    assert ours <= 1.05 * stock
    sites = {site.site: site for site in handle.report().rewritten}
    name = "flux.packed_qkv" if "flux.packed_qkv" in sites else "z_image.packed_qkv"
    assert sites[name].fused > 0
    assert sites[name].stock == 0
    handle.restore()
