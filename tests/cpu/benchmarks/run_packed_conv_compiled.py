"""Run by a test in a process of its own: the benchmarks' kernel compiled for Hopper, what came out as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).parents[3]))

import run_compiled
import triton

from benchmarks import packed_conv

CAPABILITY = 90


def main() -> None:
    texts: list[str] = []
    compile_one = triton.compile

    def keep(*args: object, **kwargs: object) -> object:
        made = compile_one(*args, **kwargs)
        texts.append(made.asm["ptx"])
        return made

    triton.compile = keep
    found = {}
    for build in packed_conv.builds():
        found[build.name] = run_compiled.compile_for(build, CAPABILITY)
        copies = re.findall(r"cp\.async\.\w+\.shared\.global .*?, (0x\w+|\d+)", texts[-1])
        found[build.name] |= {
            "copies": len(copies),
            "wide_copies": sum(int(size, 0) == 16 for size in copies),
            "products": texts[-1].count("wgmma.mma_async"),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
