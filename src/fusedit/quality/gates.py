"""Gates and the verdict: when a comparison passes.

Judged in this order: every picture finite; every picture of the size asked for; then, on the minimum over the pairs
unless told `median`,

- explicit gates (`min_psnr`, `min_ssim`) where given;
- else the rule of the plan's tier. `exact` in fp32: PSNR >= 80 dB. `exact` in bf16: PSNR >= 45 dB and SSIM >= 0.98
  against stock in bf16, or, with the fp32 reference, the yardstick: ours may not be further from stock fp32 than stock
  bf16 is, but for a slack of 0.2 dB on the median over the pairs. Each picture is held against its own yardstick: the
  prompts are 20 dB apart, so the difference of the two medians moves by chance more than any rewrite does. Two bf16
  pictures of one seed differ by chance too, so with fewer than 20 pairs twice the standard error of the difference is
  allowed, and with fewer than 4 nothing can be said and the plain gates hold. `fp8`, in either dtype: PSNR >= 30 dB and
  SSIM >= 0.95 against stock in the same dtype.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fusedit.validation import Size, check_choice, check_psnr, check_ssim

FP32_PSNR: Final = 80.0
BF16_PSNR: Final = 45.0
SSIM: Final = 0.98
FP8_PSNR: Final = 30.0
FP8_SSIM: Final = 0.95
SLACK_DB: Final = 0.2
ENOUGH_PAIRS: Final = 20
FEWEST_PAIRS: Final = 4


class Measured(Protocol):
    """What a gate reads of a pair; `fusedit.quality.result.Pair` has it."""

    @property
    def prompt(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def size(self) -> Size | None: ...
    @property
    def psnr_db(self) -> float | None: ...
    @property
    def ssim(self) -> float | None: ...
    @property
    def stock_fp32_db(self) -> float | None: ...
    @property
    def fused_fp32_db(self) -> float | None: ...
    @property
    def failures(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Gates:
    """What a comparison must reach.

    Attributes:
        min_psnr: decibels.
        min_ssim: -1 to 1.
        on: `min` judges the worst pair, `median` the middle one.
        yardstick: judge against stock fp32 by the exact rule instead, where there are enough pairs.
    """

    min_psnr: float
    min_ssim: float
    on: str = "min"
    yardstick: bool = False

    @classmethod
    def of(
        cls,
        dtype: str,
        *,
        min_psnr: float | None = None,
        min_ssim: float | None = None,
        on: str = "min",
        fp32_reference: bool = False,
        tier: str = "exact",
    ) -> Gates:
        """The gates asked for, with the rule of the tier for this dtype in place of every None."""
        lossy = tier != "exact"
        explicit = min_psnr is not None or min_ssim is not None or lossy
        floor = FP8_PSNR if lossy else FP32_PSNR if dtype == "fp32" else BF16_PSNR
        return cls(
            min_psnr=floor if min_psnr is None else check_psnr(min_psnr),
            min_ssim=(FP8_SSIM if lossy else SSIM) if min_ssim is None else check_ssim(min_ssim),
            on=check_choice(on, ("min", "median"), "gate_on"),
            yardstick=fp32_reference and not explicit,
        )


@dataclass(frozen=True)
class Check:
    """One thing that was judged, with its numbers in one sentence."""

    passed: bool
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """Whether a comparison passed. `reasons` are the checks that failed; `checks` are all of them."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(check.sentence for check in self.checks if not check.passed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            "checks": [vars(check) for check in self.checks],
        }


def judge(pairs: Sequence[Measured], gates: Gates, size: Size) -> Verdict:
    """The verdict over all pairs. A pair that could not be measured is a failure of its own, never averaged away."""
    checks = [Check(False, failure.message) for pair in pairs for failure in pair.failures]
    if not checks:
        checks.append(Check(True, f"all {2 * len(pairs)} pictures are finite"))
    wrong = [pair for pair in pairs if pair.size is not None and pair.size != size]
    checks += [Check(False, f"seed {pair.seed} came out as {pair.size}, not {size}") for pair in wrong]
    measured = [pair for pair in pairs if pair.psnr_db is not None]
    if not measured:
        return Verdict((*checks, Check(False, "no pair of pictures could be compared")))
    if gates.yardstick and len(measured) >= FEWEST_PAIRS:
        checks.append(_against_yardstick(measured))
    else:
        checks.append(_gate([p.psnr_db for p in measured], gates.min_psnr, gates.on, "PSNR", " dB", 1))
        checks.append(_gate([p.ssim for p in measured], gates.min_ssim, gates.on, "SSIM", "", 4))
    return Verdict(tuple(checks))


def _gate(values: Sequence[float | None], floor: float, on: str, what: str, unit: str, digits: int) -> Check:
    known = [value for value in values if value is not None]
    value = min(known) if on == "min" else statistics.median(known)
    word = "lowest" if on == "min" else "median"
    passed = value >= floor
    relation = ">=" if passed else "<"
    return Check(passed, f"{word} {what} {value:.{digits}f}{unit} {relation} {floor:g}{unit} over {_pairs(len(known))}")


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _against_yardstick(pairs: Sequence[Measured]) -> Check:
    known = [
        (pair.stock_fp32_db, pair.fused_fp32_db)
        for pair in pairs
        if pair.stock_fp32_db is not None and pair.fused_fp32_db is not None
    ]
    stock, fused = [a for a, _ in known], [b for _, b in known]
    ours, theirs, gain = statistics.median(fused), statistics.median(stock), statistics.median(gains(stock, fused))
    if math.isinf(ours):
        return Check(True, "identical to stock fp32")
    if math.isinf(theirs):
        return Check(False, f"stock is identical to stock fp32, ours is {ours:.1f} dB from it")
    chance = allowance(stock, fused)
    passed = gain >= -SLACK_DB - chance
    by_chance = f" and {chance:.1f} dB for the chance in {_pairs(len(pairs))}" if chance else ""
    return Check(
        passed,
        f"PSNR against stock fp32: ours {gain:+.2f} dB from stock's on the median of the pairs (medians {ours:.1f} and "
        f"{theirs:.1f} dB); {'within' if passed else 'beyond'} the slack of {SLACK_DB} dB{by_chance}",
    )


def gains(stock: Sequence[float], fused: Sequence[float]) -> list[float]:
    """dB that each fused picture is nearer to stock fp32 than stock's own; 0 where both are identical to it."""
    return [0.0 if a == b else b - a for a, b in zip(stock, fused, strict=True)]


def allowance(stock: Sequence[float], fused: Sequence[float]) -> float:
    """dB that the median difference of so few pairs moves by chance; 0 from 20 pairs on."""
    if len(stock) >= ENOUGH_PAIRS:
        return 0.0
    differences = [gain for gain in gains(stock, fused) if math.isfinite(gain)]
    if len(differences) < 2:
        return 0.0
    return 2 * statistics.stdev(differences) / math.sqrt(len(differences))
