"""docs/performance.md and its chart, made from results files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks import fp8_section, lora_section, pictures_section, sections, vae_sections
from benchmarks.chart import chart
from benchmarks.environment import ROOT
from benchmarks.newest import Entry, Newest
from benchmarks.reading import read
from benchmarks.results import FP8, Run
from fusedit.errors import UsageError
from fusedit.files import check_folder, write_together

RESULTS: Final = ROOT / "benchmarks" / "results"
INTRODUCTION: Final = """\
# Performance

Made by `python -m benchmarks page` from [benchmarks/results](../benchmarks/results); edit neither by hand. **All
weights are random** but those of the embedded models: that is right for speed, memory and numerical error, and there
are no pictures to look at. How to measure again is [below](#measure-again).

Rows that stand side by side are from one process in which the plans took turns. A ratio stands only where the check
of that row is green and stock was measured in the same run. Of several measurements the newest is shown.
"""
SECTIONS: Final[dict[str, Callable[[Newest, list[Entry]], str]]] = {
    "step": sections.step,
    "launches": sections.launches,
    "lora": lora_section.lora,
    "pictures": pictures_section.pictures,
    "image": sections.image,
    "cold-start": sections.cold_start,
    "new-size": sections.new_size,
    "vae-decode": vae_sections.decode,
    "vae-encode": vae_sections.encode,
    "ops": sections.ops,
    "convolutions": vae_sections.convolutions,
    "layouts": vae_sections.layouts,
}
AGAIN: Final = """\
## Measure again

    python -m benchmarks step --model flux.1-dev,z-image-turbo --size 1024x1024,512x512 --batch 1,4 --json FILE
    python -m benchmarks launches --json FILE      # kernel launches of one block
    python -m benchmarks image --json FILE         # whole pictures with text encoders and VAE
    python -m benchmarks cold-start --json FILE    # from a fresh process to the first step
{fp8}    python -m benchmarks ops --json FILE           # each op against plain torch and the card's ceilings
{more}    python -m benchmarks page                      # this page, from every file in benchmarks/results

They need one CUDA GPU. A plan that does not fit into its memory gets a row that says so.
"""
MORE: Final = {
    "lora": "    python -m benchmarks lora --json FILE          # steps with LoRAs, and swapping them\n",
    "pictures": "    python -m benchmarks pictures --json FILE      # of the embedded models, against stock's\n",
    "vae": "    python -m benchmarks vae --json FILE           # decode and encode of the VAE alone\n",
    "layouts": "    python -m benchmarks layouts --json FILE       # what memory layouts cost and bring\n",
    "convolutions": "    python -m benchmarks convolutions --json FILE  # each of its convolutions\n",
}
"""Commands that the page names once it shows rows of theirs."""


def pages(runs: Sequence[Run]) -> dict[str, str]:
    """File name -> content, for the page and the charts it shows."""
    newest = Newest(runs)
    files: dict[str, str] = {}
    parts = [INTRODUCTION]
    for place, device in enumerate(newest.devices):
        name = "performance.svg" if place == 0 else f"performance-{place + 1}.svg"
        if len(newest.devices) > 1:
            parts.append(f"# {device}\n")
        if newest.of(device, "step"):
            files[name] = chart(newest, device)
            parts.append(f"![Milliseconds a denoising step, by plan]({name})\n")
        known = [benchmark for benchmark in SECTIONS if newest.of(device, benchmark)]
        others = [b for b in newest.benchmarks(device) if b not in SECTIONS and b != "ceiling"]
        for benchmark in known + others:
            section = SECTIONS.get(benchmark, sections.timed)
            parts.append(section(newest, newest.of(device, benchmark)))
            if benchmark == "step":
                parts += fp8_section.fp8(newest, device)
    shown = {benchmark.partition("-")[0] for device in newest.devices for benchmark in newest.benchmarks(device)}
    lossy = any(newest.of(device, "step", *FP8) for device in newest.devices)
    more = "".join(line for command, line in MORE.items() if command in shown)
    again = AGAIN.format(fp8=fp8_section.AGAIN if lossy else "", more=more)
    parts += [sections.measured_on(newest), again]
    files["performance.md"] = "\n".join(parts)
    return files


def main(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Results files; default: all in benchmarks/results")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to")] = ROOT / "docs",
) -> None:
    """Write docs/performance.md from results. Example: python -m benchmarks page"""
    paths = results or sorted(RESULTS.glob("*.json"))
    if not paths:
        raise UsageError(f"there is no results file in {str(RESULTS)!r}; name one, or measure first")
    check_folder(out)
    runs = read(paths)
    if not any(run.rows for run in runs):
        raise UsageError(f"{', '.join(map(repr, map(str, paths)))}: no measurement in it; name a file that holds one")
    files = pages(runs)
    write_together({out / name: text.encode() for name, text in files.items()})
    typer.echo(", ".join(str(out / name) for name in sorted(files)))
