from __future__ import annotations

import math
from typing import Any

import pytest

from fusedit.errors import ArgumentError
from fusedit.quality.gates import Gates, allowance, judge
from fusedit.quality.guilty import find_guilty
from fusedit.quality.result import Failure, Pair
from fusedit.validation import Size

SIZE = Size(64, 48)


def pair(psnr: float | None = 100.0, ssim: float | None = 1.0, **more: Any) -> Pair:
    return Pair("p", 0, more.pop("size", SIZE), psnr_db=psnr, ssim=ssim, **more)


def test_the_rule_of_the_exact_tier() -> None:
    assert (Gates.of("fp32").min_psnr, Gates.of("bf16").min_psnr) == (80.0, 45.0)
    assert Gates.of("bf16").min_ssim == 0.98
    assert Gates.of("fp32", min_psnr=45).min_psnr == 45.0


def test_the_worst_pair_decides_unless_told_median() -> None:
    pairs = [pair(90.0), pair(95.0), pair(79.0)]
    assert not judge(pairs, Gates.of("fp32"), SIZE).passed
    assert judge(pairs, Gates.of("fp32", on="median"), SIZE).passed


def test_identical_pictures_pass_even_an_infinite_gate() -> None:
    assert judge([pair(math.inf)], Gates.of("fp32", min_psnr=math.inf), SIZE).passed
    assert not judge([pair(200.0)], Gates.of("fp32", min_psnr=math.inf), SIZE).passed


def test_a_failed_picture_is_never_averaged_away() -> None:
    failed = pair(None, None, failures=(Failure("fused", "latents", 2, "fused, seed 0: NaN after step 3"),))
    verdict = judge([pair(), pair(), pair(), failed], Gates.of("fp32", on="median"), SIZE)
    assert not verdict.passed
    assert verdict.reasons == ("fused, seed 0: NaN after step 3",)


def test_a_wrong_size_is_a_verdict_of_its_own() -> None:
    verdict = judge([pair(), pair(None, None, size=Size(64, 64))], Gates.of("fp32"), SIZE)
    assert not verdict.passed
    assert "64x64, not 64x48" in verdict.reasons[0]


def test_nothing_measured_is_no_pass() -> None:
    assert not judge([pair(None, None)], Gates.of("fp32"), SIZE).passed


def yardstick(stock: list[float], fused: list[float]) -> list[Pair]:
    return [pair(30.0, 0.9, stock_fp32_db=a, fused_fp32_db=b) for a, b in zip(stock, fused, strict=True)]


def test_with_the_fp32_reference_stocks_own_error_is_the_yardstick() -> None:
    gates = Gates.of("bf16", fp32_reference=True)
    stock = [40.0 + index % 5 for index in range(20)]
    assert judge(yardstick(stock, [value - 0.1 for value in stock]), gates, SIZE).passed
    assert not judge(yardstick(stock, [value - 0.3 for value in stock]), gates, SIZE).passed
    assert judge(yardstick(stock, [value + 9 for value in stock]), gates, SIZE).passed


def test_each_picture_is_held_against_its_own_yardstick() -> None:
    gates = Gates.of("bf16", fp32_reference=True)
    stock = [20.0 + index for index in range(21)]
    better_but_for_the_middle = [value + 3 for value in stock]
    better_but_for_the_middle[10] = stock[10]
    assert judge(yardstick(stock, better_but_for_the_middle), gates, SIZE).passed
    worse_but_for_the_extremes = [value - 0.3 if 2 < index < 18 else value + 20 for index, value in enumerate(stock)]
    assert not judge(yardstick(stock, worse_but_for_the_extremes), gates, SIZE).passed


def test_identical_to_the_reference_is_no_loss() -> None:
    gates = Gates.of("bf16", fp32_reference=True)
    stock = [40.0] * 11 + [math.inf] * 10
    assert judge(yardstick(stock, stock), gates, SIZE).passed
    assert not judge(yardstick([math.inf] * 21, [50.0] * 21), gates, SIZE).passed


def test_explicit_gates_replace_the_yardstick() -> None:
    stock = [40.0] * 20
    assert not judge(yardstick(stock, stock), Gates.of("bf16", min_psnr=45, fp32_reference=True), SIZE).passed


def test_few_pairs_allow_for_chance_and_too_few_fall_back_to_the_gates() -> None:
    gates = Gates.of("bf16", fp32_reference=True)
    stock, fused = [40.0, 44.0, 38.0, 42.0], [41.0, 41.0, 39.0, 40.0]
    assert allowance(stock, fused) == pytest.approx(2 * 2.0616 / 2, abs=1e-3)
    assert judge(yardstick(stock, fused), gates, SIZE).passed
    assert not judge(yardstick(stock, [value - 8 for value in stock]), gates, SIZE).passed
    assert "PSNR 30.0 dB < 45 dB" in judge(yardstick(stock[:3], fused[:3]), gates, SIZE).reasons[0]


def test_bad_gates() -> None:
    for bad in ({"min_psnr": -1}, {"min_ssim": 2}, {"on": "mean"}):
        with pytest.raises(ArgumentError):
            Gates.of("fp32", **bad)  # type: ignore[arg-type]


def guilt(bad: set[frozenset[str]], rewrites: tuple[str, ...] = ("a", "b", "c", "d")) -> Any:
    """Search where a picture is bad as soon as all rewrites of one of the sets are on."""

    def good_without(off: tuple[str, ...]) -> bool:
        on = set(rewrites) - set(off)
        return not any(group <= on for group in bad)

    return find_guilty(rewrites, good_without, prompt="p", seed=1, step=3, symptom="NaN after step 4")


def test_one_guilty_rewrite_is_named() -> None:
    found = guilt({frozenset("b")})
    assert found.rewrites == ("b",)
    assert found.step == 3
    assert "caused by rewrite b" in found.sentence
    assert dict(found.tried) == {"a": False, "b": True, "c": False, "d": False}


def test_two_that_spoil_it_alone_are_both_named() -> None:
    assert guilt({frozenset("a"), frozenset("d")}).rewrites == ("a", "d")


def test_two_that_spoil_it_only_together_are_both_named() -> None:
    assert guilt({frozenset("ac")}).rewrites == ("a", "c")


def test_none_to_blame_when_it_stays_with_all_off() -> None:
    found = guilt({frozenset()})
    assert found.rewrites == ()
    assert "stays with every rewrite switched off" in found.sentence
