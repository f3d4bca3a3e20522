"""How far two pictures, or two latents, are apart.

Pixels are float32 [height, width, 3] in [0, 1], before any rounding to 8 bits. PSNR is 10 log10(1 / mean squared
error) and SSIM the structural similarity, both by torchmetrics in float64; FLIP (how different two pictures look when
flickered on one screen) by flip-evaluator, where it is installed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from fusedit.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Metrics:
    """One picture against its reference.

    Attributes:
        psnr_db: decibels; infinite for identical pictures.
        ssim: structural similarity, 1 for identical pictures.
        max_abs_diff: largest difference of a pixel's colour value, of 1.
        flip: mean FLIP error, 0 to 1, or None where flip-evaluator is not installed.
        flip_map: float32 [height, width], the FLIP error of each pixel, or None.
    """

    psnr_db: float
    ssim: float
    max_abs_diff: float
    flip: float | None = None
    flip_map: NDArray[np.float32] | None = field(default=None, repr=False)


def measure(reference: NDArray[np.float32], picture: NDArray[np.float32], flip: bool | None = None) -> Metrics:
    """All metrics of one pair.

    Args:
        reference: pixels [height, width, 3] in [0, 1].
        picture: the same size.
        flip: True asks for FLIP and raises without it; None takes it where it is installed; False leaves it out.

    Raises:
        ArgumentError: different sizes; they are a verdict of their own, never resized here.
        MissingExtraError: FLIP was asked for and flip-evaluator is not installed.
    """
    if reference.shape != picture.shape:
        raise ArgumentError(f"pictures of different shapes cannot be compared: {reference.shape} and {picture.shape}")
    error_map = None
    if flip:
        error_map = flip_map(reference, picture)
    elif flip is None and flip_installed():
        with contextlib.suppress(MissingExtraError):  # installed but broken: nobody asked for it, so it is left out
            error_map = flip_map(reference, picture)
    ours, stock = _batch(picture), _batch(reference)
    return Metrics(
        psnr_db=psnr(stock, ours),
        ssim=_ssim(stock, ours),
        max_abs_diff=float((ours - stock).abs().max()),
        flip=None if error_map is None else float(error_map.mean()),
        flip_map=error_map,
    )


def psnr(reference: torch.Tensor | NDArray[np.float32], picture: torch.Tensor | NDArray[np.float32]) -> float:
    """PSNR in dB of values in [0, 1]; infinite for identical ones."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    return float(peak_signal_noise_ratio(_batch(picture), _batch(reference), data_range=1.0))


def relative_l2(reference: torch.Tensor, value: torch.Tensor) -> float:
    """|value - reference| / |reference| in float64; 0 for identical tensors, infinite against an all-zero reference."""
    exact = reference.double()
    difference = float(torch.linalg.vector_norm(value.double() - exact))
    size = float(torch.linalg.vector_norm(exact))
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def flip_installed() -> bool:
    """Whether flip-evaluator can be imported. Finds it without importing it."""
    return find_spec("flip_evaluator") is not None


def flip_map(reference: NDArray[np.float32], picture: NDArray[np.float32]) -> NDArray[np.float32]:
    """FLIP error of each pixel, float32 [height, width], 0 to 1, at 67 pixels per degree (flip-evaluator's default).

    Raises:
        MissingExtraError: flip-evaluator is not installed, or broken.
    """
    import numpy as np

    try:
        from flip_evaluator import evaluate
    except Exception as error:  # a broken binary wheel raises anything; the remedy is the same
        raise MissingExtraError(
            f"FLIP needs flip-evaluator, which cannot be imported ({error}); pip install 'fusedit[fidelity]' brings it"
        ) from None
    found: Any = evaluate(
        np.ascontiguousarray(reference), np.ascontiguousarray(picture), "LDR", applyMagma=False, computeMeanError=False
    )[0]
    return np.asarray(found, dtype=np.float32).reshape(reference.shape[:2])


def _batch(picture: torch.Tensor | NDArray[np.float32]) -> torch.Tensor:
    """[height, width, 3] -> float64 [1, 3, height, width]; a batch stays as it is."""
    tensor = torch.as_tensor(picture).double()
    return tensor if tensor.ndim == 4 else tensor.permute(2, 0, 1)[None]


def _ssim(reference: torch.Tensor, picture: torch.Tensor) -> float:
    from torchmetrics.functional.image import structural_similarity_index_measure

    value = structural_similarity_index_measure(picture, reference, data_range=1.0)
    return float(value if isinstance(value, torch.Tensor) else value[0])
