"""The sections of the page on the VAE: its two halves, its convolutions one by one, and memory layouts."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.cells import NONE, check, errors, number, run_of, section
from benchmarks.convolutions import BESIDE_A_RESIDUAL, PLANS
from benchmarks.newest import Entry, Newest, grouped
from benchmarks.results import Row
from benchmarks.sections import timed_as

VAE: Final = """\
FLUX's AutoencoderKL by itself, bf16, on random {inputs}. `stock` is diffusers as it comes; `channels_last` the same in
that memory layout; `compile` is `torch.compile` of the {part} in that layout; `exact` is fusedit; `floor` is the
{part}'s convolutions (without bias; those that follow a doubling as four 2x2 on the picture before it) and the
products of its attention alone, back to back in one CUDA graph. The plans take turns until each has run for seconds,
and the later half counts.

- **ms**, **J**, **launches**: of one {what}. **of floor**: ms over the floor's. **GiB**: the most this plan needs,
  without what the others in the process hold.
- **error**: relative L2 of {result} against stock in fp32 on the same weights and input, and after the slash that of
  stock in bf16. **check**: green where the former is at most 5 % above the latter.
- **cold s**: to the end of the first {what} of this size, compilation included; next to nothing where an earlier size
  of the same process had compiled what it needs. Not all sizes come from one process.
"""
CONVOLUTIONS: Final = """\
Each convolution of FLUX's VAE alone, bf16, channels_last, on arguments that do not lie in the cache: ms. `cudnn` has
no bias, `cudnn+bias` adds it in a second kernel of torch's, `library` in a pass of ours, the others in their own
kernel; the last two plans add a residual as well. **fastest**: of those with a bias whose check is green. **errors**:
relative L2 against fp32 in the order of the columns, of the convolution alone; the check is the house rule, at most
twice that of `cudnn` in bf16.
"""
LAYOUTS: Final = """\
The same arithmetic on the same values, bf16, as they lie in memory one way or another, on arguments that do not lie in
the cache. **computed by**: torch and its libraries, one of the ops, or a kernel that reads both layouts alike.
**error**: relative L2 against fp32, and after the slash that of the first of its kind. **check**: green where the
former is at most 5 % above the latter.
"""
_COLUMNS: Final = (*PLANS, *BESIDE_A_RESIDUAL)


def decode(newest: Newest, entries: list[Entry]) -> str:
    text = VAE.format(what="decode", part="decoder", inputs="latents", result="the picture")
    return timed_as(newest, entries, "VAE: decode", text)


def encode(newest: Newest, entries: list[Entry]) -> str:
    text = VAE.format(what="encode", part="encoder", inputs="pictures", result="the latents' mode")
    return timed_as(newest, entries, "VAE: encode", text)


def convolutions(newest: Newest, entries: list[Entry]) -> str:
    heads = ["layer", "picture", *(f"{plan} ms" for plan in _COLUMNS), "fastest", "errors", "check", "run"]
    rows = [_layer(newest, group) for group in grouped(entries)]
    return section("Convolutions of the VAE", CONVOLUTIONS, heads, rows)


def _layer(newest: Newest, group: list[Entry]) -> list[str]:
    """One layer at one size: the newest run that holds any of it, and nothing of an older one."""
    entry = max(group, key=lambda e: (e.run.when, e.run.name))
    found = {e.row.plan: e.row for e in group if e.run is entry.run}
    made = {plan: row for plan, row in found.items() if row.error is None and row.ms is not None}
    green = [plan for plan in PLANS[1:] if plan in made and made[plan].correct]
    red = [plan for plan, row in made.items() if row.correct is False]
    fastest = min(green, key=lambda plan: made[plan].ms or 0.0, default=NONE)
    verdict = f"**red**: {', '.join(red)}" if red else check(True if green else None)
    return [
        entry.row.model,
        entry.row.size,
        *(_time(found.get(plan)) for plan in _COLUMNS),
        fastest,
        " / ".join(_error(made[plan].rel_error) if plan in made else NONE for plan in PLANS),
        verdict,
        run_of(newest, entry),
    ]


def _time(row: Row | None) -> str:
    if row is None:
        return NONE
    return row.error or number(row.ms, 4)


def _error(value: Any) -> str:
    """An error that is not finite is a word in the files."""
    return NONE if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def layouts(newest: Newest, entries: list[Entry]) -> str:
    rows = [
        [
            *(entry.row.model, entry.row.size, entry.row.plan, entry.row.variant or NONE),
            entry.row.error or number(entry.row.ms, 4),
            errors(entry.row.rel_error, entry.row.stock_rel_error),
            check(entry.row.correct),
            run_of(newest, entry),
        ]
        for group in grouped(entries)
        for entry in group
    ]
    heads = ["what", "shape", "layout", "computed by", "ms", "error", "check", "run"]
    return section("Memory layouts", LAYOUTS, heads, rows)
