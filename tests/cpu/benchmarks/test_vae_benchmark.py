"""`python -m benchmarks vae` from the command line to the file, on a tiny VAE."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipes import tiny_vae
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks import gpu, plans, vae, vae_floor, vae_plans
from benchmarks.__main__ import app
from benchmarks.floor import Attention, Product
from benchmarks.plans import Laid
from benchmarks.vae_floor import Conv, parts_of, step_of
from benchmarks.vae_plans import PARTS, VaeSideBySide, inputs, truth


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilation without a compiler: notes what was to be compiled."""
    asked: list[str] = []
    monkeypatch.setattr(vae_plans, "compile_in_place", lambda part: asked.append(type(part).__name__))
    monkeypatch.setattr(vae, "RUNS", 2)
    monkeypatch.setattr(vae, "WARM", 1)
    return asked


def run(tmp_path: Path, *line: str) -> tuple[list[dict[str, Any]], str]:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["vae", "--seconds", "0.01", "--json", str(path), *line])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())["rows"], result.stdout


def small(tmp_path: Path, *line: str) -> tuple[dict[str, dict[str, Any]], str]:
    """One decode: plan -> its row."""
    rows, said = run(tmp_path, "--what", "decode", "--size", "32x32", *line)
    return {row["plan"]: row for row in rows}, said


def test_rows_of_both_halves_and_every_plan(tmp_path: Path, compiled: list[str]) -> None:
    chosen = vae_plans.PLANS
    rows, said = run(tmp_path, "--size", "32x16,16x32", "--batch", "1,2", "--plans", ",".join(chosen))
    assert [(r["benchmark"], r["model"], r["size"], r["batch"], r["plan"]) for r in rows] == [
        (benchmark, "flux.1-dev", size, batch, plan)
        for benchmark in ("vae-decode", "vae-encode")
        for size in ("32x16", "16x32")
        for batch in (1, 2)
        for plan in (*chosen, "floor")
    ]
    for row in rows:
        assert "error" not in row, row
        assert row["spread"][0] <= row["ms"] <= row["spread"][1]
        assert row["floor_ms"] > 0
        assert row["launches"] == 84
        assert "not_counted" not in row
        if row["plan"] == "floor":
            assert (row["ms"], row["correct"], row["attention"]) == (row["floor_ms"], None, "two products")
            continue
        assert row["correct"] is (row["rel_error"] <= 1.05 * row["stock_rel_error"])
        assert row["reserved_bytes"] == row["peak_bytes"] + 1_000_000
        assert ("cold_s" in row) is (row["plan"] == "compile")
        assert ("first_step_s" in row) is (row["plan"] in ("channels_last", "exact"))
        if row["plan"] == "stock":
            assert row["rel_error"] == row["stock_rel_error"] > 0
    assert sorted(compiled) == ["Decoder"] * 8 + ["Encoder"] * 8  # four shapes, laid to measure and to count
    assert said.count("launches ") == len(rows)


def test_what_is_measured_without_sizes() -> None:
    assert [(f"{w}x{h}", n) for (w, h), n in vae.shapes(None, None)] == [
        ("1024x1024", 1),
        ("512x512", 1),
        ("2048x2048", 1),
        ("1024x1024", 4),
    ]
    assert vae.shapes("512x512,64x32", None) == [((512, 512), 1), ((64, 32), 1)]
    assert vae.shapes("64x32", "4,2") == [((64, 32), 4), ((64, 32), 2)]
    assert vae.shapes(None, "2") == [((1024, 1024), 2), ((512, 512), 2), ((2048, 2048), 2)]


def test_only_the_plans_that_were_asked_for(tmp_path: Path) -> None:
    rows, said = small(tmp_path, "--plans", "exact")
    assert list(rows) == ["exact", "floor"]
    assert rows["exact"]["stock_rel_error"] > 0
    assert "x\n" not in said  # no stock in this run, no ratio


def test_a_plan_that_does_not_fit_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay = VaeSideBySide.lay

    def full(self: VaeSideBySide, plan: str) -> Laid:
        if plan == "compile":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return lay(self, plan)

    monkeypatch.setattr(VaeSideBySide, "lay", full)
    rows, said = small(tmp_path)
    assert (rows["compile"]["error"], rows["compile"]["ms"]) == ("out of memory", None)
    assert "compile       out of memory" in said
    assert all(rows[plan]["ms"] > 0 for plan in ("stock", "exact", "floor"))


def test_a_floor_that_does_not_fit_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vae, "step_of", full)
    rows, _ = small(tmp_path)
    assert rows["floor"]["error"] == "out of memory"
    assert rows["exact"]["ms"] > 0
    assert rows["exact"]["floor_ms"] is None


