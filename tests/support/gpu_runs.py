"""Runs at the real width and a few layers, with CUDA graphs and without, for both architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

import fusedit
from benchmarks.workloads import Workload, flux_1_dev, z_image_turbo
from fusedit.plan import Plan
from fusedit.report import CacheReport, Report
from support.gpu import draw, freed
from support.pipes import relative

EAGER = Plan(cache={"graphs": False})
WIDTH, HEIGHT = 256, 256
Script = Callable[[fusedit.Handle], list[torch.Tensor]]


class GpuKind(NamedTuple):
    """One architecture.

    Attributes:
        name: as in the names of its rewrites.
        make: its workload, with changes to the config.
        shallow: a config of few layers.
        one: one of fewer still.
        weights: parameters that a captured step reads, packed ones among them.
        lora: names of layers for a LoRA, some of them packed.
    """

    name: str
    make: Callable[..., Workload]
    shallow: dict[str, int]
    one: dict[str, int]
    weights: tuple[str, ...]
    lora: tuple[str, ...]


KINDS = (
    GpuKind(
        "flux",
        flux_1_dev,
        {"num_layers": 2, "num_single_layers": 3},
        {"num_layers": 1, "num_single_layers": 1},
        ("transformer_blocks.1.attn.to_k.weight", "single_transformer_blocks.0.attn.norm_q.weight", "x_embedder.bias"),
        ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_out", "x_embedder"),
    ),
    GpuKind(
        "z_image",
        z_image_turbo,
        {"n_layers": 3},
        {"n_layers": 1},
        ("layers.0.attention.to_k.weight", "noise_refiner.0.ffn_norm1.weight", "all_x_embedder.2-1.bias"),
        ("layers.0.attention.to_q", "layers.0.feed_forward.w2", "all_x_embedder"),
    ),
)


def picture(workload: Workload, width: int = WIDTH, height: int = HEIGHT, batch: int = 1, **changes: Any) -> Any:
    """Latents of six steps."""
    return draw(workload, width, height, batch, **{"num_inference_steps": 6, **changes})


def prompt(workload: Workload, *lengths: int, seed: int = 1) -> dict[str, Any]:
    """Arguments for a batch of prompts of these lengths (FLUX makes them all the longest)."""
    torch.manual_seed(seed)
    arguments = workload.arguments(WIDTH, HEIGHT, len(lengths), lengths)
    return {name: value for name, value in arguments.items() if name.endswith("embeds")}


def guidance(workload: Workload) -> dict[str, Any]:
    """A prompt, and real guidance away from another one."""
    made = prompt(workload, 64)
    made |= {f"negative_{name}": value for name, value in prompt(workload, 64, seed=2).items()}
    return {**made, **({"true_cfg_scale": 2.0} if "pooled_prompt_embeds" in made else {"guidance_scale": 3.0})}


def cached(report: Report, name: str) -> CacheReport:
    found = [cache for cache in report.caches if cache.name == name]
    return found[0] if found else CacheReport(name, 0, 0, 0, 0, 0)


def graphs_of(handle: fusedit.Handle) -> CacheReport:
    return cached(handle.report(), "graphs")


def told(workload: Workload, plan: Plan | str, script: Script) -> tuple[list[torch.Tensor], Report]:
    """What a script draws on the pipeline accelerated by this plan, and the report before it is restored."""
    handle = fusedit.accelerate(workload.pipe, plan)
    try:
        drawn = script(handle)
        assert all(torch.isfinite(item).all() for item in drawn)
        return drawn, handle.report()
    finally:
        handle.restore()
        freed()


def same(workload: Workload, script: Script) -> tuple[list[torch.Tensor], Report]:
    """The script draws the same bits, and counts the same, with graphs and without; -> with graphs."""
    eager, without = told(workload, EAGER, script)
    drawn, report = told(workload, "exact", script)
    assert len(drawn) == len(eager)
    assert [torch.equal(a, b) for a, b in zip(drawn, eager, strict=True)] == [True] * len(eager)
    ours, theirs = ([(s.site, s.fused, dict(s.reasons)) for s in r.rewritten] for r in (report, without))
    assert ours == theirs
    assert cached(without, "graphs").hits == 0
    assert cached(report, "graphs").hits > 0
    return drawn, report


class Seen:
    """The last call of a transformer, made by its pipeline: what it was given and what it gave."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.model = workload, workload.pipe.transformer
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.output: Any = None

    def __enter__(self) -> Seen:
        self._hook = self.model.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()

    def _keep(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.args, self.kwargs, self.output = args, kwargs, output[0]


def flat(output: Any) -> torch.Tensor:
    """The output of a transformer, a tensor or one an item, as one tensor."""
    return torch.stack(list(output)).float()


@torch.no_grad()
def stock_and_exact(
    model: Any, handle: fusedit.Handle, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's output for a call, and that of stock in fp32."""

    def wide(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    dtype = model.dtype
    with handle.paused():
        stock = flat(model(*args, **kwargs)[0])
        model.to(torch.float32)  # bf16 -> fp32 -> bf16 gives the same bits back
        try:
            exact = flat(model(*tree_map(wide, args), **tree_map(wide, kwargs))[0])
        finally:
            model.to(dtype)
    return stock, exact


def errors_of(fused: Any, stock: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative L2 against stock in fp32: ours, and stock's own."""
    return relative(flat(fused), exact), relative(stock, exact)
