"""The kernels that train the embedded models, on a GPU: values and gradients in both dtypes of the training."""

from __future__ import annotations

import pytest
import torch
from support.training_kernels import CASES, Case, wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_autograd(case: Case, dtype: torch.dtype) -> None:
    assert wrong(case, "cuda", dtype) == []
