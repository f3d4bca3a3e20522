"""The report page: one HTML file that opens from disk, with every picture inside and every text escaped.

Plain string building and `html.escape`, so that it can be written on any installation. `_Html` marks what is markup
already; everything else that reaches `tag` is escaped there, in one place.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedit.files import png_bytes
from fusedit.quality import words
from fusedit.quality.maps import amplified, difference_map
from fusedit.quality.page_style import STYLE
from fusedit.quality.table import summary, verdict_line, worst

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fusedit.quality.result import Comparison, Pair


class _Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> _Html:
    """An element. Children and attributes are escaped unless they are markup; `cls` stands for `class`."""
    written = "".join(f' {"class" if k == "cls" else k}="{html.escape(v, quote=True)}"' for k, v in attributes.items())
    if name in ("img", "meta"):
        return _Html(f"<{name}{written}>")
    inside = "".join(child if isinstance(child, _Html) else html.escape(child) for child in children)
    return _Html(f"<{name}{written}>{inside}</{name}>")


def page(results: Sequence[Comparison], title: str) -> str:
    """The whole page as text."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _Html(STYLE)),
    )
    intro = tag(
        "p",
        "Every pair is one prompt and one seed, drawn by the stock pipeline and by the accelerated one in the same "
        "process. Difference maps show the error of each pixel, multiplied until the largest error is visible; the "
        "factor is written under each.",
        cls="intro",
    )
    body = tag("body", tag("header", tag("h1", title), intro), tag("main", *[_section(result) for result in results]))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _section(result: Comparison) -> _Html:
    passed = result.verdict.passed
    guidance = "" if result.guidance is None else f", guidance {result.guidance:g}"
    heading = tag(
        "div",
        tag("h2", result.model),
        tag("span", "passed" if passed else "failed", cls=f"badge {'good' if passed else 'bad'}"),
        cls="heading",
    )
    facts = (
        f"{result.pipeline}, plan {result.plan.get('base')}, {result.dtype} on {result.device}, "
        f"{result.size}, {result.steps} steps{guidance}"
    )
    guilt = [tag("p", result.guilt.sentence, cls="verdict bad")] if result.guilt is not None else []
    return tag(
        "section",
        heading,
        tag("p", facts, cls="facts"),
        _tiles(result),
        tag("p", verdict_line(result), cls=f"verdict {'good' if passed else 'bad'}"),
        *guilt,
        _summary_table(result),
        *[_pair(pair) for pair in result.pairs],
        _sites(result),
        _environment(result),
    )


def _tiles(result: Comparison) -> _Html:
    tiles = [
        ("whole call", words.ratio(result.speedup), "stock time by fused time"),
        ("denoising step", words.ratio(result.speedup_step), "stock time by fused time"),
        ("lowest PSNR", words.decibels(worst([pair.psnr_db for pair in result.pairs])), f"{len(result.pairs)} pairs"),
        ("rewritten", str(len(result.rewritten)), f"{len(result.refused)} refused"),
    ]
    if not result.verdict.passed:  # a speedup is never shown beside a red check
        tiles = tiles[2:]
    return tag("div", *[_tile(*tile) for tile in tiles], cls="tiles")


def _tile(label: str, value: str, below: str) -> _Html:
    parts = (("label", label), ("value", value), ("label", below))
    return tag("div", *[tag("div", text, cls=name) for name, text in parts], cls="tile")


def _summary_table(result: Comparison) -> _Html:
    rows = [tag("tr", tag("th", what), tag("td", stock), tag("td", fused)) for what, stock, fused in summary(result)]
    if any(pair.stock_fp32_db is not None for pair in result.pairs):
        ours = worst([pair.fused_fp32_db for pair in result.pairs])
        theirs = worst([pair.stock_fp32_db for pair in result.pairs])
        cells = [tag("td", words.decibels(value)) for value in (theirs, ours)]
        rows.append(tag("tr", tag("th", "lowest PSNR to stock fp32"), *cells))
    head = tag("thead", tag("tr", tag("th", ""), tag("th", "stock"), tag("th", "fused")))
    note = (
        "The stock column of PSNR and largest difference is stock against stock drawn a second time: the baseline's "
        f"own noise, over {result.noise.pairs} pictures."
    )
    return tag("div", tag("table", head, tag("tbody", *rows)), tag("p", note, cls="small"), cls="scroll")


