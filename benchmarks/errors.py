"""Error of one denoising step against stock in fp32 on the same weights."""

from __future__ import annotations

from typing import Any

import torch

import fusedit
from benchmarks.workloads import Workload

Call = tuple[tuple[Any, ...], dict[str, Any]]


def captured_call(workload: Workload, arguments: dict[str, Any], steps: int = 4) -> Call:
    """The arguments the pipeline gives its transformer in the middle of a run."""
    calls: list[Call] = []
    hook = workload.pipe.transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        workload.pipe(
            **arguments,
            num_inference_steps=steps,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        )
    finally:
        hook.remove()
    return calls[steps // 2]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def _flat(output: Any) -> torch.Tensor:
    first = output[0]
    return torch.cat([item.float().flatten() for item in (first if isinstance(first, list) else [first])])


@torch.no_grad()
def step_errors(workload: Workload, handle: fusedit.Handle, arguments: dict[str, Any]) -> tuple[float, float]:
    """Relative L2 against stock in fp32: ours, and stock's own in bf16. Leaves the weights as they were."""
    model = workload.pipe.transformer
    args, kwargs = captured_call(workload, arguments)
    fused = _flat(model(*args, **kwargs))
    with handle.paused():
        stock = _flat(model(*args, **kwargs))
        model.to(torch.float32)  # bf16 -> fp32 -> bf16 gives the same bits back
        try:
            exact = _flat(model(*_cast(args, torch.float32), **_cast(kwargs, torch.float32)))
        finally:
            model.to(torch.bfloat16)
    return float((fused - exact).norm() / exact.norm()), float((stock - exact).norm() / exact.norm())
