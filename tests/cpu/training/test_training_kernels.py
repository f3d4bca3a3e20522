"""The kernels that train the embedded models, without a GPU: values and gradients through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.scripts import once, run_script

pytest.importorskip("triton")
from support.training_kernels import CASES, Case, norm, results


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    script = Path(__file__).with_name("run_interpreted.py")
    return once(tmp_path_factory, "training", lambda: run_script(script, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_autograd(case: Case, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[case.name] == []


def test_what_is_compared_has_gradients_that_differ_from_zero() -> None:
    for case in CASES:
        value, *gradients = results(case, "cpu", torch.float32, kernels=False)
        assert value.norm() > 0
        assert "sums" in case.name or all(gradient.norm() > 0 for gradient in gradients), case.name


def test_a_residual_is_not_turned() -> None:
    x, turn = torch.randn(1, 4, 2, 8), (torch.ones(4, 4), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="residual and turn exclude each other"):
        norm.norm(x, torch.ones(1, 8), residual=x, turn=turn)


def test_only_powers_of_two_are_turned() -> None:
    with pytest.raises(ValueError, match="power of two, not 20"):
        norm.norm(torch.randn(1, 4, 2, 20), torch.ones(1, 20), turn=(torch.ones(4, 10), torch.zeros(4, 10)))
