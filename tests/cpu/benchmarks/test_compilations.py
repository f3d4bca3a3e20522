"""Counts of compiled and loaded kernels, with a real compilation for a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compilations import compilations, kernels, variants
from fusedit import ops

triton = pytest.importorskip("triton")


def test_compiled_once_then_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = ops.registry()["swiglu"].builds()[0]
    source = ASTSource(fn=build.kernel, signature=dict(build.signature), constexprs=dict(build.constexprs))
    options = {"num_warps": build.num_warps, "enable_fp_fusion": True}
    before = triton.knobs.compilation.listener
    with compilations() as first:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with compilations() as second:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert (first.compiled, first.loaded) == (1, 0)
    assert (second.compiled, second.loaded) == (0, 1)
    assert triton.knobs.compilation.listener is before


def test_kernels_of_every_module() -> None:
    """Those of an op's own file, those that ops share, and those in Gluon."""
    names = {f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}" for kernel in kernels()}
    assert {"swiglu._kernel", "_group_norm._statistics", "_conv_hopper_kernel.conv", "_conv_epilogue._kernel"} <= names


def test_no_variant_without_a_gpu() -> None:
    assert variants() == 0
