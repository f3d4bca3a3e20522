"""The VAE of FLUX by itself: how it is called, the plans laid on it, and its truth in fp32."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks import gpu, table, workloads
from benchmarks.plans import Laid, SideBySide
from benchmarks.workloads import Workload
from fusedit.quality.metrics import relative_l2
from fusedit.vae_stages import no_tf32

PLANS: Final[tuple[str, ...]] = ("stock", "channels_last", "compile", "exact")
PARTS: Final = {"decode": "decoder", "encode": "encoder"}
"""What is measured, and the part of the VAE that computes it."""
SMALL: Final[dict[str, Any]] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 4, 8),
}


def workload() -> Workload:
    """FLUX.1-dev with its whole VAE: accelerate() asks for a pipeline, but nothing here calls the transformer."""
    return workloads.flux_1_dev(**SMALL)


def inputs(vae: Any, what: str, width: int, height: int, batch: int) -> torch.Tensor:
    """Random latents, or pictures from -1 to 1; the same ones each time."""
    torch.manual_seed(0)
    if what == "decode":
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        shape = (batch, vae.config.latent_channels, height // scale, width // scale)
        return torch.randn(shape, device=gpu.DEVICE, dtype=torch.bfloat16)
    return torch.rand((batch, vae.config.in_channels, height, width), device=gpu.DEVICE).mul(2).sub(1).bfloat16()


@torch.no_grad()
def run(vae: Any, what: str, x: torch.Tensor) -> torch.Tensor:
    """As the pipelines call it."""
    made: torch.Tensor = vae.decode(x, return_dict=False)[0] if what == "decode" else vae.encode(x).latent_dist.mode()
    return made


class VaeSideBySide(SideBySide):
    """As SideBySide; what is compiled is the decoder or the encoder.

    Stock has a copy of the VAE too: with one that is shared, each change of turns would put the weights of its
    convolutions back, lay them anew and drop the graphs.
    """

    def __init__(self, workload: Workload, what: str) -> None:
        super().__init__(workload)
        self.what = what

    def lay(self, plan: str) -> Laid:
        if plan not in ("stock", "channels_last", "compile"):
            return super().lay(plan)
        vae = copy.deepcopy(self.workload.pipe.vae)
        if plan != "stock":
            vae = vae.to(memory_format=torch.channels_last)
        if plan == "compile":
            torch.compiler.reset()  # else what was compiled for another size makes this one compile for any size
            self._compiled = True
            compile_in_place(getattr(vae, PARTS[self.what]))
        self._copies.append(self.workload.with_components(vae=vae))
        return Laid(plan, self._copies[-1].pipe, contextlib.nullcontext)


def compile_in_place(part: Any) -> None:
    part.compile()


@dataclass(frozen=True)
class Truth:
    """What comes out in fp32.

    Attributes:
        exact: None where it was not to be had.
        why: ... and why not.
        stock_error: that of stock in bf16; None where either is missing.
    """

    exact: torch.Tensor | None
    why: str
    stock_error: float | None

    def error(self, made: torch.Tensor) -> float | None:
        return None if self.exact is None else relative_l2(self.exact, made)


def truth(vae: Any, what: str, x: torch.Tensor) -> Truth:
    """Run a copy in fp32, and stock; the pipeline must not be accelerated, or be paused."""
    try:
        exact = _in_fp32(vae, what, x)
    except RuntimeError as error:  # libraries that lack memory do not all raise OutOfMemoryError
        gpu.free()
        return Truth(None, f"fp32: {table.why(error)}", None)
    gpu.free()
    try:
        stock_error = relative_l2(exact, run(vae, what, x))
    except RuntimeError as error:
        gpu.free()
        return Truth(exact, f"stock: {table.why(error)}", None)
    return Truth(exact, "", stock_error)


def _in_fp32(vae: Any, what: str, x: torch.Tensor) -> torch.Tensor:
    """A picture of the batch at a time, so that it fits."""
    whole = copy.deepcopy(vae).float()
    with no_tf32():
        return torch.cat([run(whole, what, x[i : i + 1].float()) for i in range(len(x))])
