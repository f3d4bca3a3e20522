"""One cold start, in a process of its own: `python -m benchmarks.cold_child JSON FILE`.

Started by benchmarks.cold_start, which says what to do in JSON and reads what came of it from the file.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

BEGAN: Final = time.perf_counter()  # before the imports that are measured


class NewSize(NamedTuple):
    """A size that the process has not drawn yet, and the prompt tokens of each item."""

    width: int
    height: int
    tokens: tuple[int, ...]


NEW_SIZES: Final = (
    NewSize(256, 256, (1,)),
    NewSize(256, 256, (512, 37, 200, 1)),
    NewSize(512, 512, (77,)),
    NewSize(512, 768, (37, 300, 9)),
    NewSize(768, 512, (512, 512)),
    NewSize(1024, 768, (300,)),
    NewSize(1280, 720, (128,)),
    NewSize(1024, 1024, (200, 60, 200, 11)),
    NewSize(1536, 1024, (64, 512)),
    NewSize(2048, 2048, (512,)),
)


def start(name: str, plan: str, size: tuple[int, int], new_sizes: tuple[NewSize, ...]) -> dict[str, Any]:
    """Import, load, lay the plan, draw; then the sizes that are new to this process."""
    import torch

    import fusedit
    from benchmarks import gpu
    from benchmarks.compilations import compilations, variants
    from benchmarks.plans import COMPILED, compile_in_place, convert
    from benchmarks.workloads import WORKLOADS

    imported = time.perf_counter()
    workload = WORKLOADS[name]()
    call_arguments = workload.arguments(*size, 1)
    gpu.synchronize()
    loaded = time.perf_counter()
    with compilations() as counts:
        if plan == "exact":
            fusedit.accelerate(workload.pipe, plan)
        converted = convert(workload.pipe, plan, drop=False)  # as who leaves every argument out
        if plan in COMPILED:
            compile_in_place(workload.pipe.transformer, plan)
        laid = time.perf_counter()
        with converted.context():
            steps = _steps(workload.pipe, call_arguments)
    made: dict[str, Any] = {
        "import_s": imported - BEGAN,
        "load_s": loaded - imported,
        "lay_s": laid - loaded,
        "steps_s": steps,
        "kernels": asdict(counts),
        "new_sizes": [],
    }
    for new in new_sizes:
        call_arguments = workload.arguments(new.width, new.height, len(new.tokens), new.tokens)
        before = variants()
        found: dict[str, Any] = {"size": new._asdict()}
        try:
            with compilations() as counts, converted.context():
                found["steps_s"] = _steps(workload.pipe, call_arguments)
            found |= {"kernels": asdict(counts), "new_variants": variants() - before}
        except torch.OutOfMemoryError:
            found["error"] = "out of memory"
        made["new_sizes"].append(found)
        gpu.free()
    return made


def _steps(pipe: Any, call_arguments: dict[str, Any]) -> list[float]:
    """Seconds of each of the first steps, the GPU's work included."""
    from benchmarks import gpu
    from benchmarks.call import call

    marks = [time.perf_counter()]

    def on_step(_step: int, _latents: Any) -> None:
        gpu.synchronize()
        marks.append(time.perf_counter())

    call(pipe, call_arguments, 4, on_step)
    return [b - a for a, b in itertools.pairwise(marks)]


def main() -> None:
    request = json.loads(sys.argv[1])
    new_sizes = NEW_SIZES if request["new_sizes"] else ()
    made = start(request["model"], request["plan"], tuple(request["size"]), new_sizes)
    Path(sys.argv[2]).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
