"""Comparison: what `compare` returns. Frozen and typed; `to_dict()` is the JSON that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusedit.files import plain
from fusedit.quality.gates import Verdict
from fusedit.quality.guilty import Guilt
from fusedit.quality.noise import BaselineNoise
from fusedit.report import Refusal, SiteReport
from fusedit.timing import Timing
from fusedit.validation import Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Failure:
    """A picture that was not drawn because NaN or infinity appeared.

    Attributes:
        arm: `stock` or `fused`.
        stage: `latents` or `pixels`.
        step: zero-based denoising step, or None when decoding.
        message: one sentence.
    """

    arm: str
    stage: str
    step: int | None
    message: str


@dataclass(frozen=True)
class Pair:
    """One prompt and seed drawn by stock and by the accelerated pipeline.

    Attributes:
        prompt, seed: what was drawn.
        size: true size of the fused picture (of the stock one where fused failed), or None if neither was drawn.
        text_tokens: longest prompt in tokens; None: the pipeline's own.
        psnr_db, ssim, max_abs_diff, flip, latents_rel_l2: fused against stock in the same dtype; None where either
            was not drawn, or (flip) flip-evaluator is not installed.
        stock_fp32_db, fused_fp32_db: PSNR of each against stock in fp32; None unless that reference was asked for.
        failures: why a picture is missing.
        stock, fused: the pictures, float32 [height, width, 3] in [0, 1]; flip_map: float32 [height, width].
    """

    prompt: str
    seed: int
    size: Size | None
    text_tokens: int | None = None
    psnr_db: float | None = None
    ssim: float | None = None
    max_abs_diff: float | None = None
    flip: float | None = None
    latents_rel_l2: float | None = None
    stock_fp32_db: float | None = None
    fused_fp32_db: float | None = None
    failures: tuple[Failure, ...] = ()
    stock: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    fused: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    flip_map: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        data = {
            "prompt": self.prompt,
            "seed": self.seed,
            "size": None if self.size is None else str(self.size),
            "text_tokens": self.text_tokens,
            "psnr_db": self.psnr_db,
            "ssim": self.ssim,
            "max_abs_diff": self.max_abs_diff,
            "flip": self.flip,
            "latents_rel_l2": self.latents_rel_l2,
            "failures": [vars(failure) for failure in self.failures],
        }
        if self.stock_fp32_db is not None or self.fused_fp32_db is not None:
            data |= {"stock_fp32_db": self.stock_fp32_db, "fused_fp32_db": self.fused_fp32_db}
        return data


@dataclass(frozen=True)
class Comparison:
    """The same pictures drawn by stock and by the accelerated pipeline: times, memory, fidelity and a verdict.

    Attributes:
        model, pipeline: the model's name and the pipeline's class.
        plan: the plan as JSON data.
        device, dtype: such as `cuda` and `bf16`.
        size, steps, guidance, negative, true_cfg: what was drawn; guidance None where the pipeline takes none.
        reference: `same` (stock in the same dtype) or `fp32` (the yardstick is in the pairs too).
        stock, fused: times of both arms, interleaved in one process, warm-up apart.
        speedup_measured: median over the pairs of stock's seconds by fused's seconds for the whole call, whatever the
            verdict. Read `speedup` instead: it is None beside a red verdict.
        pairs: one entry for each prompt and seed.
        noise: stock against stock.
        loras: JSON data of each LoRA that the pipeline has.
        rewritten, refused, notes: what accelerate() did, with the counters of these runs.
        verdict: whether the pictures passed, and why not.
        guilt: which rewrite is to blame, when the verdict is red and it was searched for.
        environment: versions, device, driver, date, commit.
    """

    model: str
    pipeline: str
    plan: Mapping[str, Any]
    device: str
    dtype: str
    size: Size
    steps: int
    guidance: float | None
    negative: str | None
    true_cfg: float | None
    reference: str
    stock: Timing
    fused: Timing
    speedup_measured: float | None
    pairs: tuple[Pair, ...]
    noise: BaselineNoise
    rewritten: tuple[SiteReport, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    verdict: Verdict
    guilt: Guilt | None
    environment: Mapping[str, Any]
    loras: tuple[Mapping[str, Any], ...] = ()

    @property
    def speedup(self) -> float | None:
        """Whole call, stock by fused, median of the pairs; None beside a red verdict."""
        return self.speedup_measured if self.verdict.passed else None

    @property
    def speedup_step(self) -> float | None:
        """Median denoising step, stock by fused; None beside a red verdict."""
        if not self.verdict.passed or not self.stock.step_ms or not self.fused.step_ms:
            return None
        return self.stock.step_ms / self.fused.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data without NaN or infinity: an infinite PSNR is the string "inf"."""
        data: dict[str, Any] = plain(
            {
                "model": self.model,
                "pipeline": self.pipeline,
                "plan": self.plan,
                "device": self.device,
                "dtype": self.dtype,
                "size": str(self.size),
                "steps": self.steps,
                "guidance": self.guidance,
                "negative": self.negative,
                "true_cfg": self.true_cfg,
                "reference": self.reference,
                "loras": self.loras,
                "stock": self.stock.to_dict(),
                "fused": self.fused.to_dict(),
                "speedup": self.speedup,
                "speedup_step": self.speedup_step,
                "pairs": [pair.to_dict() for pair in self.pairs],
                "baseline_noise": self.noise.to_dict(),
                "rewritten": [site.to_dict() for site in self.rewritten],
                "refused": [refusal.to_dict() for refusal in self.refused],
                "notes": self.notes,
                "verdict": self.verdict.to_dict(),
                "guilt": None if self.guilt is None else self.guilt.to_dict(),
                "environment": self.environment,
            }
        )
        return data

    def __str__(self) -> str:
        from fusedit.quality.table import as_text

        return as_text([self])