def _pair(pair: Pair) -> _Html:
    shown = []
    for name, pixels in (("stock", pair.stock), ("fused", pair.fused)):
        shown.append(_figure(pixels, name, f"{name}: {pair.prompt}") if pixels is not None else _missing(pair, name))
    if pair.stock is not None and pair.fused is not None and pair.stock.shape == pair.fused.shape:
        pixels, factor = difference_map(pair.stock, pair.fused)
        shown.append(_figure(pixels, _factor("difference", pair.max_abs_diff == 0, factor), "difference map"))
    if pair.flip_map is not None:
        pixels, factor = amplified(pair.flip_map)
        shown.append(_figure(pixels, _factor("FLIP", pair.flip == 0, factor), "FLIP error map"))
    numbers = (
        f"PSNR {words.decibels(pair.psnr_db)} · SSIM {words.similarity(pair.ssim)} · largest difference "
        f"{words.small(pair.max_abs_diff)} · latents {words.small(pair.latents_rel_l2)} relative L2"
        + (f" · FLIP {words.small(pair.flip)}" if pair.flip is not None else "")
    )
    prompt = tag("q", pair.prompt) if pair.prompt else tag("i", "the empty prompt")
    title = tag("h3", prompt, tag("span", f"seed {pair.seed}", cls="seed"))
    return tag("article", title, tag("div", *shown, cls="pictures"), tag("p", numbers, cls="small"))


def _figure(pixels: NDArray[np.float32], caption: str, alt: str) -> _Html:
    data = "data:image/png;base64," + base64.b64encode(png_bytes(pixels)).decode()
    height, width = pixels.shape[:2]
    picture = tag("img", src=data, alt=alt, width=str(width), height=str(height), loading="lazy")
    return tag("figure", picture, tag("figcaption", caption))


def _missing(pair: Pair, arm: str) -> _Html:
    why = next((failure.message for failure in pair.failures if failure.arm == arm), "not drawn")
    return tag("figure", tag("div", why, cls="missing"), tag("figcaption", f"{arm}: no picture"))


def _factor(name: str, identical: bool, factor: int) -> str:
    return f"{name}: identical" if identical else f"{name}, times {factor:,}"


def _sites(result: Comparison) -> _Html:
    rows: list[_Html] = []
    for site in result.rewritten:
        why = "; ".join(f"{reason} ({count} times)" for reason, count in site.reasons.items())
        cells = (site.site, site.exactness, str(site.fused), str(site.stock), why or site.summary)
        rows.append(tag("tr", *[tag("td", cell) for cell in cells]))
    for refusal in result.refused:
        cells = (refusal.site, "refused", "–", "–", refusal.reason)
        rows.append(tag("tr", *[tag("td", cell) for cell in cells], cls="refused"))
    names = ("site", "exactness", "ran fused", "ran stock", "what, or why not")
    table = tag("table", tag("thead", tag("tr", *[tag("th", name) for name in names])), tag("tbody", *rows))
    notes = tag("ul", *[tag("li", note) for note in result.notes]) if result.notes else _Html("")
    label = f"Sites: {len(result.rewritten)} rewritten, {len(result.refused)} refused"
    return tag("details", tag("summary", label), tag("div", table, cls="scroll wide"), notes)


def _environment(result: Comparison) -> _Html:
    rows: list[tuple[str, Any]] = [(name, value) for name, value in result.environment.items() if name != "versions"]
    rows += list(result.environment.get("versions", {}).items())
    rows += [("warm-up, stock", ", ".join(map(words.seconds, result.stock.warmup_s)) + " (in no other number)")]
    rows += [("warm-up, fused", ", ".join(map(words.seconds, result.fused.warmup_s)) + " (in no other number)")]
    for name, arm in (("spread, stock", result.stock), ("spread, fused", result.fused)):
        spread = f"{arm.calls} pictures, {words.seconds(arm.total_s_min)} to {words.seconds(arm.total_s_max)} each; "
        spread += f"step p10 {words.milliseconds(arm.step_ms_p10)}, p90 {words.milliseconds(arm.step_ms_p90)}"
        rows.append((name, spread))
    body = [tag("tr", tag("th", name), tag("td", "–" if value is None else str(value))) for name, value in rows]
    return tag("details", tag("summary", "Where it was measured"), tag("div", tag("table", *body), cls="scroll"))
