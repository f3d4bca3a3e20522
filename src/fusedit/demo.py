"""The main job in one command: both embedded models, four prompts each, by stock and by plan `exact`.

    python -m fusedit.demo

Prints one table and writes out/demo/report.html, result.json and the pictures. Runs on a CPU and uses a GPU where there
is one; on a GPU (bf16) stock in fp32 is drawn too, because that is what two bf16 pictures can be judged by.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fusedit.progress import Progress, progress_on

if TYPE_CHECKING:
    from fusedit.quality.result import Comparison

PROMPTS: Final = ("red apple, 3d style", "birthday cake, flat style", "butterfly, 3d style", "mushroom, noto style")
SEEDS: Final = (7,)
OUT: Final = Path("out/demo")


def run_demo(out: Path = OUT, *, quiet: bool = False) -> tuple[list[Comparison], list[Path]]:
    """Compare on every embedded model and write below `out`.

    Returns:
        The comparisons, and the files written, the report page first.

    Raises:
        OutputError: `out` cannot be written; nothing was drawn.
        ModelNotFoundError: this installation has no embedded model.
    """
    from fusedit.errors import ModelNotFoundError
    from fusedit.loading import embedded_models, load
    from fusedit.quality._compare import compare
    from fusedit.quality.output import check_output, write_comparisons

    check_output(out)

    names = list(embedded_models())
    if not names:
        raise ModelNotFoundError("this installation has no embedded model; clone the repository with its assets")
    results = []
    with Progress() if quiet else progress_on() as progress:
        for name in names:
            pipe: Any = load(name)
            reference = "fp32" if pipe.device.type == "cuda" else "same"
            results.append(compare(pipe, PROMPTS, "exact", SEEDS, reference=reference, progress=progress))
            del pipe
    result = {"results": [comparison.to_dict() for comparison in results]}
    written = write_comparisons(out, results, result, "fusedit: stock and accelerated, side by side")
    return results, written


if __name__ == "__main__":
    from fusedit.cli import app

    app(["demo", *sys.argv[1:]], prog_name="fusedit")
