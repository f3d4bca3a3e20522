"""What is measured of a VAE by layouts, and what is said about it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.pipes import relative, tiny_vae

from fusedit import vae_layout, vae_stages
from fusedit.cli_layout import print_layouts, sentences
from fusedit.errors import ArgumentError, DeviceMemoryError, UnsupportedPipelineError
from fusedit.vae_layout import Check, Pass
from fusedit.vae_stages import KINDS, VARIANTS, Conversions, Figure, Times, conversions_in
from fusedit.validation import Size

SIZE = Size(32, 48)
HALVES = ("decode", "encode")


@pytest.fixture
def vae() -> Any:
    torch.manual_seed(0)
    return tiny_vae(layers_per_block=2).requires_grad_(False)


def half(vae: Any, what: str) -> Any:
    return vae.decoder if what == "decode" else vae.encoder


# -- the three variants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", HALVES)
@torch.no_grad()
def test_every_variant_gives_what_stock_gives(vae: Any, what: str) -> None:
    x = vae_layout.inputs(vae, what, SIZE, 2)
    kept, stock = x.clone(), half(vae, what)(x)
    for variant in vae_stages.variants(half(vae, what), what, x):
        for made in (variant.run(x), variant.whole(x)):
            assert relative(made, stock) < 1e-5
            assert made.is_contiguous() or variant.name == "nchw"  # stock leaves its result as it came out
    assert torch.equal(x, kept)


@torch.no_grad()
def test_how_results_lie_in_memory_is_seen(vae: Any) -> None:
    x = vae_layout.inputs(vae, "decode", SIZE, 1)
    made = {variant.name: variant for variant in vae_stages.variants(vae.decoder, "decode", x)}
    found = {name: vae_stages.layouts_of(variant, x) for name, variant in made.items()}
    assert found["nchw"][:2] == ("NCHW", "NHWC")  # attention is in the second stage
    assert set(found["nhwc"]) == {"NHWC"}
    assert set(found["fused"]) == {"NHWC"}
    halved = vae_stages.Variant("nchw", lambda x: x, (("a", lambda x: x[..., ::2]),), lambda s: s, lambda x: x)
    assert vae_stages.layouts_of(halved, x) == ("neither",)


@pytest.mark.parametrize("what", HALVES)
def test_the_model_is_left_as_it_was(vae: Any, what: str) -> None:
    before = copy.deepcopy(vae.state_dict())
    strides = [p.stride() for p in vae.parameters()]
    vae_layout.measure(vae, "tiny", SIZE, what=(what,), seconds=0.01)
    assert all(torch.equal(value, before[name]) for name, value in vae.state_dict().items())
    assert [p.stride() for p in vae.parameters()] == strides
    assert "forward" not in vars(half(vae, what))


def test_inputs_are_random_and_the_same_each_time(vae: Any) -> None:
    for what in HALVES:
        x = vae_layout.inputs(vae, what, SIZE, 2)
        assert torch.equal(x, vae_layout.inputs(vae, what, SIZE, 2))
        assert x.std() > 0.4
        assert not torch.equal(x[0], x[1])


# -- the clock -------------------------------------------------------------------------------------------------------


def test_laps_take_turns_and_every_part_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only work moves: 1 s to enter, 2 and 3 s for two stages, 4 s to leave, 7 s in one go."""
    clock, order = [0.0], []
    monkeypatch.setattr(vae_stages.timing, "now", lambda: clock[0])

    def work(seconds: float, name: str = "") -> Any:
        def run(x: Any) -> Any:
            clock[0] += seconds
            order.extend([name] if name else [])
            return x

        return run

    stages = (("a", work(2.0)), ("b", work(3.0)))
    made = [vae_stages.Variant(name, work(1.0), stages, work(4.0), work(7.0, name)) for name in VARIANTS]
    times = vae_stages.time_all(made, torch.zeros(1), seconds=51.0)
    for found in times.values():
        assert found.parts == tuple(Figure(1e3 * s, 1e3 * s, 1e3 * s) for s in (1.0, 2.0, 3.0, 4.0))
        assert found.whole == Figure(7e3, 7e3, 7e3)
        assert (found.laps, found.host_bound) == (3, False)
    assert order == ["nchw", "nhwc", "fused", "nhwc", "fused", "nchw", "fused", "nchw", "nhwc"]
    assert vae_stages.time_all(made, torch.zeros(1), seconds=85.0)["nchw"].laps == 5


# -- conversions -----------------------------------------------------------------------------------------------------


def event(*kernels: tuple[str, float], name: str = "aten::copy_", inside: Any = None) -> Any:
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    return SimpleNamespace(name=name, kernels=launched, cpu_parent=inside)


