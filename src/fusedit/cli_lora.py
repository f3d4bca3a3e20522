"""`fusedit lora inspect`: what is in a LoRA file, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = {"flux": "FLUX.1", "z-image": "Z-Image", None: "not told by its names"}


def lora_lines(told: Mapping[str, Any]) -> list[str]:
    """What `fusedit.lora.inspect` found, a line each."""
    lines = [f"format   {told['format']}, {told['keys']} keys", f"model    {_NAMES[told['family']]}"]
    for part, found in told["parts"].items():
        low, high = found["scales"]
        scale = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines += [
            f"{part}: {found['layers']} layers, {found['bytes'] / 2**20:.1f} MiB",
            f"  rank   {_counted(found['ranks'])}",
            f"  alpha  {_counted(found['alphas'])}; scale {scale}",
        ]
        if found["dora"]:
            lines.append(f"  DoRA   {found['dora']} layers")
        if found["dense"]:
            lines.append(f"  dense  {found['dense']} layers have full rank")
        lines += [f"  {number:4} x {path}" for path, number in found["modules"].items()]
    if told["extra"]:
        lines.append("parameters beside the layers:")
        lines += [f"  {number:4} x {name}" for name, number in told["extra"].items()]
    if told["unmatched"]:
        lines.append(f"unmatched keys ({len(told['unmatched'])}): {', '.join(told['unmatched'])}")
    return [*lines, *told["notes"]]


def _counted(values: Mapping[str, int]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} ({number})" for value, number in values.items())