def test_where_fp32_does_not_fit_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vae_plans, "_in_fp32", full)
    rows, said = small(tmp_path)
    for plan in ("stock", "compile", "exact"):
        row = rows[plan]
        assert (row["rel_error"], row["correct"], row["unchecked"]) == (None, None, "fp32: out of memory")
        assert row["ms"] > 0
        assert "of_floor" not in row
    assert "x\n" not in said


def test_where_stock_does_not_fit_its_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, lay = vae_plans.run, VaeSideBySide.lay

    def in_fp32_only(model: Any, what: str, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return once(model, what, x)

    def full(self: VaeSideBySide, plan: str) -> Laid:
        if plan == "stock":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lay(self, plan)

    monkeypatch.setattr(vae_plans, "run", in_fp32_only)  # what the truth calls
    monkeypatch.setattr(VaeSideBySide, "lay", full)
    rows, _ = small(tmp_path)
    assert rows["stock"]["error"] == "out of memory"
    for plan in ("compile", "exact"):
        assert rows[plan]["ms"] > 0
        assert rows[plan]["rel_error"] > 0
        assert (rows[plan]["correct"], rows[plan]["unchecked"]) == (None, "stock: out of memory")


def test_no_ratio_beside_a_red_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = plans.fusedit.accelerate

    def wrong(pipe: Any, plan: str) -> Any:
        handle = accelerate(pipe, plan)
        session = next(s for s in handle._sessions if s.model.path == ("vae", "decoder"))
        forward = session.model.forward
        session.model.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)  # type: ignore[method-assign]
        return handle

    monkeypatch.setattr(plans.fusedit, "accelerate", wrong)
    rows, said = small(tmp_path)
    row = rows["exact"]
    assert row["correct"] is False
    assert row["rel_error"] > 0.5
    assert row["ms"] > 0
    assert "of_floor" not in row
    line = next(line for line in said.splitlines() if " exact " in line)
    assert "RED" in line
    assert "of floor" not in line
    assert not line.rstrip().endswith("x")
    assert rows["stock"]["correct"] is True  # paused in the same process


def test_a_count_that_fails_keeps_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no profiler here\nat all")

    monkeypatch.setattr(vae.kernels, "of", broken)
    rows, _ = small(tmp_path)
    for row in rows.values():
        assert (row["launches"], row["not_counted"]) == (None, "RuntimeError: no profiler here")
        assert row["ms"] > 0


