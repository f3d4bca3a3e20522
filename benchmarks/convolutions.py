"""Every convolution of FLUX's VAE, by cuDNN and by the ops that could stand in its place.

`cudnn` has no bias, `cudnn+bias` adds it in a second kernel of torch's. `library` and `own` are ops.conv2d with those
algorithms: cuDNN and one pass of ours, and our kernels, which add the bias themselves. `winograd-2` and `winograd-4`
are ops.winograd_conv2d on weights that were transformed before. Where a 3x3 has as many outputs as channels, as the
last one of a residual block, `library+residual` and `own+residual` add a residual too. Pictures, weights and results
lie channels_last. A layer's arguments take turns, so that none lies in the cache. TFLOP/s are those of a direct
convolution, whatever computes it.

The error is relative L2 against fp32 on the same values, of the convolution alone: for it no plan is given a bias or a
residual. Green is what the ops ask for: at most twice that of `cudnn` in bf16, plus 1e-6.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import typer

from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.ops import MOST_CALLS, MOST_SETS, REPLAY_S, Timed, in_turn
from benchmarks.results import Results, Row
from benchmarks.sustained import spread_of
from fusedit import ops
from fusedit.errors import UsageError
from fusedit.ops import _conv
from fusedit.ops._verify import Error
from fusedit.quality.metrics import relative_l2
from fusedit.vae_stages import no_tf32

Tensor = torch.Tensor
Call = Callable[[], Tensor]
PLANS: Final = ("cudnn", "cudnn+bias", "library", "own", "winograd-2", "winograd-4")
BESIDE_A_RESIDUAL: Final = ("library+residual", "own+residual")
FASTEST: Final = 1e15
"""FLOP/s that no card here exceeds: so many calls that a replay lasts about REPLAY_S, or longer."""


class Layer(NamedTuple):
    """A convolution R x R of C to K channels on a picture."""

    C: int
    K: int
    R: int
    width: int
    height: int

    @property
    def in_a_block(self) -> bool:
        """Whether a residual can be added to its result."""
        return self.R == 3 and self.C == self.K

    @property
    def plans(self) -> tuple[str, ...]:
        """Those that this layer has: Winograd is for 3x3 only."""
        alone = PLANS if self.R == 3 else PLANS[:4]
        return (*alone, *BESIDE_A_RESIDUAL) if self.in_a_block else alone

    @property
    def flops(self) -> int:
        return 2 * self.width * self.height * self.C * self.K * self.R**2


class Arguments(NamedTuple):
    """What one call is given; results are about 1."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None