def test_kernels_are_counted_by_what_they_convert() -> None:
    norm = event(name="aten::native_group_norm", inside=event(name="aten::group_norm"))
    conv = event(name="aten::_convolution", inside=event(name="aten::conv2d"))
    direct = "void at::native::elementwise_kernel<direct_copy_kernel_cuda>"
    events = [
        event(("void cudnn::ops::nchwToNhwcKernel<bf16>", 10.0), ("sm90_xmma_fprop", 99.0), name="aten::cudnn_conv"),
        event(("void cudnn::ops::nhwcToNchwKernel<bf16>", 20.0), name="aten::cudnn_conv"),
        event((direct, 30.0), inside=event(name="aten::clone", inside=norm)),
        event((direct, 40.0), inside=event(name="aten::contiguous", inside=conv)),
        event((direct, 50.0), inside=event(name="aten::constant_pad_nd")),
        event((direct, 60.0), inside=event(name="aten::_to_copy", inside=norm)),
        event(("Memcpy DtoD", 70.0)),
        event(("RowwiseMoments", 80.0), name="aten::native_group_norm"),
    ]
    ms = (0.01, 0.02, 0.03, 0.04, 0.05)
    assert conversions_in(events) == tuple(Conversions(kind, 1, one) for kind, one in zip(KINDS, ms, strict=True))


def test_no_kernel_at_all_is_not_the_same_as_no_conversion() -> None:
    assert conversions_in([event(name="aten::conv2d")]) is None
    assert conversions_in([event(("gemm", 1.0), name="aten::mm")]) == tuple(Conversions(kind, 0, 0.0) for kind in KINDS)


