"""Every kernel without a GPU: its values through the interpreter, its machine code for six chips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusedit import ops

pytest.importorskip("triton")
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may have


def small_cases() -> Iterator[str]:
    for op in ops.registry().values():
        for case in op.cases:
            if "small" in case.tags:
                halves = ("float16",) if op.name != "upsample_conv2d" else ()
                yield from (f"{op.name}/{case.name}/{dtype}" for dtype in ("float32", *halves))
                if op.name in (
                    "conv2d",
                    "conv2d_group_norm_silu",
                    "group_norm_silu_conv2d",
                    "grouped_linear",
                    "linear_gelu",
                    "linear_swiglu",
                    "winograd_conv2d",
                ):
                    yield f"{op.name}/{case.name}/bfloat16"


@pytest.mark.parametrize("which", list(small_cases()))
def test_interpreter_agrees_with_the_reference(interpreted: dict[str, Any], which: str) -> None:
    result = interpreted[which]
    assert result["wrong"] == []
    if "empty" in which:
        assert result["ran"] == {}, "an empty input launched something"
    elif which.startswith("conv2d/"):
        kernel = "gather" if any(name in which for name in ("last", "one-by-one")) else "direct"
        assert set(result["ran"]) == {"plain" if which.endswith("bfloat16") else kernel}
    elif not which.startswith(("attention", "conv2d_", "linear_", "scaled_linear", "upsample_conv2d/")):  # a library's
        # Triton's interpreter multiplies bfloat16 as whole numbers, so plain torch serves there.
        assert set(result["ran"]) == {"plain" if which.endswith("bfloat16") else "triton"}


def test_the_interpreter_says_why_it_does_not_multiply_bfloat16(run_python: Callable[..., str]) -> None:
    code = """
import torch
from fusedit import ops
for dtype in (torch.bfloat16, torch.float16):
    x, w, b = (torch.ones(shape, dtype=dtype) for shape in ((2, 16), (4, 16), (4,)))
    print(*ops.grouped_linear.backend(x, [w], [b]), sep="|")
"""
    said = run_python(code, TRITON_INTERPRET="1").splitlines()
    assert said == ["plain|triton's interpreter cannot multiply bfloat16", "triton|"]


@pytest.mark.parametrize("name", sorted(ops.registry()))
def test_negated_views_have_their_sign(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted[f"{name}/negated"]["same"]


def test_sums_of_taps_are_those_of_plain_torch(interpreted: dict[str, Any]) -> None:
    assert interpreted["upsample_conv2d/folded"] == {"dense": True, "last": True}


def test_group_norm_does_not_cancel(interpreted: dict[str, Any]) -> None:
    found = interpreted["group_norm_silu/large-mean"]
    assert found["torch"] < 6e-5
    assert found["kernel"] < 1000 * 2**-24  # half the spacing of fp32 at the mean: no more than its rounding


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["linear_gelu", "linear_swiglu"])
def test_persistent_product(interpreted: dict[str, Any], name: str, dtype: str) -> None:
    """Tiles that end inside, two items, a slice, more tiles than programs; memory around the result stays as it was."""
    found = interpreted[f"{name}/persistent/{dtype}"]
    assert found["error"] < (1e-6 if dtype == "float32" else 1e-3)
    assert found["outside"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("out", ["gapped", "unaligned", "odd-rows", "transposed"])
@pytest.mark.parametrize("name", ["linear_gelu", "linear_swiglu"])
def test_a_product_into_what_tma_cannot_write_to(interpreted: dict[str, Any], name: str, out: str, dtype: str) -> None:
    found = interpreted[f"{name}/out-{out}/{dtype}"]
    assert found["error"] < (1e-6 if dtype == "float32" else 1e-3)
    assert found["outside"]


def builds() -> Iterator[tuple[str, int]]:
    for op in ops.registry().values():
        for build in op.builds():
            for capability in SHARED_MEMORY:
                if capability >= build.capability and (capability == 90 or build.name.endswith("bf16")):
                    yield f"{op.name}/{build.name}", capability


# Ops whose output lies on no input, or on one in kernels of several passes, each of which reads before it writes.
APART = (
    *("attention", "conv2d", "group_norm_silu", "grouped_linear", "low_rank", "nchw_to_nhwc", "nhwc_to_nchw"),
    *("pack_tiles", "qk_norm_rope", "residual_group_norm_silu", "row_bounds", "row_dots", "scaled_linear"),
    *("scaled_low_rank", "upsample_conv2d", "winograd"),
)


def traits(which: str) -> frozenset[str]:
    name, build = which.split("/")
    return next(b.traits for b in ops.registry()[name].builds() if b.name == build)


@pytest.mark.parametrize(("which", "capability"), list(builds()))
def test_compiles_ahead_of_time(compiled: dict[str, Any], which: str, capability: int) -> None:
    made = compiled[f"{which}/{capability}"]
    assert made["shared"] <= SHARED_MEMORY[capability] * 1024
    if "no-spill" in traits(which):
        assert made["stack"] == 0
    # Where an output lies on an input, each thread must write only what it has read itself, or the value that is there.
    seen = {kind: {kept for k, kept in made["layouts"] if k == kind} for kind in ("load", "store")}
    if not which.startswith(APART) and "descriptors" not in traits(which):
        assert seen["store"]
        if "codes" in traits(which):  # which lie on no input; what makes them stays in the registers it was loaded to
            seen = {kind: {kept.split(", #")[1] for kept in found} for kind, found in seen.items()}
        assert seen["store"] <= seen["load"]


@pytest.mark.parametrize("which", sorted({which for which, _ in builds() if "vector" in " ".join(traits(which))}))
def test_aligned_variant_moves_16_bytes_at_once(compiled: dict[str, Any], which: str) -> None:
    accesses = compiled[f"{which}/90"]["accesses"]
    stores = [a for a in accesses if a.startswith("st")]
    assert stores
    if "codes" in traits(which):  # one byte an element: 8 for 16 bytes of bf16, 4 for 16 of fp32; and fp32 once a row
        assert not [a for a in accesses if a.endswith((".b8", ".b16"))]
        return
    assert all(".v4." in a for a in stores), stores
    loads = [a for a in accesses if a.startswith("ld")]
    if "vector" in traits(which):
        assert all(".v4." in a or ".v2." in a for a in loads), loads
    assert sum(".v4." in a for a in loads) >= len(stores)


def test_a_new_length_stride_or_slice_compiles_nothing() -> None:
    kernels = {id(b.kernel): b.kernel for op in ops.registry().values() for b in op.builds()}
    assert len(kernels) >= 12
    for kernel in kernels.values():
        for p in kernel.params:
            assert p.is_constexpr or p.do_not_specialize or p.do_not_specialize_on_alignment, (kernel, p.name)
            if p.name.endswith("_ptr"):
                assert p.do_not_specialize_on_alignment
