"""`fusedit quantize` and `fusedit sensitivity`: arguments checked before a model is loaded, results in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedit.errors import ArgumentError
from fusedit.files import check_file, check_replaceable, json_bytes, write_together
from fusedit.validation import check_prompt, check_seed, check_steps, dtype_name, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from fusedit.quantize import Quantised
    from fusedit.sensitivity import Sensitivity


def run_quantize(*, model: str, out: Path, plan: str, dtype: str | None, quiet: bool) -> Quantised:
    """Check the arguments, then load, convert and write."""
    from fusedit.progress import Progress, progress_on
    from fusedit.quantize import lossy_plan, quantize

    chosen = lossy_plan(plan)
    if dtype is not None:
        dtype_name(dtype)
    with Progress() if quiet else progress_on() as progress:
        return quantize(model, out, chosen, dtype=dtype, progress=progress)


def quantised_line(made: Quantised) -> str:
    before, after = made.bytes_before / 2**20, made.bytes_after / 2**20
    rounding = f"\n{made.rounding}" if made.rounding else ""
    return (
        f"{made.path}  {made.layers} linear layers in e4m3, {made.kept} as they were; transformer {before:.0f} -> "
        f"{after:.0f} MiB; quantised in {made.convert_s:.1f} s, {made.total_s:.1f} s in all{rounding}"
    )


def run_sensitivity(
    *,
    model: str,
    plan: str,
    prompt: str,
    seed: int,
    size: str | None,
    steps: int | None,
    by: str,
    samples: int,
    keep: int,
    save: Path | None,
    dtype: str | None,
    device: str | None,
    quiet: bool,
) -> Sensitivity:
    """Check the arguments, load the model, measure, and write the better plan where one is asked for."""
    from fusedit.defaults import request_for
    from fusedit.loading import load
    from fusedit.progress import Progress, progress_on
    from fusedit.quantize import lossy_plan
    from fusedit.sensitivity import GROUPS, sensitivity
    from fusedit.validation import check_choice

    chosen = lossy_plan(plan)
    check_prompt(prompt)
    check_seed(seed)
    check_choice(by, GROUPS, "by")
    asked = None if size is None else parse_size(size)
    if steps is not None:
        check_steps(steps)
    if not 0 <= keep <= 10_000:
        raise ArgumentError(f"keep is {keep}; give the number of groups that stay in the model's dtype, 0 or more")
    if save is not None:
        check_file(save, ".json")
        check_replaceable(save, {"schema", "base"})
    if dtype is not None:
        dtype_name(dtype)
    pipe: Any = load(model, dtype=dtype, device=device)
    width, height = (None, None) if asked is None else (asked.width, asked.height)
    request = request_for(pipe, prompt, seed, width=width, height=height, steps=steps)
    with Progress() if quiet else progress_on() as progress:
        found = sensitivity(pipe, request, chosen, by=by, samples=min(samples, request.steps), progress=progress)
    if save is not None:
        write_together({save: json_bytes(found.better(keep).to_dict())})
    return found


def print_sensitivity(found: Sensitivity, console: Console, most: int = 40) -> None:
    """The groups as a table, the worst first, and what stays as it is."""
    from collections import Counter

    from rich.table import Table
    from rich.text import Text

    steps = ", ".join(str(step + 1) for step in found.steps)
    title = f"{found.model}, plan {found.plan['base']}: error of the output by {found.by}, steps {steps}"
    table = Table(title=Text(title), title_justify="left")
    for name in ("layers", "precision"):
        table.add_column(name, overflow="fold")
    for name in ("count", "weights", "error", "share"):
        table.add_column(name, justify="right")
    for group in found.groups[:most]:
        row = (f"{group.layers}", f"{group.weights:,}", f"{group.error:.5f}", f"{group.share:.1%}")
        table.add_row(Text(group.name), group.precision, *row)
    console.print(table)
    if len(found.groups) > most:
        console.print(f"and {len(found.groups) - most} more below {found.groups[most - 1].error:.5f}; --json has all")
    console.print(f"all together: {found.total:.5f}")
    if found.rounding:
        console.print(Text(found.rounding))
    for reason, count in Counter(found.kept.values()).items():
        console.print(Text(f"{count} in the model's dtype: {reason}"))
