"""The peer of the fp8 tier: torchao's fp8, a scale a row, on diffusers' fused projections, compiled block by block.

The filter is the usual one for diffusion transformers: large linear layers, but for modulation and embedders. What the
fusing of diffusers leaves of the separate projections stays in memory, as it does for everyone who uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch

from benchmarks import gpu
from fusedit.errors import MissingExtraError, UsageError

LARGE: Final = 1024
"""Features that a layer takes and gives at least."""
LEFT: Final = ("norm", "embed", "adaLN")
"""Layers with one of these in their names stay bf16."""


@dataclass(frozen=True)
class Quantised:
    """What was done to a transformer.

    Attributes:
        layers: that compute in fp8.
        fused: whether diffusers fused the projections of its attention.
        seconds: for both.
        settings: torch's switches as torchao wants them, for a `with` block; outside they are as they were.
    """

    layers: int
    fused: bool
    seconds: float
    settings: Callable[[], Any]


def need_torchao() -> Any:
    """torchao.quantization.

    Raises:
        MissingExtraError: it is not installed, or does not import beside this torch.
    """
    try:
        return import_module("torchao.quantization")
    except Exception as error:  # an extension built for another torch raises whatever it likes
        raise MissingExtraError(
            f"the peer needs torchao, which cannot be imported ({type(error).__name__}: {error}); "
            "install the release that matches this torch"
        ) from None


@torch.no_grad()
def quantise(transformer: Any) -> Quantised:
    """In place.

    Raises:
        MissingExtraError: no torchao.
        UsageError: the transformer has no layer that the filter takes.
    """
    ao = need_torchao()
    gpu.synchronize()
    began = time.perf_counter()
    fused = hasattr(transformer, "fuse_qkv_projections")
    if fused:
        transformer.fuse_qkv_projections()
    taken = {name for name, module in transformer.named_modules() if _takes(module, name)}
    if not taken:
        raise UsageError(f"no linear layer takes and gives {LARGE} features or more; use a larger model")
    config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    with _undone() as settings:
        ao.quantize_(transformer, config, filter_fn=lambda _module, name: name in taken)
    gpu.synchronize()
    return Quantised(len(taken), fused, time.perf_counter() - began, settings)


def _takes(module: torch.nn.Module, name: str) -> bool:
    return (
        isinstance(module, torch.nn.Linear)
        and min(module.in_features, module.out_features) >= LARGE
        and not any(part in name for part in LEFT)
    )


@contextmanager
def _undone() -> Iterator[Callable[[], Any]]:
    """torchao sets switches of the whole process, which other plans must not see; gives a way to set them again."""
    from torch._inductor import config as inductor

    config: Any = inductor
    before, precision = config.get_config_copy(), torch.get_float32_matmul_precision()
    changed: dict[str, Any] = {}
    wanted = [precision]

    @contextmanager
    def settings() -> Iterator[None]:
        now = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(wanted[0])
        try:
            with config.patch(changed):
                yield
        finally:
            torch.set_float32_matmul_precision(now)

    try:
        yield settings
    finally:
        changed |= {name: value for name, value in config.get_config_copy().items() if before[name] != value}
        wanted[0] = torch.get_float32_matmul_precision()
        config.load_config({name: before[name] for name in changed})
        torch.set_float32_matmul_precision(precision)
