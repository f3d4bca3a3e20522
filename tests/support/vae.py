"""Fused and stock passes of a VAE in a pipeline, for the tests of its decoder and its encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fusedit
from fusedit.plan import Plan
from support.pipes import z_image_pipe


def pipe_with(vae: Any) -> Any:
    pipe = z_image_pipe()
    pipe.register_modules(vae=vae)
    return pipe


@torch.no_grad()
def both(
    pipe: Any, x: torch.Tensor, prefix: str, run: Callable[[Any, torch.Tensor], torch.Tensor], plan: Plan | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run(vae, x)` fused and stock; rewrites named PREFIX ran, and x is unchanged."""
    kept = x.clone()
    stock = run(pipe.vae, x)
    handle = fusedit.accelerate(pipe, plan)
    fused = run(pipe.vae, x)
    sites = [site for site in handle.report().rewritten if site.site.startswith(prefix)]
    handle.restore()
    assert any(site.fused for site in sites)
    assert torch.equal(x, kept)
    assert (fused.dtype, fused.shape, fused.is_contiguous()) == (stock.dtype, stock.shape, True)
    return fused, stock
