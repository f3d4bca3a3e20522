"""8-bit attention without its chip: codes by the interpreter, the arithmetic in plain torch, who serves what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.ops import _attention_fp8, _attention_fp8_plain
from fusedit.ops._attention_fp8 import Variant
from fusedit.ops._attention_fp8_weights import EXACT, LINEAR, QUADRATIC
from fusedit.ops._verify import error

HERE = Path(__file__).parent
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2] / "src"), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(HERE / "run_attention_fp8.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("code", ["e4m3", "int8"])
@pytest.mark.parametrize("sizes", ["128/256/float16", "150/203/float16", "3/2/float32"])
def test_codes_of_the_kernel(interpreted: dict[str, Any], sizes: str, code: str) -> None:
    found = interpreted[f"{sizes}/{code}"]
    for name in ("q8", "k8", "v8"):  # a mean summed in another order moves a value over the middle of two codes at most
        assert found[name] == [pytest.approx(1.0, abs=1e-3), True], name
    for name in ("q_scale", "scales", "mean"):
        assert found[name] == [pytest.approx(0.0, abs=1e-5), True], name


def test_what_is_not_finite_makes_its_scale_nan(interpreted: dict[str, Any]) -> None:
    assert interpreted["not finite/q"] == {"rows": [[2, 140]], "blocks": []}
    assert interpreted["not finite/k"] == {"rows": [], "blocks": [[2, 1, 0]]}
    assert interpreted["not finite/v"] == {"rows": [], "blocks": [[2, 1, 1]]}


def test_order_of_keys_is_that_of_the_operand() -> None:
    """Lane c has columns 2c, 2c + 1, 2c + 8, 2c + 9 of an accumulator, and 4c to 4c + 3 of an operand."""
    lanes = _attention_fp8.order().view(4, 4).tolist()
    assert lanes == [[2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9] for c in range(4)]


def inputs(kind: str) -> list[Tensor]:
    x = torch.randn(1, 400, 3, 2, 128, generator=torch.Generator().manual_seed(1))
    if kind == "outlier":
        x[:, :, 1:] += torch.randn(2, 2, 128, generator=torch.Generator().manual_seed(2)) * 2
        x[:, :, :2, :, 7] *= 8
    return list(x.bfloat16().unbind(2))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "int8", "left", "right", "limit"),
    [
        ("gaussian", True, EXACT, EXACT, 0.045),
        ("gaussian", True, LINEAR, LINEAR, 0.049),
        ("gaussian", True, EXACT, QUADRATIC, 0.045),
        ("gaussian", False, EXACT, LINEAR, 0.061),
        ("outlier", True, LINEAR, LINEAR, 0.012),
        ("outlier", False, QUADRATIC, QUADRATIC, 0.047),
    ],
)
def test_error_of_each_variant(kind: str, int8: bool, left: int, right: int, limit: float) -> None:
    q, k, v = inputs(kind)
    o = torch.empty(q.shape)
    made = _attention_fp8_plain.quantise(q, k, v, 128**-0.5, int8=int8)
    _attention_fp8_plain.attend(made, k.shape[1], o, Variant(int8, left, right))
    truth = ops.attention.reference(q.double(), k.double(), v.double())
    assert limit / 2 < error(o, truth).relative_l2 < limit


@torch.no_grad()
def test_a_constant_in_all_keys_or_values_costs_nothing() -> None:
    q, k, v = inputs("gaussian")
    before = error(ops.attention_fp8(q, k, v), ops.attention.reference(*(t.double() for t in (q, k, v))))
    k, v = (k.float() + 30).bfloat16(), (v.float() + 4).bfloat16()
    truth = ops.attention.reference(*(t.double() for t in (q, k, v)))
    after = float((ops.attention_fp8(q.float(), k.float(), v.float()) - truth).norm() / (truth - 4).norm())
    assert after < 3 * before.relative_l2  # k and v themselves have lost bits


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_shows(place: int) -> None:
    x = inputs("gaussian")
    x[place][0, 3, 1, 9] = float("nan")
    o = ops.attention_fp8(*x)
    assert o[0, :, 0].isfinite().all()
    assert o[0, 3, 1].isnan().all()
    assert bool(o[0, 4:, 1].isnan().all()) == (place > 0)


@torch.no_grad()
def test_huge_logits_choose_one_key() -> None:
    q, k, v = inputs("gaussian")
    q = q * 1e4
    o = ops.attention_fp8(q, k, v)
    # Of two keys whose logits are nearly alike, codes of three bits may choose the other one.
    assert error(o, ops.attention.reference(q.double(), k.double(), v.double())).relative_l2 < 0.6
    assert o.isfinite().all()


@torch.no_grad()
def test_who_serves_and_why() -> None:
    q, k, v = inputs("gaussian")
    mask = torch.ones(1, 400, dtype=torch.bool)
    mask[:, 300:] = False
    assert ops.attention_fp8.backend(q, k, v) == ("plain", "no kernels for device type cpu")
    assert ops.attention_fp8.backend(q, k, v, mask) == ("attention", "takes no mask")
    assert torch.equal(ops.attention_fp8(q, k, v, mask), ops.attention(q, k, v, mask))
    assert torch.equal(ops.attention_fp8(q, k[:, :0], v[:, :0]), torch.zeros_like(q))
