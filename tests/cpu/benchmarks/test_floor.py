"""The floor: exactly the products of the blocks and attention, merged, on weights that take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from torch.overrides import TorchFunctionMode

from benchmarks import floor
from benchmarks.floor import Attention, Product, flux_parts, step_of, z_image_parts
from benchmarks.plans import SideBySide
from benchmarks.workloads import Workload

BLOCKS = {
    "flux.1-dev": ("transformer_blocks.", "single_transformer_blocks."),
    "z-image-turbo": ("layers.", "noise_refiner."),
}


def flops(parts: list[floor.Part]) -> int:
    return sum(part.flops for part in parts)


def meta(kind: Any, **config: Any) -> Any:
    with torch.device("meta"):
        return kind(**config)


def test_real_sizes_cost_what_was_measured_for_them() -> None:
    """644 and 639 TFLOP/s in 115.5 and 90.6 ms at 1024x1024, of another program on an H200."""
    flux = flux_parts(meta(FluxTransformer2DModel, num_layers=19).config, 1, 4096, 512)
    z_image = z_image_parts(meta(ZImageTransformer2DModel).config, 1, 4096, 200)
    assert flops(flux) == pytest.approx(644e12 * 115.5e-3, rel=2e-3)
    assert flops(z_image) == pytest.approx(639e12 * 90.6e-3, rel=2e-3)
    assert len(flux) == 19 * 9 + 38 * 3
    assert len(z_image) == 32 * 5


class Attentions(TorchFunctionMode):
    """Notes the shapes of attention's queries, [batch, heads, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.shapes.append(tuple((kwargs or {}).get("query", args[0] if args else None).shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
def test_counts_what_stock_computes_in_its_blocks(workload: Workload, batch: int) -> None:
    pipe, done = workload.pipe, 0
    names = {module: name for name, module in pipe.transformer.named_modules()}

    def linear(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal done
        if names[module].startswith(BLOCKS[workload.name]) and args[0].ndim == 3:  # modulation has two dimensions
            done += 2 * args[0].numel() * output.shape[-1]

    for module in names:
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(linear)
    with Attentions() as attentions:
        pipe(**workload.arguments(128, 64, batch), num_inference_steps=1, output_type="latent")
    parts = workload.parts(128, 64, batch)
    assert sum(part.flops for part in parts if isinstance(part, Product)) == done
    ours = [(p.batch, p.heads, p.tokens, p.width) for p in parts if isinstance(p, Attention)]
    once_a_run = [shape for shape in attentions.shapes if shape[2] == 224]  # the captions' refiner
    assert sorted(ours + once_a_run) == sorted(attentions.shapes)
    assert len(once_a_run) == (1 if workload.name == "z-image-turbo" else 0)


def test_weights_take_turns_and_inputs_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x.data_ptr(), w.data_ptr()))
        return x @ w.T

    monkeypatch.setattr(floor.F, "linear", linear)
    step, library = step_of([Product(4, 8, 6)] * 5 + [Product(4, 6, 8)])
    step()
    assert library == ""
    assert len({x for x, _ in seen[:5]}) == 1
    weights = [w for _, w in seen[:5]]
    assert weights[0] != weights[1]
    assert weights == [weights[0], weights[1]] * 2 + [weights[0]]


def test_fp8_products_are_scaled_by_row_and_attention_stays_as_it_is(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    scaled = torch._scaled_mm

    def product(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
        assert (x.dtype, w.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        assert (options["scale_a"].shape, options["scale_b"].shape) == ((len(x), 1), (1, w.shape[1]))
        made = scaled(x, w, **options)
        assert (made.shape, made.dtype) == ((len(x), w.shape[1]), torch.bfloat16)
        seen.append((*x.shape, w.shape[1]))
        return made

    monkeypatch.setattr(torch, "_scaled_mm", product)
    parts = workload.parts(64, 48, 2)
    step, library = step_of(parts, fp8=True)
    with Attentions() as attentions:
        step()
    assert library == "torch's choice"
    assert seen == [(p.rows, p.inputs, p.outputs) for p in parts if isinstance(p, Product)]
    assert len(attentions.shapes) == sum(isinstance(part, Attention) for part in parts)


def test_attention_by_torchs_choice_without_cudnn(workload: Workload) -> None:
    step, library = step_of(workload.parts(64, 48, 2))
    step()
    assert library == "torch's choice"


def test_out_of_memory_is_not_taken_for_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(floor.F, "scaled_dot_product_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        step_of([Attention(1, 2, 8, 16)])


def test_the_config_of_a_laid_pipeline_gives_the_same_floor(workload: Workload) -> None:
    before = workload.parts(64, 48, 1)
    with SideBySide(workload) as bench:
        bench.lay("exact")
        assert workload.parts(64, 48, 1) == before
