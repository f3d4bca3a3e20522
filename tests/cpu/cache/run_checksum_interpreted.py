"""Run by a test in a process of its own: the kernel in Triton's interpreter beside plain torch, both as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interpreter import patch_once

from fusedit.cache import checksum_kernel
from fusedit.cache.checksum import ROW, TILE, checksums, plain
from fusedit.ops import _triton

SIZES = (0, 1, 7, 8, 13, ROW - 1, ROW, ROW + 1, 5 * ROW + 3, TILE - 1, TILE, TILE + 1, 2 * TILE + ROW + 9)


def lists() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    # Starts on 64 bytes, as every allocation of torch does: what is at offset n is at an address of that remainder.
    data = torch.randint(0, 256, (3 * TILE,), dtype=torch.uint8, generator=generator)
    assert data.data_ptr() % 64 == 0
    small = torch.randn(40, 12, generator=generator)
    wide = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
    return {
        "aligned": [data[:n] for n in SIZES],
        **{f"at {offset}": [data[offset : offset + n] for n in (13, TILE, TILE + 9)] for offset in (1, 2, 4, 8, 16)},
        "dtypes": [small.to(dtype) for dtype in wide] + [torch.arange(9), small > 0, small.to(torch.int8)],
        "scalars": [torch.tensor(2.5), torch.tensor(True), torch.tensor(-1)],
        "strided": [small.t(), small[::3, 1::2], small.expand(3, 40, 12), data[: 2 * TILE].view(256, 256).t()],
        "empty": [torch.empty(0, 4), torch.empty(3, 0)],
        "empty among others": [torch.empty(0), small, torch.empty(0, dtype=torch.int8), small[0]],
        "parameter": [torch.nn.Parameter(small)],
        "many": [small[row, : row % 13] for row in range(40)],
    }


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    assert _triton.INTERPRETING
    patch_once()
    launched: list[int] = []
    launch = checksum_kernel.launch

    def noted(tensors: list[torch.Tensor]) -> torch.Tensor:
        launched.append(len(tensors))
        return launch(tensors)

    checksum_kernel.launch = noted
    found = {}
    for name, tensors in lists().items():
        launched.clear()
        kernel = checksums(tensors)
        with torch.no_grad():
            expected = plain([t.contiguous() for t in tensors]).tolist()
        found[name] = {"kernel": kernel, "plain": expected, "launched": launched == [len(tensors)]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
