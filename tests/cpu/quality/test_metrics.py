from __future__ import annotations

import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from fusedit.errors import ArgumentError, MissingExtraError
from fusedit.quality import maps, metrics

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.random((32, 48, 3), dtype=np.float32)


def test_identical_pictures() -> None:
    found = metrics.measure(PICTURE, PICTURE.copy())
    assert math.isinf(found.psnr_db)
    assert found.ssim == pytest.approx(1.0)
    assert found.max_abs_diff == 0.0
    assert found.flip == 0.0


def test_psnr_is_ten_log_of_one_by_the_mean_square() -> None:
    other = PICTURE.copy()
    other[3, 5, 1] = PICTURE[3, 5, 1] - 0.25
    found = metrics.measure(PICTURE, other, flip=False)
    difference = float(PICTURE[3, 5, 1]) - float(other[3, 5, 1])
    assert found.psnr_db == pytest.approx(10 * math.log10(PICTURE.size / difference**2))
    assert found.max_abs_diff == pytest.approx(difference)
    assert found.flip is None


def test_psnr_stays_exact_where_fp32_would_not() -> None:
    other = PICTURE + np.float32(1e-6)
    expected = 10 * math.log10(1 / np.mean((other.astype(np.float64) - PICTURE) ** 2))
    assert metrics.psnr(PICTURE, other) == pytest.approx(expected, abs=1e-3)


def test_ssim_and_flip_notice_structure() -> None:
    shuffled = RANDOM.permutation(PICTURE.reshape(-1, 3)).reshape(PICTURE.shape)
    found = metrics.measure(PICTURE, shuffled)
    assert found.ssim < 0.5
    assert found.flip is not None
    assert found.flip > 0.1
    assert found.flip_map is not None
    assert found.flip_map.shape == (32, 48)


def test_sizes_are_never_reconciled() -> None:
    with pytest.raises(ArgumentError):
        metrics.measure(PICTURE, PICTURE[:16])


def test_flip_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flip_evaluator", None)
    assert metrics.measure(PICTURE, PICTURE).flip is None
    with pytest.raises(MissingExtraError, match="fusedit\\[fidelity\\]"):
        metrics.measure(PICTURE, PICTURE, flip=True)


def test_flip_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    # VER-01: an optional package that is installed but broken is left out, and named when it is asked for.
    broken = ModuleType("flip_evaluator")
    broken.__spec__ = pytest.importorskip("flip_evaluator").__spec__
    monkeypatch.setitem(sys.modules, "flip_evaluator", broken)
    assert metrics.measure(PICTURE, PICTURE).flip is None
    with pytest.raises(MissingExtraError):
        metrics.measure(PICTURE, PICTURE, flip=True)


def test_relative_l2() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert metrics.relative_l2(reference, reference) == 0.0
    assert metrics.relative_l2(reference, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert metrics.relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert math.isinf(metrics.relative_l2(torch.zeros(2), torch.ones(2)))


@pytest.mark.parametrize(("largest", "factor"), [(1.0, 1), (0.5, 2), (0.09, 10), (0.03, 20), (1.9e-5, 50000)])
def test_the_factor_of_a_difference_map_clips_nothing(largest: float, factor: int) -> None:
    other = PICTURE.copy()
    other[0, 0] = 0.0
    reference = other.copy()
    reference[0, 0, 2] = largest
    pixels, found = maps.difference_map(reference, other)
    assert found == factor
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert pixels[0, 0].sum() > pixels[1, 1].sum()


def test_the_map_of_identical_pictures_is_dark() -> None:
    pixels, factor = maps.difference_map(PICTURE, PICTURE)
    assert factor == 1
    assert pixels.max() < 0.02
