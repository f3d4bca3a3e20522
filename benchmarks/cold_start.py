"""Seconds from a fresh process to its first step, with an empty cache of kernels and with a filled one.

Then, in the process of a plan of fusedit that began with a filled cache: sizes, batches and prompt lengths it had not
seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks import arguments as given
from benchmarks import table
from benchmarks.environment import ROOT
from benchmarks.plans import PLANS, empty_caches
from benchmarks.results import Results, Row
from benchmarks.workloads import WORKLOADS

SIZE: Final = (1024, 1024)
NOTE: Final = (
    "counted by Triton's compilation listener and by the variants held; NVRTC is not counted: fusedit calls none, "
    "and what cuDNN compiles for a new shape is in first_step_s"
)


OURS: Final = ("exact", "fp8")
UNCACHED: Final = ("stock", "torchao-fp8-eager")
"""Plans that fill no cache."""


def measure(name: str, plan: str, more_sizes: bool = True) -> list[Row]:
    """Rows of one model and plan: with an empty cache and, where the plan fills it, once more."""
    rows: list[Row] = []
    states = ("empty cache",) if plan in UNCACHED else ("empty cache", "filled cache")
    with empty_caches():
        for state in states:
            new_sizes = more_sizes and plan in OURS and state == "filled cache"
            row = Row("cold-start", name, f"{SIZE[0]}x{SIZE[1]}", 1, plan, "" if plan in UNCACHED else state)
            made = _child({"model": name, "plan": plan, "size": SIZE, "new_sizes": new_sizes})
            rows.append(row)
            if isinstance(made, str):
                row.error = made
                continue
            ready = made["lay_s"] + made["steps_s"][0]
            row.ms = round(1e3 * ready, 1)
            row.more = {
                "import_s": round(made["import_s"], 2),
                "load_s": round(made["load_s"], 2),
                "lay_s": round(made["lay_s"], 3),
                "first_step_s": round(made["steps_s"][0], 3),
                "ready_s": round(ready, 3),
                "steps_s": [round(step, 4) for step in made["steps_s"]],
            }
            if plan in OURS:  # torch.compile has processes of its own for it, where they are not counted
                row.more |= {f"kernels_{how}": number for how, number in made["kernels"].items()}
            rows += [_new_size(name, plan, found) for found in made["new_sizes"]]
    return rows


def _new_size(name: str, plan: str, found: dict[str, Any]) -> Row:
    size = found["size"]
    tokens = [int(length) for length in size["tokens"]]
    label = "+".join(map(str, tokens))
    row = Row("new-size", name, f"{size['width']}x{size['height']}", len(tokens), plan, f"{label} tokens")
    row.error = found.get("error")
    if row.error is None:
        first, second, *_ = found["steps_s"]
        row.ms = round(1e3 * second, 2)
        row.more = {
            "prompt_tokens": tokens,
            "first_step_ms": round(1e3 * first, 2),
            "plan_ms": round(1e3 * (first - second), 2),
            "kernels_compiled": found["kernels"]["compiled"],
            "kernels_loaded": found["kernels"]["loaded"],
            "new_variants": found["new_variants"],
            "note": NOTE,
        }
    return row


def _child(request: dict[str, Any]) -> dict[str, Any] | str:
    """What the process found, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.cold_child", json.dumps(request), str(answer)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not answer.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return "out of memory" if "OutOfMemoryError" in lines[-1] else lines[-1][:300]
        made: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return made


def main(
    model: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(WORKLOADS))] = ",".join(WORKLOADS),
    plans: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PLANS))] = "stock,compile,exact",
    new_sizes: Annotated[bool, typer.Option(help="Sizes that are new to the process as well")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here")] = None,
) -> None:
    """Time to the first step in a fresh process. Example: python -m benchmarks cold-start --model flux.1-dev"""
    models = given.names(model, tuple(WORKLOADS), "model")
    chosen = given.names(plans, PLANS, "plan")
    given.destination(json_file)
    given.need_gpu("cold-start")
    results = Results(json_file)
    for name in models:
        for plan in chosen:
            rows = measure(name, plan, new_sizes)
            results.add(rows)
            table.show(rows)
