"""`fusedit layout`: checks what needs no model, loads the VAE, measures, and says what came out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from fusedit.errors import ArgumentError
from fusedit.quality import words
from fusedit.validation import Size, check_choice, dtype_name, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from fusedit.vae_layout import Layouts, Pass
    from fusedit.vae_stages import Conversions

VARIANTS: Final = {"nchw": "stock in NCHW", "nhwc": "stock in NHWC", "fused": "fused"}
WHAT: Final = ("decode", "encode", "both")
MOST_SECONDS: Final = 600
MOST_PIXELS: Final = 8192
"""Of a side: four times what the models draw, and minutes a picture on a CPU."""
MOST_PICTURES: Final = 64
ALIKE: Final = 0.03
"""Times that differ by less than this share count as the same in a sentence."""


def run_layout(
    *,
    model: str,
    size: str | None,
    batch: int,
    what: str,
    dtype: str | None,
    device: str | None,
    seconds: float,
    quiet: bool,
) -> Layouts:
    """Check the arguments, load the VAE and nothing else, and measure.

    Raises:
        FuseditError: see `vae_layout.load_vae` and `vae_layout.measure`.
    """
    check_choice(what, WHAT, "what")
    asked = parse_size(size) if size is not None else None
    if asked is not None and max(asked) > MOST_PIXELS:
        raise ArgumentError(f"size {asked} has a side of {max(asked)}; give at most {MOST_PIXELS}")
    if not 1 <= batch <= MOST_PICTURES:
        raise ArgumentError(f"batch is {batch}; give 1 to {MOST_PICTURES}")
    if not math.isfinite(seconds) or not 0 < seconds <= MOST_SECONDS:
        raise ArgumentError(f"seconds is {seconds:g}; give more than 0 and at most {MOST_SECONDS}")
    if dtype is not None:
        dtype_name(dtype)

    from fusedit.loading import resolve_device, resolve_dtype
    from fusedit.progress import Progress, progress_on
    from fusedit.vae_layout import load_vae, measure

    chosen = resolve_device(device)
    side = 1024 if chosen.type == "cuda" else 256
    vae = load_vae(model, resolve_dtype(dtype, chosen), chosen)
    with Progress() if quiet else progress_on() as progress:
        return measure(
            vae,
            model,
            asked or Size(side, side),
            batch=batch,
            what=("decode", "encode") if what == "both" else (what,),
            seconds=seconds,
            progress=progress,
        )


def layouts_data(result: Layouts) -> dict[str, Any]:
    """All of it as JSON data, the sentences too."""
    data = result.to_dict()
    for told, one in zip(data["passes"], result.passes, strict=True):
        told["sentences"] = sentences(one)
    return data


def print_layouts(result: Layouts, console: Console) -> None:
    """For each pass: times by stage, conversions, the check, and what was chosen and why."""
    from rich.text import Text

    name = result.model
    if result.random:
        name += ": FLUX.1-dev's AutoencoderKL with random weights, right for speed and error, not for pictures"
    console.print(Text(f"VAE of {name}"))
    where = f"{result.dtype} on {result.device.type}, {result.size}, batch {result.batch}"
    for one in result.passes:
        laps = min(times.laps for times in one.times.values())
        _print_table(f"{one.what}, {where}; ms, medians of {laps} interleaved laps", _times(one), console)
        if one.conversions is None:
            console.print(Text(f"conversions inside the stages: {one.unmeasured}"))
        else:
            _print_table("conversions inside the stages of one pass: how many, and ms", _conversions(one), console)
        style = {True: "green", False: "bold red", None: "yellow"}[one.check.passed]
        console.print(Text(f"check {one.check.sentence}", style=style))
        for sentence in sentences(one):
            console.print(Text(sentence))


def _print_table(title: str, rows: list[tuple[str, ...]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for place, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if 0 < place <= len(VARIANTS) else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*[Text(cell) for cell in row])
    console.print(table)


def _times(one: Pass) -> list[tuple[str, ...]]:
    fastest, speedup = one.fastest() or {}, one.speedup() or {}
    whole = {variant: one.times[variant].whole for variant in VARIANTS}
    best = min(VARIANTS, key=lambda variant: whole[variant].ms) if fastest else ""
    columns = zip(one.parts, *[one.ms(variant) for variant in VARIANTS], strict=True)
    return [
        ("", *VARIANTS.values(), "fastest"),
        *((name, *map(_ms, ms), fastest.get(name, "")) for name, *ms in columns),
        ("sum of these", *(_ms(one.sum_ms(variant)) for variant in VARIANTS), ""),
        ("in one go", *(_ms(figure.ms) for figure in whole.values()), best),
        ("  least to most", *(f"{_ms(figure.low_ms)} to {_ms(figure.high_ms)}" for figure in whole.values()), ""),
        *([("  ratio to stock", "", *(words.ratio(speedup[v]) for v in ("nhwc", "fused")), "")] if speedup else ()),
        ("error", *(_error(one.check.errors[variant]) for variant in VARIANTS), ""),
    ]


def _conversions(one: Pass) -> list[tuple[str, ...]]:
    found = one.conversions or {}
    rows = zip(*(found[variant] for variant in VARIANTS), strict=True)
    return [("", *VARIANTS.values()), *((cells[0].kind, *map(_counted, cells)) for cells in rows)]


def _counted(cell: Conversions) -> str:
    return f"{cell.number}: {_ms(cell.ms)}" if cell.number else "–"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _error(value: float | None) -> str:
    return "reference" if value is None else words.small(value)


# -- what follows from the numbers -----------------------------------------------------------------------------------


def sentences(one: Pass) -> list[str]:
    """What was chosen and why; nothing about speed unless the check is green."""
    fastest, told = one.fastest(), _strayed(one)
    if fastest is None:
        why = "was not judged" if one.check.passed is None else "is red"
        return [*told, f"The check {why}, so no speeds are compared and nothing is chosen."]
    nchw, nhwc, fused = (one.times[variant].whole.ms for variant in VARIANTS)
    ends = one.sum_ms("fused") - sum(one.ms("fused")[i] or 0.0 for i in one.stages)
    told += [
        f"NHWC with stock modules {_against(nhwc, 'NCHW', nchw)}{_reason(one)}.",
        f"Fused {_against(fused, 'stock in NCHW', nchw)} and {_against(fused, 'stock in NHWC', nhwc)}, with "
        f"{words.milliseconds(ends)} of conversions at both ends.",
        _chosen(one, fastest),
    ]
    slow = [name for variant, name in VARIANTS.items() if one.times[variant].host_bound]
    if slow:
        told.append(
            f"The host, not the GPU, sets the pace of {' and '.join(slow)} here; accelerate() replays CUDA graphs "
            "where that is so, which this measurement does not."
        )
    return told


def _strayed(one: Pass) -> list[str]:
    """Where stock does not keep the layout it was given."""
    told = []
    for variant in ("nchw", "nhwc"):
        own = variant.upper()
        names = [one.parts[i] for i, found in zip(one.stages, one.layouts[variant], strict=True) if found != own]
        if names:
            told.append(f"Stock does not keep {own} by itself: results of {', '.join(names)} do not lie in it.")
    return told


def _against(ms: float, name: str, other: float) -> str:
    numbers = f"({words.milliseconds(ms)} against {words.milliseconds(other)})"
    if abs(ms / other - 1) < ALIKE:
        return f"is as fast as {name} {numbers}"
    if ms < other:
        return f"is {other / ms:.2f}x as fast as {name} {numbers}"
    return f"takes {ms / other:.2f}x the time of {name} {numbers}"


def _reason(one: Pass) -> str:
    """What stock converts inside, in both layouts; nothing where that was not measured."""
    if one.conversions is None:
        return ""
    told = []
    for variant in ("nhwc", "nchw"):
        kinds = [found for found in one.conversions[variant] if found.number]
        listed = [f"{found.number} {found.kind} in {words.milliseconds(found.ms)}" for found in kinds]
        told.append(f"in {variant.upper()} {', '.join(listed) or 'none'}")
    return f"; conversions inside it: {'; '.join(told)}"


def _chosen(one: Pass, fastest: dict[str, str]) -> str:
    other = {stage: variant for stage, variant in fastest.items() if variant != "fused"}
    if not other:
        return "Chosen: fused, the fastest in every stage; that is what accelerate() runs."
    place = {name: i for i, name in enumerate(one.parts)}
    ms = {variant: one.ms(variant) for variant in VARIANTS}
    gain = sum((ms["fused"][place[s]] or 0.0) - (ms[variant][place[s]] or 0.0) for s, variant in other.items())
    listed = [
        f"{name} in {', '.join(stage for stage in other if other[stage] == variant)}"
        for variant, name in VARIANTS.items()
        if variant in other.values()
    ]
    rest = "fused in the other stages" if len(other) < len(fastest) else "fused in none"
    return (
        f"Fastest: {'; '.join(listed)}; {rest}. accelerate() runs fused throughout; that mixture would save "
        f"{words.milliseconds(gain)}, less what it converts between its stages."
    )
