"""Run by a test in a process of its own: the kernel compiled ahead of time for many chips, what came out as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from run_compiled import compile_for

from fusedit.cache.checksum_kernel import CONSTEXPRS, WARPS, checksum
from fusedit.ops._build import Build

CAPABILITIES = (80, 86, 89, 90, 100, 120)


def main() -> None:
    types = {"address_ptr": "*i64", "place_ptr": "*i32", "out_ptr": "*i64"}
    build = Build.of("checksum", checksum, types, CONSTEXPRS, WARPS)
    print(json.dumps({str(capability): compile_for(build, capability) for capability in CAPABILITIES}))


if __name__ == "__main__":
    main()