def test_memory_is_the_plans_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak 3,000,000 of which 1,000,000 were there before, of which the plan owns its weights and input; and what its
    graphs hold, here 600."""
    owned: dict[str, int] = {}
    own_bytes = Laid.own_bytes

    def note(self: Laid, arguments: dict[str, Any]) -> int:
        owned[self.plan] = own_bytes(self, arguments)
        return owned[self.plan]

    monkeypatch.setattr(Laid, "own_bytes", note)
    idle = itertools.cycle((100, 700))
    monkeypatch.setattr(gpu, "idle_in_graphs", lambda: next(idle))
    rows, _ = small(tmp_path)
    for plan, bytes_ in owned.items():
        assert rows[plan]["peak_bytes"] == 3_000_600 - (1_000_000 - bytes_)
    assert owned.keys() == {"stock", "compile", "exact"}
    assert len(set(owned.values())) == 1


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return truth(*args)

    monkeypatch.setattr(vae, "truth", interrupted)
    path = tmp_path / "rows.json"
    line = ["vae", "--what", "encode", "--size", "32x32", "--batch", "1,2", "--seconds", "0.01", "--json", str(path)]
    assert CliRunner().invoke(app, line).exit_code != 0
    assert [(row["batch"], row["plan"]) for row in json.loads(path.read_text())["rows"]] == [
        (1, plan) for plan in ("stock", "compile", "exact", "floor")
    ]


# -- plans and truth ------------------------------------------------------------------------------------------------


def test_each_plan_runs_what_it_is(compiled: list[str]) -> None:
    workload = vae_plans.workload()
    x = inputs(workload.pipe.vae, "decode", 32, 32, 2)
    alone = vae_plans.run(workload.pipe.vae, "decode", x)
    with VaeSideBySide(workload, "decode") as bench:
        laid = {plan: bench.lay(plan) for plan in vae_plans.PLANS}
        assert compiled == ["Decoder"]
        handle = bench.handles["exact"]
        assert handle is not None

        def fused() -> int:
            return sum(site.fused for site in handle.report().rewritten if site.site.startswith("vae."))

        for plan in ("stock", "channels_last", "compile"):
            with laid[plan].context():
                made = vae_plans.run(laid[plan].pipe.vae, "decode", x)
            assert torch.allclose(made.float(), alone.float(), atol=0.05), plan
            assert fused() == 0
        for plan in ("channels_last", "compile"):
            weight = laid[plan].pipe.vae.decoder.mid_block.resnets[0].conv1.weight
            assert weight.is_contiguous(memory_format=torch.channels_last)
        with laid["exact"].context():
            vae_plans.run(laid["exact"].pipe.vae, "decode", x)
        assert fused() > 0
    assert not handle.report().active
    assert torch.equal(vae_plans.run(workload.pipe.vae, "decode", x), alone)


@pytest.mark.parametrize("what", list(PARTS))
def test_the_truth_is_fp32_on_the_same_values(what: str) -> None:
    model = tiny_vae().bfloat16()
    x = inputs(model, what, 32, 16, 2)
    assert x.dtype == torch.bfloat16
    assert x.std() > 0.5
    assert torch.equal(x, inputs(model, what, 32, 16, 2))
    before = torch.backends.cudnn.conv.fp32_precision
    found = truth(model, what, x)
    assert torch.backends.cudnn.conv.fp32_precision == before
    exact = vae_plans.run(copy.deepcopy(model).float(), what, x.float())
    assert found.exact is not None
    assert torch.allclose(found.exact, exact, atol=1e-5)
    stock = vae_plans.run(model, what, x)
    assert found.stock_error == pytest.approx(float((stock.float() - exact).norm() / exact.norm()), rel=1e-3)
    assert 1e-4 < found.stock_error < 0.1
    assert model.dtype == torch.bfloat16


# -- the floor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", list(PARTS))
@pytest.mark.parametrize("batch", [1, 3])
def test_the_floor_counts_what_stock_computes(what: str, batch: int) -> None:
    model = tiny_vae(block_out_channels=(8, 16, 16, 24), layers_per_block=2)
    part = getattr(model, PARTS[what])
    x = inputs(model, what, 64, 48, batch).float()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        part(x)
    parts = parts_of(part, tuple(x.shape))
    folded = sum(p.flops for p in parts if isinstance(p, Conv) and p.taps == 2)
    assert (folded > 0) is (what == "decode")
    attention = [p for p in parts if isinstance(p, Attention)]
    assert attention == [Attention(batch, model.decoder.mid_block.attentions[0].heads, 48, 24)]
    assert sum(isinstance(p, Product) for p in parts) == 2
    # torch counts no attention on a CPU, and all nine products of a pixel where four are left
    counted = sum(p.flops for p in parts) - attention[0].flops + folded * 5 // 4
    assert counted == counter.get_total_flops()
    step_of(parts)()


def test_four_small_convolutions_are_one_after_a_doubling() -> None:
    """2x2 on a picture with a row and a column more gives as many pixels as the picture before the doubling has."""
    model = tiny_vae()
    doubled = [p for p in parts_of(model.decoder, (1, 4, 6, 8)) if isinstance(p, Conv) and p.taps == 2]
    assert [(p.height, p.width) for p in doubled] == [(7, 9)] * 4 + [(13, 17)] * 4 + [(25, 33)] * 4
    for part in doubled:
        assert vae_floor._convolution(part)().shape[2:] == (part.height - 1, part.width - 1)


def test_products_of_attention_go_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    random = vae_floor._random

    def kept(*shape: int) -> torch.Tensor:
        made.append(random(*shape))
        return made[-1]

    monkeypatch.setattr(vae_floor, "_random", kept)
    monkeypatch.setattr(vae_floor, "LOGITS", 40)  # four rows of ten at a time
    y = vae_floor._two_products(Attention(2, 1, 10, 4))()
    q, k, v, logits = made
    assert logits.shape == (4, 10)
    assert torch.allclose(y, q @ k.transpose(1, 2) @ v, rtol=0.05, atol=0.3)


# -- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--size", "1000x"), "size '1000x' is not WIDTHxHEIGHT"),
        (("--size", "1000x1000"), "a side of 1000; sides are multiples of 16"),
        (("--plans", "foo"), "unknown plan 'foo'; known: stock, channels_last, compile, exact"),
        (("--what", "x"), "unknown --what 'x'; known: decode, encode"),
        (("--batch", "0"), "batch '0' is not a whole number from 1 to 64"),
        (("--seconds", "nan"), "give a number above 0 and up to 600"),
    ],
)
def test_wrong_use(line: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["vae", *line])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("benchmarks: ")
    assert said in result.stderr
