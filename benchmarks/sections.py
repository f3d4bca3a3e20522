"""The sections of the page: a heading, a table, and what its columns mean."""

from __future__ import annotations

from typing import Final

from benchmarks.cells import NONE, check, errors, number, ratio, run_of, section, table, with_spread
from benchmarks.newest import Entry, Newest, grouped
from benchmarks.results import FLOORS, FP8

STEP: Final = """\
One step inside the pipeline, bf16. `stock` is diffusers as it comes; `compile` the same with
`compile_repeated_blocks(fullgraph=True)`, the usual lossless way to speed it up; `exact` is fusedit; `floor` is the
step's matrix products (merged where they share an input) and attention alone, back to back in one CUDA graph. The plans
take turns until each has run for seconds, and the later half counts, since a card at its power limit slows down.
{fp8}
- **ms**: median, with 5 and 95 %. **of floor**: ms over the floor's. **launches**: kernels a step, those inside a
  replayed CUDA graph included. **J**: from the card's energy counter.
- **GiB**: the most this plan needs, weights and the memory of CUDA graphs included, without what the others in the
  process hold.
- **error**: relative L2 of one step against stock in fp32 on the same weights and input, and after the slash that of
  stock in bf16. **check**: green where the former is at most 5 % above the latter{check}.
- **cold s**: to the end of the first step of this size in a running process, compilation included.
"""
STEP_FP8: Final = """\

Lossy plans: `fp8` is fusedit; `torchao-fp8` its peer, torchao's fp8 with a scale a row on the layers of the blocks, but
for modulation, with diffusers' fused projections where the model has them, compiled block by block;
`torchao-fp8-eager` the same uncompiled, for its error alone; `fp8-floor` the floor with row-wise scaled fp8 products.
They are held against the floor in fp8.
"""
CHECK_FP8: Final = """\
; of the
  lossy plans also that of `torchao-fp8` in the same run, after a second slash: green where theirs is not above it"""


def step(newest: Newest, entries: list[Entry]) -> str:
    lossy = any(entry.row.plan in FP8 for entry in entries)
    text = STEP.format(fp8=STEP_FP8, check=CHECK_FP8) if lossy else STEP.format(fp8="", check="")
    return timed_as(newest, entries, "One denoising step", text)


def timed(newest: Newest, entries: list[Entry]) -> str:
    """A benchmark without a section of its own."""
    return timed_as(newest, entries, entries[0].row.benchmark, "")


def timed_as(newest: Newest, entries: list[Entry], title: str, text: str) -> str:
    heads = ["size", "batch", "plan", "ms", "against stock", "of floor", "launches", "J", "GiB"]
    heads += ["error", "check", "cold s", "run"]
    parts = [f"## {title}\n\n{text}"]
    for model in dict.fromkeys(entry.row.model for entry in entries):
        rows = [_timed_row(newest, e) for group in grouped(entries) for e in group if e.row.model == model]
        parts.append(f"### {model}\n\n{table(heads, rows)}")
    return "\n".join(parts)


def _timed_row(newest: Newest, entry: Entry) -> list[str]:
    row = entry.row
    cells = [row.size, str(row.batch), row.plan]
    if row.error is not None:
        return [*cells, row.error, *[NONE] * 8, run_of(newest, entry)]
    return [
        *cells,
        with_spread(row.ms, row.spread),
        ratio(newest, entry),
        number(row.of_floor, 3),
        number(row.launches, 0),
        number(row.joules, 1),
        NONE if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
        errors(row.rel_error, row.stock_rel_error, row.peer_rel_error),
        check(row.correct) if row.plan not in FLOORS else NONE,
        number(row.more.get("cold_s", row.more.get("first_step_s")), 2),
        run_of(newest, entry),
    ]


def launches(newest: Newest, entries: list[Entry]) -> str:
    text = "Kernels that one block more of a kind adds to a step, at the real width.\n"
    rows = [
        [e.row.model, e.row.variant, e.row.plan, e.row.error or number(e.row.launches, 0), run_of(newest, e)]
        for e in entries
    ]
    return section("Launches of a block", text, ["model", "block", "plan", "launches", "run"], rows)


def image(newest: Newest, entries: list[Entry]) -> str:
    text = """\
The whole call from the prompt to the picture: text encoders of the published sizes, all steps, the VAE. The check is
that of one step of the transformer.
"""
    heads = ["model", "size", "steps", "plan", "s a picture", "against stock", "text s", "denoise s", "VAE s"]
    rows = []
    for entry in entries:
        row, more = entry.row, entry.row.more
        cells = [row.model, row.size, str(more.get("steps", NONE)), row.plan]
        if row.error is not None or row.ms is None:
            rows.append([*cells, row.error or NONE, *[NONE] * 6, run_of(newest, entry)])
            continue
        stages = [number(more.get(f"{stage}_s"), 3) for stage in ("text", "denoise", "vae")]
        seconds = f"{row.ms / 1e3:.3f}"
        rows.append(
            [
                *cells,
                seconds,
                ratio(newest, entry),
                *stages,
                number(row.joules, 0),
                check(row.correct),
                run_of(newest, entry),
            ]
        )
    return section("A whole picture", text, [*heads, "J", "check", "run"], rows)


