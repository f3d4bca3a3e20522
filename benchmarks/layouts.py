"""What a layout costs and what it brings: the same pictures in NCHW, in NHWC, and in tiles of 8 x 8 pixels.

The layouts (`plan`): `nchw`, torch's default; `nhwc`, channels_last; `tiles-32` and `tiles-64`, of ops.pack_tiles. How
it is computed (`variant`): `torch`, by torch and its libraries; `fused`, by one of the ops; `own-32` and `own-64`, by
the kernel of packed_conv.py, which reads pixels or tiles, 32 or 64 channels at a time, and is the same otherwise (its
results are NHWC).

- conversions, under the layout of the result (or, from tiles, of the source);
- GroupNorm and SiLU, which torch computes in NCHW and the op in NHWC;
- convolutions 3x3 and 1x1 without a bias. Whether a convolution gains by tiles is the difference between `own` on
  `nhwc` and on `tiles`, of equal width; what either is worth is the distance to `torch`.

The shapes are those of FLUX's VAE. Arguments take turns, so that none lies in the cache. The error is relative L2
against fp32 on the same values; green is at most 5 % above that of the first row of a kind, so 0 where bits only move.
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
from benchmarks import gpu, packed_conv, table
from benchmarks.ops import MOST_CALLS, MOST_SETS, REPLAY_S, Timed, in_turn
from benchmarks.results import Results, Row
from benchmarks.sustained import spread_of
from fusedit import ops
from fusedit.ops._op import Cost
from fusedit.quality.metrics import relative_l2
from fusedit.vae_stages import no_tf32

Tensor = torch.Tensor
Call = Callable[[], Tensor]
SHAPES: Final = ((128, 1), (256, 2), (512, 4), (512, 8))
"""Channels, and the picture's side as a share of the whole one's."""
GROUPS: Final = 32
CONVERSIONS: Final = {
    "nchw to nhwc": ("nhwc",),
    "nhwc to nchw": ("nchw",),
    "nchw to tiles": ("tiles-32", "tiles-64"),
    "nhwc to tiles": ("tiles-32", "tiles-64"),
    "tiles to nhwc": ("tiles-32", "tiles-64"),
}
NORM: Final = "group norm + silu"
CONVOLUTIONS: Final = {"conv 3x3": 3, "conv 1x1": 1}
WAYS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    **{name: tuple(itertools.product(plans, ("torch", "fused"))) for name, plans in CONVERSIONS.items()},
    NORM: (("nchw", "torch"), ("nhwc", "torch"), ("nhwc", "fused")),
    **dict.fromkeys(
        CONVOLUTIONS,
        (
            ("nchw", "torch"),
            ("nhwc", "torch"),
            *itertools.product(("nhwc",), ("own-32", "own-64")),
            *((f"tiles-{step}", f"own-{step}") for step in packed_conv.STEPS),
        ),
    ),
}
"""What is measured -> layouts, and how it is computed there; the first is what the others are held against."""
FASTEST: Final = Cost(bytes=5 * 10**12, flops=10**15)
"""A second, that no card here exceeds: so many calls that a replay lasts about REPLAY_S, or longer."""


class Shape(NamedTuple):
    """One picture of C channels."""

    C: int
    H: int
    W: int

    @property
    def label(self) -> str:
        return f"{self.C}@{self.W}x{self.H}"


def shapes(sizes: list[given.Size]) -> list[Shape]:
    """Those of the VAE at these sizes, each once."""
    made = [Shape(C, height // scale, width // scale) for width, height in sizes for C, scale in SHAPES]
    return list(dict.fromkeys(made))


class Arguments:
    """One picture in every layout that is asked for, and weights: convolutions' results are about 1."""

    def __init__(self, shape: Shape, taps: int = 1) -> None:
        self.shape = (1, *shape)
        C = shape.C
        self.gain, self.bias = _random(2, C)
        self.weight = _random(C, C, taps, taps).mul_((taps**2 * C) ** -0.5)
        self._kept = {"nhwc": _random(*self.shape).contiguous(memory_format=torch.channels_last)}

    def lying(self, layout: str) -> Tensor:
        if layout not in self._kept:
            x = self._kept["nhwc"]
            packed = partial(ops.pack_tiles.unchecked, x)  # right, whatever is the matter with the kernel
            self._kept[layout] = x.contiguous() if layout == "nchw" else packed(_channels(layout))
        return self._kept[layout]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=gpu.DEVICE)


