"""Layouts: every way in every layout, held against fp32; and the kernel that reads pixels or tiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.scripts import run_script
from typer.testing import CliRunner

from benchmarks import gpu, layouts, packed_conv
from benchmarks.__main__ import app
from benchmarks.layouts import Arguments, Shape, measure
from benchmarks.ops import Timed
from benchmarks.reading import read
from fusedit import ops
from fusedit.ops import _conv

HERE = Path(__file__).parent
SHAPE = Shape(64, 8, 16)


def convolve(x: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], step: int, wrong: float = 1.0) -> Any:
    """What the kernel computes, by torch."""
    assert step == x.shape[-1] if x.ndim == 7 else x.is_contiguous(memory_format=torch.channels_last)
    whole = ops.unpack_tiles.plain(x, *shape[1:]) if x.ndim == 7 else x
    R = 3 if len(weight) == 9 else 1
    square = weight.unflatten(0, (R, R)).permute(2, 3, 0, 1)
    return wrong * F.conv2d(whole, square, padding=R // 2)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_conv, "convolve", convolve)
    monkeypatch.setattr(layouts, "MOST_CALLS", 3)


@pytest.mark.parametrize("model", list(layouts.WAYS))
def test_every_way_is_measured_and_right(model: str) -> None:
    rows = measure(SHAPE, model, 1e-3)
    assert [(row.plan, row.variant) for row in rows] == list(layouts.WAYS[model])
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.error is None
        assert (row.benchmark, row.model, row.size, row.correct) == ("layouts", model, "64@16x8", True)
        assert row.ms is not None
        assert row.spread is not None
        assert row.spread[0] <= row.ms <= row.spread[1]
        assert row.stock_rel_error == rows[0].rel_error
        assert row.rel_error == 0 if model in layouts.CONVERSIONS else 1e-4 < (row.rel_error or 0) < 0.01
        assert ("tb_s" in row.more) is (model not in layouts.CONVOLUTIONS)


def test_rates_are_what_has_to_be_moved_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "in_turn", lambda runs, _seconds: {name: [0.5, 0.5] for name in runs})
    size = 2 * 64 * 8 * 16
    for model, moved in (("nchw to nhwc", 2 * size), ("tiles to nhwc", 2 * size), (layouts.NORM, 3 * size + 256)):
        for row in measure(SHAPE, model, 1.0):
            assert (row.ms, row.more["bytes"], row.more["tb_s"]) == (0.5, moved, round(moved / 0.5e9, 3))
    for model, taps in (("conv 3x3", 9), ("conv 1x1", 1)):
        for row in measure(SHAPE, model, 1.0):
            flops = 2 * taps * 64 * 64 * 8 * 16
            assert (row.more["flops"], row.more["tflop_s"]) == (flops, round(flops / 0.5e9, 3))
    half = Shape(64, 4, 16)  # tiles are half empty
    assert layouts.cost("nhwc to tiles", "tiles-32", Arguments(half)).bytes == size // 2 + size
    assert layouts.cost("tiles to nhwc", "tiles-32", Arguments(half)).bytes == size


def test_arguments_lie_as_the_layout_says() -> None:
    a = Arguments(Shape(32, 9, 17), taps=3)
    assert a.lying("nchw").is_contiguous()
    assert a.lying("nhwc").is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(a.lying("nchw"), a.lying("nhwc"))
    for channels in (32, 64):
        t = a.lying(f"tiles-{channels}")
        assert t is a.lying(f"tiles-{channels}")
        assert t.shape == (1, 2, 3, 1, 8, 8, channels)
        assert torch.equal(ops.unpack_tiles(t, 32, 9, 17), a.lying("nchw"))
    assert 0.7 < float(layouts.truth("conv 3x3", a).std()) < 1.3


def test_the_fused_way_is_the_op_and_torchs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def noting(op: Any, args: tuple[Any, ...], *_: Any) -> Any:
        called.append(op.name)
        return op.plain(*args)

    for name in ("nchw_to_nhwc", "nhwc_to_nchw", "pack_tiles", "unpack_tiles", "group_norm_silu"):
        op = ops.registry()[name]
        monkeypatch.setattr(op, "_guarded", partial(noting, op))
    a, expected = Arguments(SHAPE), []
    used = ("nchw_to_nhwc", "nhwc_to_nchw", "pack_tiles", "pack_tiles", "unpack_tiles", "group_norm_silu")
    for (model, ways), name in zip(layouts.WAYS.items(), used, strict=False):
        for plan, variant in ways:
            layouts.prepare(model, plan, variant, a)()
            expected += [name] if variant == "fused" else []
    assert called == expected


def test_shapes_are_the_vaes_each_once() -> None:
    made = layouts.shapes([(1024, 1024), (2048, 1024)])
    assert made[:4] == [(128, 1024, 1024), (256, 512, 512), (512, 256, 256), (512, 128, 128)]
    assert made[4:] == [(128, 1024, 2048), (256, 512, 1024), (512, 256, 512), (512, 128, 256)]
    assert len(layouts.shapes([(1024, 1024), (2048, 2048)])) == 7
    for C, scale in layouts.SHAPES:
        assert _conv.Layer(C, C, 3, scale) in _conv.VAE
        assert all(C % step == 0 for step in packed_conv.STEPS)


def test_what_is_wrong_is_red_and_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_conv, "convolve", partial(convolve, wrong=1.01))
    rows = measure(SHAPE, "conv 3x3", 1e-3)
    assert [row.correct for row in rows] == [True, True, False, False, False, False]
    layouts.show(rows)
    said = capsys.readouterr().out.splitlines()
    assert said[1].endswith("x")
    assert all("RED: error" in line and not line.endswith("x") for line in said[2:])
    monkeypatch.setattr(ops.nchw_to_nhwc, "_guarded", lambda args, *_: torch.full_like(args[0], float("nan")))
    assert [row.correct for row in measure(SHAPE, "nchw to nhwc", 1e-3)] == [True, False]


def test_a_way_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_turn = layouts.in_turn

    def full(runs: dict[str, Timed], seconds: float) -> Any:
        if list(runs) == ["tiles-64 own-64"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return in_turn(runs, seconds)

    def broken(x: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], step: int) -> Any:
        if step == 32:
            raise RuntimeError("no such instruction\nlong trace")
        return convolve(x, weight, shape, step)

    monkeypatch.setattr(layouts, "in_turn", full)
    monkeypatch.setattr(packed_conv, "convolve", broken)
    rows = {(row.plan, row.variant): row for row in measure(SHAPE, "conv 1x1", 1e-3)}
    assert rows["tiles-64", "own-64"].error == "out of memory"
    for plan in ("nhwc", "tiles-32"):
        assert rows[plan, "own-32"].error == "RuntimeError: no such instruction"
    for way in (("nchw", "torch"), ("nhwc", "torch"), ("nhwc", "own-64")):
        assert rows[way].error is None
        assert rows[way].ms is not None
    layouts.show(list(rows.values()))
    assert capsys.readouterr().out.splitlines()[-1].endswith("out of memory")


def test_arguments_that_do_not_fit_give_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layouts, "Arguments", full)
    assert {row.error for row in measure(SHAPE, "conv 3x3", 1e-3)} == {"out of memory"}


def test_the_file_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SHAPES", ((64, 2), (64, 4)))
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["layouts", "--size", "32x32", "--seconds", "0.001", "--json", str(path)])
    assert result.exit_code == 0, result.output
    (run,) = read([path])
    each = [(model, *way) for model, ways in layouts.WAYS.items() for way in ways]
    assert [(r.model, r.plan, r.variant) for r in run.rows] == each * 2
    assert [r.size for r in run.rows] == ["64@16x16"] * len(each) + ["64@8x8"] * len(each)
    assert all(r.error is None and r.correct for r in run.rows)
    assert len(result.output.splitlines()) == 2 * len(each)
    assert json.loads(path.read_text())["rows"][0]["benchmark"] == "layouts"


def test_wrong_use_is_found_before_a_gpu_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: False)
    for line, said in (
        (["--size", "1000x1000"], "a side of 1000"),
        (["--seconds", "0"], "give a number above 0"),
        (["--json", str(tmp_path / "rows.txt")], "does not end in .json"),
        ([], "the layouts benchmark needs a CUDA GPU and none is visible"),
    ):
        result = CliRunner().invoke(app, ["layouts", *line])
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr


# -- the kernel ----------------------------------------------------------------------------------------------------


def test_the_kernel_is_right_and_the_layout_changes_no_bit() -> None:
    pytest.importorskip("triton")
    found = run_script(HERE / "run_packed_conv.py", TRITON_INTERPRET="1")
    assert len(found) == 3 * 2 * 2 * 3
    for name, value in found.items():
        assert value == 0 if name.endswith("difference") else value < 4e-4, name


def test_the_kernel_refuses_what_it_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for C, K, step in ((48, 8, 32), (32, 12, 32), (32, 8, 64)):
        x = torch.zeros(1, C, 8, 8)
        with pytest.raises(ValueError, match="no multiple of"):
            packed_conv.convolve(x, packed_conv.pack_weight(torch.zeros(K, C, 3, 3)), x.shape, step)


def test_the_kernel_loads_whole_vectors_in_either_layout(tmp_path: Path) -> None:
    """Else the layouts would not be compared, but how well the compiler understood their addresses."""
    pytest.importorskip("triton")
    found = run_script(HERE / "run_packed_conv_compiled.py", TRITON_CACHE_DIR=str(tmp_path))
    assert set(found) == {build.name for build in packed_conv.builds()}
    for name, made in found.items():
        assert made["stack"] == 0, name
        assert made["registers"] <= 128, name  # two programs of 256 threads a multiprocessor
        assert made["shared"] <= 113 * 1024, name
        assert made["accesses"], name
        assert all(".v4." in access for access in made["accesses"]), name
        assert made["copies"] == made["wide_copies"] > 0, name
        assert made["products"] > 0, name
    assert {name.replace("nhwc", "tiles") for name in found} == {name for name in found if "tiles" in name}