def cold_start(newest: Newest, entries: list[Entry]) -> str:
    text = """\
A fresh process, 1024x1024. **ready**: from the loaded model to the end of the first step, with `accelerate()`, or
compilation, and whatever the libraries load. **laid**: of it what comes before the call, in fp8 the conversion of the
weights, with the originals moved to the CPU by `fp8`. The caches are those of Triton and of torch.compile.
"""
    heads = ["model", "plan", "caches", "import s", "load s", "ready s", "laid s", "first step s", "kernels compiled"]
    heads += ["from cache", "run"]
    rows = []
    for entry in entries:
        row, more = entry.row, entry.row.more
        cells = [row.model, row.plan, row.variant.removesuffix(" cache") or NONE]
        if row.error is not None:
            rows.append([*cells, NONE, NONE, row.error, *[NONE] * 4, run_of(newest, entry)])
            continue
        seconds = [number(more.get(name), 2) for name in ("import_s", "load_s", "ready_s", "lay_s", "first_step_s")]
        kernels = [number(more.get(name), 0) for name in ("kernels_compiled", "kernels_loaded")]
        rows.append([*cells, *seconds, *kernels, run_of(newest, entry)])
    return section("Ready in", text, heads, rows)


def new_size(newest: Newest, entries: list[Entry]) -> str:
    text = """\
In the process above that had drawn nothing but 1024x1024: sizes, batches and prompt lengths it had not seen.
**library plan**: the first step less the second, which is what the libraries take to choose and load their kernels.
**compiled**: Triton kernels that went through the compiler; **new variants**: those that this process came to hold by
any way. What cuDNN compiles for a new shape is not counted; it is in the first step.
"""
    heads = [
        "model",
        "plan",
        "size",
        "prompt tokens",
        "first step ms",
        "second ms",
        "library plan ms",
        "compiled",
        "new variants",
    ]
    rows = []
    for entry in entries:
        row, more = entry.row, entry.row.more
        cells = [row.model, row.plan, row.size, row.variant.removesuffix(" tokens").replace("+", ", ")]
        if row.error is not None:
            rows.append([*cells, row.error, *[NONE] * 4, run_of(newest, entry)])
            continue
        times = [number(value, 1) for value in (more.get("first_step_ms"), row.ms, more.get("plan_ms"))]
        counts = [number(more.get(name), 0) for name in ("kernels_compiled", "new_variants")]
        rows.append([*cells, *times, *counts, run_of(newest, entry)])
    return section("A size that is new", text, [*heads, "run"], rows)


def ops(newest: Newest, entries: list[Entry]) -> str:
    device = entries[0].device
    limits = [e.row.more for e in newest.of(device, "ceiling")]
    ceiling = (
        f"a copy moves {limits[-1]['tb_s']} TB/s and a large bf16 product runs at {limits[-1]['tflop_s']} TFLOP/s"
        if limits
        else "a copy, or a large bf16 product"
    )
    text = f"""\
Each op on shapes of the two models, bf16, on arguments that do not lie in the cache; bytes and operations are the least
that the arithmetic needs. **ceiling**, in the same run: {ceiling}. The check is the house rule: at most twice
plain torch's error against fp64.
"""
    rows = []
    for entry in (e for e in entries if e.row.plan == "fused"):
        row, plain = entry.row, newest.beside(entry, "plain")
        rate = f"{row.more['tb_s']:.2f} TB/s" if "tb_s" in row.more else f"{row.more.get('tflop_s', 0):.0f} TFLOP/s"
        if row.error is not None:
            rows.append([row.model, row.size, row.error, *[NONE] * 5, run_of(newest, entry)])
            continue
        rows.append(
            [
                row.model,
                row.size,
                number(row.ms, 4),
                NONE if plain is None else number(plain.ms, 4),
                ratio(newest, entry, "plain"),
                rate,
                f"{row.more.get('percent_of_ceiling', 0):.0f} %" if row.correct else NONE,
                check(row.correct),
                run_of(newest, entry),
            ]
        )
    heads = ["op", "case", "ms", "plain torch ms", "against plain", "rate", "of ceiling", "check", "run"]
    return section("Ops", text, heads, rows)


def measured_on(newest: Newest) -> str:
    rows = []
    for run in newest.runs:
        where = run.environment
        versions = ", ".join(f"{name} {version}" for name, version in where.get("versions", {}).items())
        limit = where.get("power_limit_w")
        device = f"{where['device']}, {limit:.0f} W" if isinstance(limit, int | float) else str(where["device"])
        commit = str(where.get("commit") or "unknown")
        cells = [str(newest.runs.index(run) + 1), where["date"], device, str(where.get("driver") or "unknown")]
        rows.append([*cells, versions, f"`{commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}`", run.name])
    heads = ["run", "date", "device", "driver", "versions", "commit", "file"]
    return section("Measured on", "", heads, rows)
