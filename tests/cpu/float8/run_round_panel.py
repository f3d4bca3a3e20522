"""Run by a test in a process of its own: the kernel in triton's interpreter, and compiled ahead of time, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interpreter import patch_once

from fusedit.float8 import round_panel as module
from fusedit.ops import _triton

CAPABILITIES = (89, 90, 100, 120)
SHAPES = ((1, 20, 128), (2, 7, 33), (3, 16, 1), (1, 1, 128), (2, 0, 16))


def interpreted() -> dict[str, bool]:
    found = {}
    for G, N, P in SHAPES:
        generator = torch.Generator().manual_seed(P)
        w = torch.randn(G, N, P + 5, generator=generator)[..., 2 : P + 2] * 200  # some beyond 448, rows apart
        factor = torch.randn(G, P + 3, P + 3, generator=generator)[:, 1 : P + 1, 1 : P + 1].triu()
        factor.diagonal(dim1=1, dim2=2).copy_(torch.rand(G, P, generator=generator) + 0.5)
        before = w.clone()
        right, made = module.plain(w, factor), module.round_panel(w, factor)
        same = torch.equal(right[0].view(torch.uint8), made[0].view(torch.uint8)) and torch.equal(right[1], made[1])
        found[f"{G},{N},{P}"] = same and torch.equal(w, before)
    return found


def main() -> None:
    torch.set_num_threads(1)
    if _triton.INTERPRETING:
        patch_once()
        print(json.dumps(interpreted()))
        return
    from run_compiled import compile_for

    (build,) = module.builds()
    print(json.dumps({str(capability): compile_for(build, capability) for capability in CAPABILITIES}))


if __name__ == "__main__":
    main()
