"""Attention as two products: its kernels through the interpreter, and when the merged one serves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import once, run_script

from fusedit.ops import _attention_scores, _triton
from fusedit.ops._attention_scores import STEP

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    script = HERE / "run_attention_scores.py"
    return once(tmp_path_factory, "attention-scores", lambda: run_script(script, TRITON_INTERPRET="1"))


def cases(interpreted: dict[str, Any], part: str) -> dict[str, Any]:
    found = {name: made for name, made in interpreted.items() if part in name}
    assert len(found) >= 3, part
    return found


@pytest.mark.parametrize("kind", ["even", "large", "one-key", "rising"])
def test_weights_are_those_of_a_softmax(interpreted: dict[str, Any], kind: str) -> None:
    """In fp32: logits of several hundreds, which fp32 itself knows to some 1e-5, leave weights no better than that."""
    for name, made in cases(interpreted, f"/{kind}/").items():
        assert made["error"] < (2e-6 if kind in ("even", "one-key") else 1e-4), name
        assert made["most"] <= 2 ** (STEP / 2 + 0.1), name
        assert all(level == round(level) for level in made["levels"]), name
        assert made["outside"], f"{name}: wrote beside the weights"
        assert made["kept"], f"{name}: changed weights that were at the row's level"


def test_levels_are_the_same_where_logits_are_small(interpreted: dict[str, Any]) -> None:
    assert all(made["levels"] == [0.0] for made in cases(interpreted, "/even/").values())
    assert interpreted["scores/700/150/512/rising/float32"]["levels"] == [-2.0, -1.0, 0.0, 1.0, 2.0]
    assert len(interpreted["scores/700/150/512/large/float32"]["levels"]) > 4


def test_exponentials_of_rows_in_registers_and_of_longer_ones(interpreted: dict[str, Any]) -> None:
    for name, made in cases(interpreted, "exponentials/").items():
        assert made["error"] < 2e-6, name


def test_attention_by_either_way(interpreted: dict[str, Any]) -> None:
    for name, made in cases(interpreted, "whole/").items():
        assert made["error"] < 2e-6, name


def test_what_a_step_leaves_to_bf16() -> None:
    """The numbers behind STEP: nothing that counts becomes subnormal, nothing becomes infinite."""
    smallest, largest = (math.log2(x) for x in (torch.finfo(torch.bfloat16).tiny, torch.finfo(torch.bfloat16).max))
    assert smallest <= -STEP  # the factor
    assert STEP / 2 + math.log2(262144) + 49 < largest  # a sum of p v
    assert -STEP / 2 - smallest >= 66  # the largest weight of a row, over the smallest normal one
    assert -STEP / 2 - (STEP / 2 - 2 * STEP) >= 66  # and over one at two levels below


class Lying:
    """What `reason` asks of a tensor on a GPU."""

    def __init__(self, t: torch.Tensor) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda", 0), t.dtype, t.shape
        self.stride, self.data_ptr, self.element_size = t.stride, t.data_ptr, t.element_size


def test_when_the_merged_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(q: torch.Tensor, k: torch.Tensor, scale: float = 0.1) -> str:
        return _attention_scores.reason(Lying(q), Lying(k), scale)  # type: ignore[arg-type]

    monkeypatch.setattr(_triton, "capability", lambda _: (9, 0))
    x = torch.zeros(2, 10, 3, 4, 264, dtype=torch.bfloat16)
    assert reason(x[:, :, 0], x[:, :, 1]) == ""
    assert reason(x[:, :3, 0], x[:, :, 1]) == ""
    assert reason(x[:, :, 0].half(), x[:, :, 1].half()) == "needs the exponents of bfloat16, not float16"
    for q in (x[:, :, 0, :, 1:257], x[:, :, 0, :, ::2], x[:, :, 0, :, :260]):
        assert reason(q, q) == "needs rows on 16 bytes"
    for scale in (0.0, -1.0, math.nan):
        assert "a scale above 0 alone" in reason(x[:, :, 0], x[:, :, 1], scale)
    assert _attention_scores.reason(x[:, :, 0], x[:, :, 1], 0.1) == "no kernels for device type cpu"
    monkeypatch.setattr(_triton, "capability", lambda _: (10, 0))
    assert reason(x[:, :, 0], x[:, :, 1]) == "written for compute capability 9.0, not (10, 0)"