def layers(sizes: list[given.Size]) -> list[Layer]:
    """Those of the VAE at these sizes, each once: a deep one of a large picture is a shallow one of a small."""
    scaled = [
        Layer(layer.C, layer.K, layer.R, width // layer.scale, height // layer.scale)
        for width, height in sizes
        for layer in _conv.VAE
    ]
    return list(dict.fromkeys(scaled))


def arguments(layer: Layer) -> Arguments:
    x = _random(1, layer.C, layer.height, layer.width)
    weight = _random(layer.K, layer.C, layer.R, layer.R).mul_((layer.R**2 * layer.C) ** -0.5)
    bias = torch.randn(layer.K, dtype=torch.bfloat16, device=gpu.DEVICE)
    return Arguments(x, weight, bias, _random(*x.shape) if layer.in_a_block else None)


def _random(*shape: int) -> Tensor:
    empty = torch.empty(shape, dtype=torch.bfloat16, device=gpu.DEVICE, memory_format=torch.channels_last)
    return empty.normal_()


def prepare(plan: str, a: Arguments) -> Call:
    """The plan's call on these arguments; what a model does once for all calls is done here."""
    if plan in ("cudnn", "cudnn+bias"):
        bias = a.bias if plan == "cudnn+bias" else None
        return lambda: F.conv2d(a.x, a.weight, bias, padding=a.weight.shape[-1] // 2)
    if not plan.startswith("winograd"):
        conv, algorithm = _op("conv2d"), plan.removesuffix("+residual")
        residual = a.residual if plan.endswith("+residual") else None
        return lambda: conv(a.x, a.weight, a.bias, residual, "none", algorithm)
    winograd = _op("winograd_conv2d")
    u = _op("winograd_weight")(a.weight, int(plan.removeprefix("winograd-")))
    return lambda: winograd(a.x, u, a.bias, None, "none")


def _op(name: str) -> Any:
    found = ops.registry().get(name)
    if found is None:
        raise UsageError(f"no such op: {name}")
    return found


@torch.no_grad()
def measure(layer: Layer, seconds: float) -> list[Row]:
    """A row for each plan."""
    torch.manual_seed(0)
    name, size = f"{layer.C}->{layer.K} {layer.R}x{layer.R}", f"{layer.width}x{layer.height}"
    rows = {plan: Row("convolutions", name, size, 1, plan) for plan in layer.plans}
    runs: dict[str, Timed] = {}

    def attempt(plan: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            rows[plan].error = str(error) if isinstance(error, UsageError) else table.why(error)
            runs.pop(plan, None)
        gpu.free()

    try:
        sets = _sets(layer)
        with no_tf32():
            truth = F.conv2d(sets[0].x.float(), sets[0].weight.float(), padding=layer.R // 2)
    except RuntimeError as error:
        for row in rows.values():
            row.error = table.why(error)
        return list(rows.values())
    for plan, row in rows.items():
        attempt(plan, partial(_check, row, truth, sets[0], rows["cudnn"]))
    del truth
    gpu.free()
    for plan in (plan for plan, row in rows.items() if row.error is None):
        attempt(plan, partial(_try, plan, sets, layer, runs))
    try:
        for plan, times in in_turn(runs, seconds).items() if runs else ():
            _fill(rows[plan], times, layer)
    except Exception as error:
        for plan in runs:
            rows[plan].error = table.why(error)
    return list(rows.values())


def _sets(layer: Layer) -> list[Arguments]:
    first = arguments(layer)
    number = math.ceil(4 * gpu.l2_bytes() / gpu.bytes_of((first.x, first.weight)))
    return [first, *(arguments(layer) for _ in range(min(MOST_SETS, max(2, number)) - 1))]


def _check(row: Row, truth: Tensor, a: Arguments, stock: Row) -> None:
    made = prepare(row.plan, a._replace(bias=None, residual=None))()
    row.rel_error = relative_l2(truth, made)
    row.stock_rel_error = stock.rel_error
    if row.stock_rel_error is not None:
        row.correct = Error(0.0, row.rel_error).within(Error(0.0, row.stock_rel_error))


def _try(plan: str, sets: list[Arguments], layer: Layer, runs: dict[str, Timed]) -> None:
    """Alone for a moment first, so that a plan that cannot be captured does not take the others with it."""
    calls = max(len(sets), min(MOST_CALLS, math.ceil(REPLAY_S * FASTEST / layer.flops)))
    turns = list(itertools.islice(itertools.cycle([prepare(plan, a) for a in sets]), calls))

    def run() -> None:
        for call in turns:
            call()  # what it makes goes at once, so that a graph of many calls has room

    timed = Timed(run, calls)
    in_turn({plan: timed}, 0.0)
    runs[plan] = timed


def _fill(row: Row, times: list[float], layer: Layer) -> None:
    low, high = spread_of(times)
    row.ms, row.spread = round(statistics.median(times), 5), (round(low, 5), round(high, 5))
    row.more |= {"flops": layer.flops, "tflop_s": round(layer.flops / (1e-3 * row.ms) / 1e12, 3)}


def main(
    size: Annotated[
        str, typer.Option(help="Comma-separated WIDTHxHEIGHT of whole pictures")
    ] = "512x512,1024x1024,2048x2048",
    seconds: Annotated[float, typer.Option(help="How long each plan of each layer runs for")] = 0.3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Each convolution of the VAE. Example: python -m benchmarks convolutions --size 1024x1024"""
    sizes = given.sizes(size)
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("convolutions")
    results = Results(json_file)
    for layer in layers(sizes):
        rows = measure(layer, seconds)
        results.add(rows)
        show(rows)
        gpu.free()


def show(rows: list[Row]) -> None:
    """One line a row; ratios against cuDNN with a bias."""
    stock = next((row for row in rows if row.plan == "cudnn+bias"), None)
    for row in rows:
        label = f"{row.model:12} {row.size:9} {row.plan:16}"
        if row.error is not None or row.ms is None:
            typer.echo(f"{label} {row.error or 'not measured'}")
            continue
        parts = [f"{label} {row.ms:9.4f} ms", f"{row.more['tflop_s']:.0f} TFLOP/s"]
        if row.rel_error is not None:
            parts.append(f"error {row.rel_error:.2e}")
        if row.correct is False:
            parts.append(f"RED: cuDNN's error is {row.stock_rel_error:.2e}")
        ratio = row.faster_than(stock)
        if ratio is not None and row is not stock:
            parts.append(f"{ratio:.2f}x")
        typer.echo(" ".join(parts))
