"""The benchmarks' models with few and narrow layers, and the environment that the results of these tests name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workloads import Workload, flux_1_dev, z_image_turbo

TINY_FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 4, 8),
}
TINY_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 20,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
}
ENVIRONMENT: dict[str, Any] = {
    "device": "Paper GPU",
    "power_limit_w": 100.0,
    "driver": "1.2.3",
    "versions": {"torch": "2.0"},
    "date": "2026-01-02",
    "time": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
}


def tiny_flux(**config: Any) -> Workload:
    return flux_1_dev(**{**TINY_FLUX, **config})


def tiny_z_image(**config: Any) -> Workload:
    return z_image_turbo(**{**TINY_Z_IMAGE, **config})


TINY: dict[str, Callable[..., Workload]] = {"flux.1-dev": tiny_flux, "z-image-turbo": tiny_z_image}
