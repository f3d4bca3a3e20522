"""Doubling and convolution as one op: the identities behind it, in fp64."""

from __future__ import annotations

import pytest
import torch
from support.pipes import relative
from torch import nn

from fusedit.ops.upsample_conv2d import plain, reference, transposed


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 5, 4, 3), (1, 2, 33, 36)], ids=str)
def test_transposed_convolution_equals_doubling_and_convolution(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).double()
    weight = torch.randn(4, shape[1], 3, 3, generator=generator).double()
    bias = torch.randn(4, generator=generator).double()
    doubled = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
    stock = nn.functional.conv2d(doubled, weight, bias, padding=1)
    assert relative(reference(x, weight, bias), stock) < 1e-14
    assert relative(plain(x, weight, bias), stock) < 1e-14
    folded = nn.functional.conv_transpose2d(x, transposed(weight), bias, stride=2, padding=1)
    assert relative(folded, stock) < 1e-14
