"""`python -m benchmarks convolutions`: rows of every plan, errors, verdicts; stand-ins for ops of other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from benchmarks import convolutions, gpu
from benchmarks.__main__ import app
from benchmarks.convolutions import BESIDE_A_RESIDUAL, PLANS, Layer, layers, measure
from benchmarks.ops import Timed
from fusedit.ops import _conv

SMALL = (_conv.Layer(4, 8, 3, 8), _conv.Layer(8, 4, 1, 4), _conv.Layer(8, 8, 3, 4))


def stand_ins(monkeypatch: pytest.MonkeyPatch, wrong: float = 1.0, registry: Any = None) -> list[str]:
    """Ops that compute what they should, times `wrong` in winograd-4; notes who was called with which tile."""
    called: list[str] = []

    def conv(x: Any, weight: Any, bias: Any, residual: Any, activation: str, algorithm: str) -> torch.Tensor:
        called.append(f"{algorithm}{'' if residual is None else '+residual'}")
        assert activation == "none"
        y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
        return y if residual is None else y + residual

    def winograd(x: Any, u: Any, bias: Any, residual: Any, activation: str) -> torch.Tensor:
        weight, tile = u
        called.append(f"winograd-{tile}")
        assert (residual, activation) == (None, "none")
        return F.conv2d(x, weight, bias, padding=1) * (wrong if tile == 4 else 1.0)

    found = {
        "conv2d": conv,
        "winograd_weight": lambda weight, tile: (weight, tile),
        "winograd_conv2d": winograd,
    }
    monkeypatch.setattr(convolutions.ops, "registry", lambda: found if registry is None else registry)
    return called


def run(tmp_path: Path, *line: str) -> tuple[list[dict[str, Any]], str]:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["convolutions", "--seconds", "0.001", "--json", str(path), *line])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())["rows"], result.stdout


def test_rows_of_every_layer_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = stand_ins(monkeypatch)
    monkeypatch.setattr(_conv, "VAE", SMALL)
    rows, said = run(tmp_path, "--size", "64x48")
    places = [(r["benchmark"], r["model"], r["size"], r["batch"], r["plan"]) for r in rows]
    assert places == [
        *(("convolutions", "4->8 3x3", "8x6", 1, plan) for plan in PLANS),
        *(("convolutions", "8->4 1x1", "16x12", 1, plan) for plan in PLANS[:4]),
        *(("convolutions", "8->8 3x3", "16x12", 1, plan) for plan in (*PLANS, *BESIDE_A_RESIDUAL)),
    ]
    for row in rows:
        assert "error" not in row, row
        assert row["spread"][0] <= row["ms"] <= row["spread"][1]
        assert row["correct"] is True
        assert 1e-4 < row["rel_error"] < 0.01
        flops = {"4->8 3x3": 8 * 6 * 4 * 8 * 9, "8->4 1x1": 16 * 12 * 8 * 4, "8->8 3x3": 16 * 12 * 8 * 8 * 9}
        assert row["flops"] == 2 * flops[row["model"]]
        assert row["tflop_s"] == pytest.approx(row["flops"] / row["ms"] / 1e9, abs=1e-3)
    by = {(row["model"], row["plan"]): row for row in rows}
    for (model, _plan), row in by.items():
        assert row["stock_rel_error"] == by[model, "cudnn"]["rel_error"]
    assert {"library", "own", "own+residual", "library+residual", "winograd-2", "winograd-4"} == set(called)
    assert len(said.splitlines()) == len(rows)


def test_every_layer_of_the_vae_once_a_picture() -> None:
    found = layers([(512, 512), (1024, 1024)])
    assert len(set(found)) == len(found) < 2 * len(_conv.VAE)
    assert Layer(512, 512, 3, 64, 64) in found
    assert Layer(3, 128, 3, 1024, 1024) in found
    assert layers([(1024, 512)])[0] == Layer(16, 512, 3, 128, 64)
    assert {(layer.C, layer.K, layer.R) for layer in found} == {(layer.C, layer.K, layer.R) for layer in _conv.VAE}


def test_results_are_about_1() -> None:
    a = convolutions.arguments(Layer(32, 16, 3, 20, 10))
    assert a.bias is not None
    assert (a.x.shape, a.weight.shape, a.bias.shape) == ((1, 32, 10, 20), (16, 32, 3, 3), (16,))
    assert a.residual is None
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (a.x, a.weight))
    assert 0.7 < float(F.conv2d(a.x.float(), a.weight.float()).std()) < 1.3


def test_an_op_that_is_not_there_has_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(monkeypatch, registry={})
    rows = {row.plan: row for row in measure(Layer(4, 8, 3, 8, 6), 1e-3)}
    assert rows["own"].error == "no such op: conv2d"
    assert rows["winograd-2"].error == rows["winograd-4"].error == "no such op: winograd_conv2d"
    for plan in ("cudnn", "cudnn+bias"):
        assert (rows[plan].error, rows[plan].correct) == (None, True)
        assert rows[plan].ms is not None
    convolutions.show(list(rows.values()))
    assert "winograd-4       no such op: winograd_conv2d" in capsys.readouterr().out


def test_a_wrong_op_is_red_and_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(monkeypatch, wrong=1.01)
    rows = {row.plan: row for row in measure(Layer(4, 8, 3, 8, 6), 1e-3)}
    assert (rows["winograd-2"].correct, rows["winograd-4"].correct) == (True, False)
    assert rows["winograd-4"].faster_than(rows["cudnn+bias"]) is None
    convolutions.show(list(rows.values()))
    said = capsys.readouterr().out.splitlines()
    assert "RED: cuDNN's error is" in said[-1]
    assert not said[-1].endswith("x")
    assert said[-2].endswith("x")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_red(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    stand_ins(monkeypatch, wrong=wrong)
    assert measure(Layer(4, 8, 3, 8, 6), 1e-3)[-1].correct is False


def test_a_plan_that_cannot_be_captured_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    in_turn = convolutions.in_turn

    def full(runs: dict[str, Timed], seconds: float) -> Any:
        if list(runs) == ["own"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return in_turn(runs, seconds)

    monkeypatch.setattr(convolutions, "in_turn", full)
    rows = {row.plan: row for row in measure(Layer(4, 8, 3, 8, 6), 1e-3)}
    assert (rows["own"].error, rows["own"].ms) == ("out of memory", None)
    assert all(row.ms is not None for plan, row in rows.items() if plan != "own")


def test_arguments_that_do_not_fit_are_every_rows_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(convolutions, "arguments", full)
    assert [row.error for row in measure(Layer(4, 8, 1, 8, 6), 1e-3)] == ["out of memory"] * 4


def test_arguments_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = convolutions._sets(Layer(4, 8, 3, 8, 6))
    each = sets[0].x.nbytes + sets[0].weight.nbytes
    assert len(sets) == max(2, -(-4 * gpu.l2_bytes() // each))
    assert len({a.x.data_ptr() for a in sets}) == len({a.weight.data_ptr() for a in sets}) == len(sets)
    assert not torch.equal(sets[0].x, sets[1].x)
    stand_ins(monkeypatch)
    runs: dict[str, Timed] = {}
    monkeypatch.setattr(convolutions, "FASTEST", 1.0)
    convolutions._try("cudnn", sets, Layer(4, 8, 3, 8, 6), runs)
    assert runs["cudnn"].calls == len(sets)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--size", "1000x"), "size '1000x' is not WIDTHxHEIGHT"),
        (("--size", ""), "size is ''; give at least one size"),
        (("--seconds", "0"), "give a number above 0 and up to 600"),
    ],
)
def test_wrong_use(line: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["convolutions", *line])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr
