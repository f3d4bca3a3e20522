"""Run by the tests in a process of its own: kernels compiled ahead of time for many chips, what came out as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fusedit import ops
from fusedit.ops._build import Build


def compile_for(build: Build, capability: int) -> dict[str, object]:
    language = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = language(fn=build.kernel, signature=dict(build.signature), constexprs=dict(build.constexprs))
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    return {
        "registers": int(used["REG"]),
        "stack": int(used["STACK"]) + int(used.get("LOCAL", 0)),
        "shared": made.metadata.shared,
        "accesses": re.findall(r"\b((?:ld|st)\.global[\w.:]*)", made.asm["ptx"]),
        "layouts": layouts(made.asm["ttgir"]),
        "products": sorted(set(re.findall(r"(wgmma\.mma_async\.[\w.]*|mma\.sync\.[\w.]*)", made.asm["ptx"]))),
    }


def layouts(ttgir: str) -> list[list[str]]:
    """[access, type with layout] of every two-dimensional load and store."""
    found = re.findall(r"tt\.(load|store) .*?: tensor<(\d+x\d+x[^>]*>?, #\w+)>", ttgir)
    return [[kind, kept] for kind, kept in found]


def main() -> None:
    share, of = int(sys.argv[1]), int(sys.argv[2])
    jobs = [
        (op.name, build, capability)
        for op in ops.registry().values()
        for build in op.builds()
        for capability in (90, 80, 86, 89, 100, 120)
        if capability >= build.capability and (capability == 90 or build.name.endswith("bf16"))
    ]
    found = {f"{name}/{build.name}/{cap}": compile_for(build, cap) for name, build, cap in jobs[share::of]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