@torch.no_grad()
def test_the_profilers_own_events_tell_where_a_copy_was_made() -> None:
    """The operators are torch's; the kernel is put under a copy by hand, for want of a GPU."""
    x = torch.randn(1, 8, 4, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        torch.nn.functional.group_norm(x.transpose(2, 3), 2)
    events: Any = recorded.events()
    copies = [one for one in events if one.name == "aten::copy_"]
    assert copies
    copies[0].append_kernel("direct_copy_kernel_cuda", 0, 5.0)
    found = {one.kind: (one.number, one.ms) for one in conversions_in(events) or () if one.number}
    assert found == {"copies in GroupNorm": (1, 0.005)}


def test_conversions_of_every_variant_are_counted_and_shown(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with numbers that the test makes up."""
    numbers = {"nchw": 7, "nhwc": 11, "fused": 0}

    def count(variant: Any, x: torch.Tensor) -> Any:
        assert x.shape == (1, 4, 6, 4)
        return tuple(Conversions(kind, numbers[variant.name], 0.25 * numbers[variant.name]) for kind in KINDS)

    found = vae_layout.measure(vae, "tiny", SIZE, what=("decode",), seconds=0.01)
    monkeypatch.setattr(vae_layout, "count_conversions", count)
    one = vae_layout._count(vae, found.passes[0], SIZE, 1)
    assert {name: rows[2] for name, rows in (one.conversions or {}).items()} == {
        name: Conversions("copies in GroupNorm", n, 0.25 * n) for name, n in numbers.items()
    }
    told = StringIO()
    print_layouts(replace(found, passes=(one,)), Console(file=told, width=120, color_system=None))
    (row,) = [line for line in told.getvalue().splitlines() if line.startswith("│ copies in GroupNorm")]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["7: 1.750", "11: 2.750", "–"]
    monkeypatch.setattr(vae_layout, "count_conversions", lambda *_: None)
    assert "the profiler saw no kernel" in vae_layout._count(vae, found.passes[0], SIZE, 1).unmeasured


# -- the check -------------------------------------------------------------------------------------------------------


def test_where_fp32_does_not_fit_nothing_is_judged(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_layout, "_in_fp32", lambda *_: None)
    (one,) = vae_layout.measure(vae.bfloat16(), "tiny", SIZE, what=("decode",), seconds=0.01).passes
    assert (one.check.reference, one.check.errors["nchw"]) == ("stock in NCHW", None)
    assert (one.check.limit, one.check.passed) == (None, None)
    assert one.check.sentence.startswith("not judged: fused differs from stock in NCHW by")
    assert one.speedup() is None
    assert sentences(one)[-1] == "The check was not judged, so no speeds are compared and nothing is chosen."


def test_no_memory(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(vae_layout, "time_all", full)
    with pytest.raises(DeviceMemoryError, match="cpu ran out of memory in decode at 32x48; give a smaller --size") as e:
        vae_layout.measure(vae, "tiny", SIZE, seconds=0.01)
    assert e.value.__context__ is None


def test_a_size_that_this_vae_cannot_have() -> None:
    vae = tiny_vae(
        down_block_types=("DownEncoderBlock2D",) * 6,
        up_block_types=("UpDecoderBlock2D",) * 6,
        block_out_channels=(4,) * 6,
    )
    with pytest.raises(ArgumentError, match="not a multiple of 32"):
        vae_layout.measure(vae, "tiny", Size(48, 64))


def test_a_vae_that_is_not_served() -> None:
    vae = tiny_vae(act_fn="relu")
    with pytest.raises(UnsupportedPipelineError, match="no fused encode for this VAE: activation ReLU"):
        vae_layout.measure(vae, "tiny", SIZE, what=("encode",))


# -- what is said ----------------------------------------------------------------------------------------------------


def a_pass(nchw: float, nhwc: float, fused: float, passed: bool | None = True, **more: Any) -> Pass:
    """One with two stages, the first of which takes a third; conversions at the ends take 0.5 ms."""
    slow = more.pop("host_bound", ())
    times = {}
    for name, ms in zip(VARIANTS, (nchw, nhwc, fused), strict=True):
        parts = tuple(Figure(one, one, one) for one in (0.5, ms / 3, 2 * ms / 3, 0.5))
        times[name] = Times(parts, Figure(ms, ms, ms), 3, name in slow)
    check = Check("stock in NCHW and fp32", {"nchw": 0.01, "nhwc": 0.01, "fused": 0.009}, 0.0105, passed)
    layouts = {"nchw": ("NCHW", "NCHW"), "nhwc": ("NHWC", "NHWC"), "fused": ("NHWC", "NHWC")}
    layouts |= more.pop("layouts", {})
    return Pass("decode", (1, 16, 8, 8), ("input", "a", "b", "picture"), times, check, layouts, **more)


def test_what_is_said_follows_from_the_numbers() -> None:
    one = a_pass(30.0, 45.0, 10.0)
    assert sentences(one) == [
        "NHWC with stock modules takes 1.50x the time of NCHW (45.0 ms against 30.0 ms).",
        "Fused is 3.00x as fast as stock in NCHW (10.0 ms against 30.0 ms) and is 4.50x as fast as stock in NHWC (10.0 "
        "ms against 45.0 ms), with 1.0 ms of conversions at both ends.",
        "Chosen: fused, the fastest in every stage; that is what accelerate() runs.",
    ]
    assert one.sum_ms("nchw") == 30.0
    assert one.sum_ms("fused") == 11.0
    assert one.speedup() == {"nhwc": 30 / 45, "fused": 3.0}
    assert sentences(a_pass(30.0, 30.5, 30.0))[0].startswith("NHWC with stock modules is as fast as NCHW")
    assert sentences(a_pass(30.0, 20.0, 30.0))[0].startswith("NHWC with stock modules is 1.50x as fast as NCHW")


def test_where_fused_is_slower_it_is_said() -> None:
    told = sentences(a_pass(30.0, 20.0, 40.0))
    assert told[1].startswith("Fused takes 1.33x the time of stock in NCHW")
    assert told[2] == (
        "Fastest: stock in NHWC in a, b; fused in none. accelerate() runs fused throughout; that mixture would save "
        "20.0 ms, less what it converts between its stages."
    )


def test_conversions_are_named_only_where_they_were_measured() -> None:
    def found(*numbers: int) -> tuple[Conversions, ...]:
        return tuple(Conversions(kind, n, 0.5 * n) for kind, n in zip(KINDS, numbers, strict=True))

    measured = {"nchw": found(3, 2, 0, 0, 1), "nhwc": found(0, 0, 4, 4, 0), "fused": found(0, 0, 0, 0, 0)}
    first = sentences(a_pass(30.0, 45.0, 10.0, conversions=measured))[0]
    assert first.endswith(
        "; conversions inside it: in NHWC 4 copies in GroupNorm in 2.0 ms, 4 copies in convolutions in 2.0 ms; in NCHW "
        "3 cuDNN, NCHW to NHWC in 1.5 ms, 2 cuDNN, NHWC to NCHW in 1.0 ms, 1 others in 0.5 ms."
    )


def test_a_layout_that_stock_does_not_keep_is_said() -> None:
    told = sentences(a_pass(30.0, 45.0, 10.0, layouts={"nchw": ("NCHW", "NHWC"), "nhwc": ("neither", "NCHW")}))
    assert told[:2] == [
        "Stock does not keep NCHW by itself: results of b do not lie in it.",
        "Stock does not keep NHWC by itself: results of a, b do not lie in it.",
    ]


def test_a_slow_host_is_said() -> None:
    told = sentences(a_pass(30.0, 45.0, 10.0, host_bound=("nchw", "fused")))
    assert told[-1].startswith("The host, not the GPU, sets the pace of stock in NCHW and fused here")


@pytest.mark.parametrize(("passed", "why"), [(False, "is red"), (None, "was not judged")])
def test_no_speed_beside_a_check_that_is_not_green(passed: bool | None, why: str) -> None:
    one = a_pass(30.0, 45.0, 10.0, passed)
    assert (one.speedup(), one.fastest()) == (None, None)
    assert sentences(one) == [f"The check {why}, so no speeds are compared and nothing is chosen."]


def test_nan_is_the_worst() -> None:
    assert math.isnan(vae_layout._worst(1.0, math.nan))
    assert vae_layout._worst(1.0, 2.0) == 2.0
