"""Measurements that GPU tests share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import fusedit
from benchmarks.errors import step_errors
from benchmarks.gpu import idle_in_graphs
from benchmarks.workloads import Workload


def errors(workload: Workload, handle: fusedit.Handle, width: int, height: int, batch: int) -> tuple[float, float]:
    """Relative L2 of one step against stock in fp32: the fused forward, and stock in bf16."""
    workload.pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    return step_errors(workload, handle, workload.arguments(width, height, batch))


def draw(workload: Workload, width: int = 512, height: int = 512, batch: int = 1, **changes: Any) -> torch.Tensor:
    """Latents of three steps with the workload's random embeddings; `changes` override arguments of the call."""
    torch.manual_seed(0)
    arguments = workload.arguments(width, height, batch)
    arguments |= {"num_inference_steps": 3, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    workload.pipe.set_progress_bar_config(disable=True)
    images: torch.Tensor = workload.pipe(**{**arguments, **changes}).images
    return images


def freed() -> int:
    """Bytes still asked for after everything unreachable is gone.

    Not `memory_allocated`: the allocator may leave 1 MB of a block unsplit, so that depends on what ran before.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that tensors take, with what CUDA graphs hold for their replays."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() + idle_in_graphs()
