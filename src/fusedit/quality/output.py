"""Writing a comparison: report page, result.json, and each picture as PNG with its settings inside and beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fusedit.files import check_folder, check_replaceable, json_bytes, png_bytes, write_together
from fusedit.quality.maps import amplified, difference_map
from fusedit.quality.page import page
from fusedit.quality.result import Comparison, Pair

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


KINDS: Final = ("stock", "fused", "difference", "flip")


def check_output(folder: Path) -> None:
    """Prove, before anything is drawn, that `write_comparisons` can write there and replaces nothing of a user's.

    Raises:
        OutputError: it cannot, or would.
    """
    check_folder(folder)
    check_replaceable(folder / "result.json", {"pairs", "verdict"}, {"results"})


def write_comparisons(folder: Path, results: Sequence[Comparison], result: Mapping[str, Any], title: str) -> list[Path]:
    """Write everything below `folder`, all of it or nothing, and return the paths, the page first.

    Args:
        folder: made if it does not exist.
        results: what was compared.
        result: what goes into result.json.
        title: of the page.

    Raises:
        OutputError: a file cannot be written.
    """
    contents: dict[Path, bytes] = {folder / "report.html": page(results, title).encode()}
    contents[folder / "result.json"] = json_bytes(result)
    absent: list[Path] = []
    names = [slug(comparison.model) for comparison in results]
    for place, comparison in enumerate(results, start=1):
        again = f"-{place}" if names.count(names[place - 1]) > 1 else ""  # the same model twice: no file may be lost
        prefix = f"{names[place - 1]}{again}-" if len(results) > 1 else ""
        for number, pair in enumerate(comparison.pairs, start=1):
            shown = {kind: (pixels, extra) for kind, pixels, extra in pictures(pair)}
            for kind in KINDS:
                path = folder / f"{prefix}{number:02d}-seed{pair.seed}-{kind}.png"
                if kind not in shown:
                    absent += [path, path.with_suffix(".json")]
                    continue
                pixels, extra = shown[kind]
                settings = {**settings_of(comparison, pair), "picture": kind, **extra}
                contents[path] = png_bytes(pixels, settings)
                contents[path.with_suffix(".json")] = json_bytes(settings)
    write_together(contents)
    for path in absent:  # an earlier run's picture of this name would pass for this run's
        path.unlink(missing_ok=True)
    return list(contents)


def pictures(pair: Pair) -> Iterator[tuple[str, NDArray[np.float32], dict[str, Any]]]:
    """What there is to show of a pair: (kind, pixels, what to know about it). A failed picture is never among them."""
    if pair.stock is not None:
        yield "stock", pair.stock, {}
    if pair.fused is not None:
        yield "fused", pair.fused, {}
    if pair.stock is not None and pair.fused is not None and pair.stock.shape == pair.fused.shape:
        pixels, factor = difference_map(pair.stock, pair.fused)
        yield "difference", pixels, {"amplified": factor}
    if pair.flip_map is not None:
        pixels, factor = amplified(pair.flip_map)
        yield "flip", pixels, {"amplified": factor}


def settings_of(comparison: Comparison, pair: Pair) -> dict[str, Any]:
    """What is needed to draw this pair again, and what really ran."""
    return {
        "model": comparison.model,
        "pipeline": comparison.pipeline,
        "prompt": pair.prompt,
        "seed": pair.seed,
        "size": None if pair.size is None else str(pair.size),
        "steps": comparison.steps,
        "guidance": comparison.guidance,
        "negative": comparison.negative,
        "true_cfg": comparison.true_cfg,
        "text_tokens": pair.text_tokens,
        "dtype": comparison.dtype,
        "device": comparison.device,
        "plan": comparison.plan,
        "verdict": comparison.verdict.to_dict(),
        "report": {
            "rewritten": [site.to_dict() for site in comparison.rewritten],
            "refused": [refusal.to_dict() for refusal in comparison.refused],
        },
        "environment": comparison.environment,
    }


def slug(text: str) -> str:
    """A name that is safe in a file name."""
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text).strip(".-") or "model"
