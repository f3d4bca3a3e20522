"""Run by a test in a process of its own: the benchmarks' kernel in Triton's interpreter, its errors as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from support.interpreter import patch_once

from benchmarks import packed_conv
from fusedit.ops import pack_tiles

CASES = {
    "one-tile": (1, 64, 8, 16, 16),
    "ends-inside": (2, 64, 11, 19, 24),
    "more-outputs-than-a-program": (1, 64, 3, 5, 136),
}


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    patch_once()
    found: dict[str, float] = {}
    for name, (N, C, H, W, K) in CASES.items():
        for R in (3, 1):
            x = torch.randn(N, C, H, W).half().contiguous(memory_format=torch.channels_last)
            weight = (torch.randn(K, C, R, R) / (R * C**0.5)).half()
            truth = F.conv2d(x.double(), weight.double(), padding=R // 2)
            packed = packed_conv.pack_weight(weight)
            for step in packed_conv.STEPS:
                made = {
                    "nhwc": packed_conv.convolve(x, packed, x.shape, step),
                    "tiles": packed_conv.convolve(pack_tiles.plain(x, step), packed, x.shape, step),
                }
                for layout, y in made.items():
                    error = float((y.double() - truth).norm() / truth.norm())
                    found[f"{name}/{R}x{R}/{step}/{layout}"] = error
                found[f"{name}/{R}x{R}/{step}/difference"] = float((made["nhwc"] - made["tiles"]).abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