def _channels(layout: str) -> int:
    return int(layout.removeprefix("tiles-"))


def prepare(model: str, plan: str, variant: str, a: Arguments) -> Call:
    """The call that is timed; its arguments lie ready, as they would in a model of that layout."""
    if model in CONVERSIONS:
        op, args = _conversion(model, plan, a)
        return partial(op if variant == "fused" else op.unchecked, *args)
    if model == NORM:
        x = a.lying(plan)
        if variant == "fused":
            return partial(ops.group_norm_silu, x, a.gain, a.bias, GROUPS)
        return lambda: F.silu(F.group_norm(x, GROUPS, a.gain, a.bias, 1e-6))
    x, padding = a.lying(plan), CONVOLUTIONS[model] // 2
    if variant == "torch":
        dense = torch.channels_last if plan == "nhwc" else torch.contiguous_format
        return partial(F.conv2d, x, a.weight.contiguous(memory_format=dense), padding=padding)
    step = int(variant.removeprefix("own-"))
    return partial(packed_conv.convolve, x, packed_conv.pack_weight(a.weight), a.shape, step)


def _conversion(model: str, plan: str, a: Arguments) -> tuple[Any, tuple[Any, ...]]:
    """The op and what it is given."""
    source, target = model.split(" to ")
    if target == "tiles":
        return ops.pack_tiles, (a.lying(source), _channels(plan))
    if source == "tiles":
        return ops.unpack_tiles, (a.lying(plan), *a.shape[1:])
    return (ops.nchw_to_nhwc if target == "nhwc" else ops.nhwc_to_nchw), (a.lying(source),)


