"""The bench of a comparison: one twin pipeline, its handle, and everything drawn with it."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch

from fusedit.drawing import Drawing, draw, initial_noise
from fusedit.errors import NonFiniteError
from fusedit.progress import Progress
from fusedit.quality.metrics import measure, psnr, relative_l2
from fusedit.quality.result import Failure, Pair
from fusedit.request import Request
from fusedit.timing import Lap

NOISE_PAIRS: Final = 3  # pictures that stock draws twice, to know its own noise; the first time is the warm-up


class Bench:
    """One twin pipeline, its handle, and everything drawn with it so far."""

    def __init__(self, pipe: Any, requests: Sequence[Request], progress: Progress) -> None:
        self.pipe = pipe
        self.requests = requests
        self.progress = progress
        self.handle: Any = None
        self.fp32: Any = None
        self.warm: dict[str, list[Lap]] = {"stock": [], "fused": []}
        self.laps: dict[str, list[Lap]] = {"stock": [], "fused": []}
        self.ratios: list[float] = []
        self.twice: list[tuple[Drawing, Drawing]] = []
        self.first: dict[int, Drawing] = {}

    def attempt(self, arm: str, index: int, what: str | None = None) -> Drawing | Failure:
        """Draw one picture; NaN or infinity becomes a Failure, except in a weight, which spoils every picture."""
        request = self.requests[index]
        self.progress.picture(what or f"{arm}, {_name(request)}")
        try:
            with self.handle.paused() if arm == "stock" else nullcontext():
                return draw(self.pipe, request, on_step=self.progress.step)
        except NonFiniteError as error:
            if error.stage == "weights":
                raise
            what_happened = str(error).partition("; no picture was kept")[0]  # the rest advises to run a comparison
            return Failure(arm, error.stage, error.step, f"{arm}, {_name(request)}: {what_happened}")
        finally:
            self.progress.finish_picture()

    def warm_up(self) -> None:
        """First calls pay for what later ones do not; stock's also serve to measure its own noise."""
        repeated = min(NOISE_PAIRS, len(self.requests))
        self.progress.begin("warm-up", repeated + 1)
        for index in range(repeated):
            drawn = self.attempt("stock", index)
            if isinstance(drawn, Drawing):
                self.warm["stock"].append(drawn.lap)
                self.first[index] = drawn
        drawn = self.attempt("fused", 0)
        if isinstance(drawn, Drawing):
            self.warm["fused"].append(drawn.lap)
        self.progress.begin("comparing", 2 * len(self.requests))

    def pair(self, index: int, exact: Drawing | None, flip: bool | None) -> Pair:
        """Both arms back to back, the first one changing from pair to pair, so that drift favours neither."""
        arms = ("stock", "fused") if index % 2 == 0 else ("fused", "stock")
        drawn = {arm: self.attempt(arm, index) for arm in arms}
        stock, fused = drawn["stock"], drawn["fused"]
        for arm, drawing in drawn.items():
            if isinstance(drawing, Drawing):
                self.laps[arm].append(drawing.lap)
        if isinstance(stock, Drawing) and index in self.first:
            self.twice.append((self.first.pop(index), stock))
        if isinstance(stock, Drawing) and isinstance(fused, Drawing):
            self.ratios.append(stock.lap.total_s / fused.lap.total_s)
        return measured(self.requests[index], stock, fused, exact, flip)

    def speedup(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    def draw_fp32(self) -> dict[int, Drawing]:
        """Stock in fp32 from the same initial noise, before anything is timed; its copies of the weights go again."""
        if self.fp32 is None:
            return {}
        drawings = {}
        self.progress.begin("stock fp32", len(self.requests))
        for index, request in enumerate(self.requests):
            self.progress.picture(f"seed {request.seed}")
            noise = initial_noise(self.pipe, request).float()
            drawings[index] = draw(self.fp32, request, noise=noise, on_step=self.progress.step)
            self.progress.finish_picture()
        self.fp32 = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return drawings


def _name(request: Request) -> str:
    return f"{request.prompt[:32]!r} seed {request.seed}"


def measured(
    request: Request, stock: Drawing | Failure, fused: Drawing | Failure, exact: Drawing | None, flip: bool | None
) -> Pair:
    failures = tuple(arm for arm in (stock, fused) if isinstance(arm, Failure))
    drawn = [arm for arm in (fused, stock) if isinstance(arm, Drawing)]
    wrong = [arm.size for arm in drawn if arm.size != request.size]
    size = wrong[0] if wrong else drawn[0].size if drawn else None
    stock_pixels = stock.pixels if isinstance(stock, Drawing) else None
    fused_pixels = fused.pixels if isinstance(fused, Drawing) else None
    if isinstance(stock, Failure) or isinstance(fused, Failure) or wrong:
        return Pair(
            request.prompt,
            request.seed,
            size,
            text_tokens=request.text_tokens,
            failures=failures,
            stock=stock_pixels,
            fused=fused_pixels,
        )
    found = measure(stock.pixels, fused.pixels, flip)
    return Pair(
        prompt=request.prompt,
        seed=request.seed,
        size=size,
        text_tokens=request.text_tokens,
        psnr_db=found.psnr_db,
        ssim=found.ssim,
        max_abs_diff=found.max_abs_diff,
        flip=found.flip,
        latents_rel_l2=relative_l2(stock.latents, fused.latents),
        stock_fp32_db=None if exact is None else psnr(exact.pixels, stock.pixels),
        fused_fp32_db=None if exact is None else psnr(exact.pixels, fused.pixels),
        stock=stock_pixels,
        fused=fused_pixels,
        flip_map=found.flip_map,
    )
