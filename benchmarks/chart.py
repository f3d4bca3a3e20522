"""The chart of the page: milliseconds a step, an SVG that is readable on light and on dark."""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape

from benchmarks.newest import Entry, Newest, grouped
from benchmarks.results import FP8

WIDTH: Final = 760
LEFT: Final = 110
LONGEST: Final = 440
BAR: Final = 16
PLANS: Final = ("stock", "compile", "compile-whole", "exact", "torchao-fp8", "fp8")
STYLE: Final = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .stock { fill: #afb8c1 }
  .compile, .compile-whole { fill: #54aeff }
  .exact { fill: #2da44e }
  .torchao-fp8 { fill: #d4a72c }
  .fp8 { fill: #8250df }
  .floor { stroke: #cf222e; stroke-width: 2 }
  .in-fp8 { stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
    .stock { fill: #656c76 }
    .compile, .compile-whole { fill: #1f6feb }
    .exact { fill: #2ea043 }
    .torchao-fp8 { fill: #9e6a03 }
    .fp8 { fill: #a371f7 }
    .floor { stroke: #ff7b72 }
  }"""


def chart(newest: Newest, device: str) -> str:
    """Bars of each model, size and batch, as long as the slowest of its group allows."""
    groups = [g for g in grouped(newest.of(device, "step")) if any(_shown(e) for e in g)]
    parts: list[str] = []
    y = 60
    for group in groups:
        bars, height = _group(newest, group, y)
        parts += bars
        y += height + 16
    title = f"Milliseconds a denoising step on {device}"
    legend = "Random weights. Red line: the matrix products and attention of the step alone"
    legend += "; dashed: in fp8." if any(e.row.plan in FP8 for group in groups for e in group if _shown(e)) else "."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}\n</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{y - 1}" rx="6"/>',
            f'<text class="title" x="16" y="26">{escape(title)}</text>',
            f'<text x="16" y="44">{legend}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _shown(entry: Entry) -> bool:
    return entry.row.ms is not None and entry.row.error is None and entry.row.plan in PLANS


def _group(newest: Newest, group: list[Entry], y: int) -> tuple[list[str], int]:
    first = group[0].row
    entries = sorted(filter(_shown, group), key=lambda entry: PLANS.index(entry.row.plan))
    scale = LONGEST / max(entry.row.ms or 0.0 for entry in entries)
    label = f"{first.model} {first.size}" + (f", batch {first.batch}" if first.batch > 1 else "")
    parts = [f'<text class="title" x="16" y="{y + 14}">{escape(label)}</text>']
    top = y + 22
    for place, entry in enumerate(entries):
        row, at = entry.row, top + place * (BAR + 4)
        long = (row.ms or 0.0) * scale
        ratio = newest.ratio(entry)
        verdict = "" if row.correct else ", not checked" if row.correct is None else ", check failed"
        note = f", {ratio:.2f}x" if ratio is not None else verdict
        parts += [
            f'<text x="{LEFT - 8}" y="{at + 12}" text-anchor="end">{row.plan}</text>',
            f'<rect class="{row.plan}" x="{LEFT}" y="{at}" width="{long:.1f}" height="{BAR}" rx="2"/>',
            f'<text x="{LEFT + long + 6:.1f}" y="{at + 12}">{row.ms:.1f} ms{note}</text>',
        ]
    height = len(entries) * (BAR + 4)
    for in_fp8, kind in ((False, "floor"), (True, "floor in-fp8")):
        floors = (e.row.floor_ms for e in entries if e.row.floor_ms and (e.row.plan in FP8) is in_fp8)
        floor = next(floors, None)
        if floor is not None:
            x = LEFT + floor * scale
            parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{top - 2}" x2="{x:.1f}" y2="{top + height - 2}"/>')
    return parts, 22 + height