def truth(model: str, a: Arguments) -> Tensor:
    """The result in fp32."""
    x, gain, bias = (t.float() for t in (a.lying("nhwc"), a.gain, a.bias))
    if model in CONVERSIONS:
        return x
    if model == NORM:
        reference: Tensor = ops.group_norm_silu.reference(x, gain, bias, GROUPS)
        return reference
    with no_tf32():
        return F.conv2d(x, a.weight.float(), padding=CONVOLUTIONS[model] // 2)


def cost(model: str, plan: str, a: Arguments) -> Cost:
    """Bytes of what is limited by memory, else FLOPs too."""
    if model in CONVERSIONS:
        op, args = _conversion(model, plan, a)
        made: Cost = op.cost(*args)
    elif model == NORM:
        made = ops.group_norm_silu.cost(a.lying(plan), a.gain, a.bias, GROUPS)
        made = made._replace(flops=0)
    else:
        made = ops.conv2d.cost(a.lying("nhwc"), a.weight)
    return made


@torch.no_grad()
def measure(shape: Shape, model: str, seconds: float) -> list[Row]:
    """A row for each layout and each way to compute there."""
    torch.manual_seed(0)
    rows = {way: Row("layouts", model, shape.label, 1, *way) for way in WAYS[model]}
    runs: dict[str, Timed] = {}

    def attempt(row: Row, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            row.error = table.why(error)
            runs.pop(_name(row), None)
        gpu.free()

    try:
        sets = _sets(shape, CONVOLUTIONS.get(model, 1))
        right = truth(model, sets[0])
    except Exception as error:
        for row in rows.values():
            row.error = table.why(error)
        return list(rows.values())
    first = next(iter(rows.values()))
    for row in rows.values():
        attempt(row, partial(_check, row, right, sets[0], first))
    del right
    for row in rows.values():
        if row.error is None:
            attempt(row, partial(_try, row, sets, runs))
    try:
        times = in_turn(runs, seconds) if runs else {}
    except Exception as error:
        for row in rows.values():
            row.error = row.error or table.why(error)
        return list(rows.values())
    for row in rows.values():
        if _name(row) in times:
            _fill(row, times[_name(row)], cost(model, row.plan, sets[0]))
    return list(rows.values())


def _name(row: Row) -> str:
    return f"{row.plan} {row.variant}"


def _sets(shape: Shape, taps: int) -> list[Arguments]:
    first = Arguments(shape, taps)
    number = math.ceil(4 * gpu.l2_bytes() / max(1, gpu.bytes_of([first.lying("nhwc")])))
    return [first, *(Arguments(shape, taps) for _ in range(min(MOST_SETS, max(2, number)) - 1))]


def _check(row: Row, right: Tensor, a: Arguments, first: Row) -> None:
    made = prepare(row.model, row.plan, row.variant, a)()
    if made.ndim == 7:
        made = ops.unpack_tiles.unchecked(made, *a.shape[1:])
    error = relative_l2(right, made)
    row.judge(error, error if row is first else first.rel_error)


def _try(row: Row, sets: list[Arguments], runs: dict[str, Timed]) -> None:
    """Alone for a moment first, so that what cannot be captured does not take the others with it."""
    needed = cost(row.model, row.plan, sets[0])
    at_best = max(needed.bytes / FASTEST.bytes, needed.flops / FASTEST.flops)
    calls = max(len(sets), min(MOST_CALLS, math.ceil(REPLAY_S / at_best)))
    ready = [prepare(row.model, row.plan, row.variant, a) for a in sets]
    turns = list(itertools.islice(itertools.cycle(ready), calls))

    def run() -> None:
        for call in turns:
            call()  # what it makes goes at once, so that a graph of many calls has room

    timed = Timed(run, calls)
    in_turn({_name(row): timed}, 0.0)
    runs[_name(row)] = timed


def _fill(row: Row, times: list[float], needed: Cost) -> None:
    low, high = spread_of(times)
    row.ms, row.spread = round(statistics.median(times), 5), (round(low, 5), round(high, 5))
    if needed.flops:
        row.more |= {"flops": needed.flops, "tflop_s": round(needed.flops / row.ms / 1e9, 3)}
    else:
        row.more |= {"bytes": needed.bytes, "tb_s": round(needed.bytes / row.ms / 1e9, 3)}


def main(
    size: Annotated[str, typer.Option(help="Comma-separated WIDTHxHEIGHT of whole pictures")] = "1024x1024",
    seconds: Annotated[float, typer.Option(help="How long each row runs for")] = 0.3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """NCHW, NHWC and tiles: conversions, norms, convolutions. Example: python -m benchmarks layouts --size 512x512"""
    sizes = given.sizes(size)
    given.seconds(seconds)
    given.destination(json_file)
    given.need_gpu("layouts")
    results = Results(json_file)
    for shape in shapes(sizes):
        for model in WAYS:
            rows = measure(shape, model, seconds)
            results.add(rows)
            show(rows)
            gpu.free()


def show(rows: list[Row]) -> None:
    """One line a row; ratios against the first."""
    for row in rows:
        label = f"{row.model:17} {row.size:13} {row.plan:8} {row.variant:6}"
        if row.error is not None or row.ms is None:
            typer.echo(f"{label} {row.error or 'not measured'}")
            continue
        rate = f"{row.more['tb_s']:.2f} TB/s" if "tb_s" in row.more else f"{row.more['tflop_s']:.0f} TFLOP/s"
        parts = [f"{label} {row.ms:9.4f} ms {rate}"]
        if row.correct is False:
            parts.append(f"RED: error {row.rel_error:.2e}, of the first row {row.stock_rel_error:.2e}")
        ratio = row.faster_than(rows[0])
        if ratio is not None and row is not rows[0]:
            parts.append(f"{ratio:.2f}x")
        typer.echo(" ".join(parts))
