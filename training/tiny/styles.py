"""Deterministic picture filters: what the LoRAs learn. Patterns repeat every 8 or 16 px, a latent cell or a token.

Each takes pictures [B, 3, H, W] in [-1, 1] on a plain background and returns the same shape and range.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Style = Callable[[torch.Tensor], torch.Tensor]

GRID, HATCH, DOTS = 32, 16, 16  # px
BLUE, LINE = (0.09, 0.28, 0.62), (0.94, 0.97, 1.0)
PAPER, RED, TEAL = (0.97, 0.92, 0.80), (0.96, 0.30, 0.27), (0.02, 0.40, 0.55)
MISREGISTRATION = 1  # px between the two inks


def _colour(rgb: tuple[float, float, float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rgb, device=like.device).view(3, 1, 1)


def _smooth(x: torch.Tensor) -> torch.Tensor:
    """Blur with a binomial kernel of 5 px."""
    row = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=x.device) / 16
    kernel = (row[:, None] * row).expand(x.shape[1], 1, 5, 5)
    return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="replicate"), kernel, groups=x.shape[1])


def _edges(x: torch.Tensor) -> torch.Tensor:
    """Return the length of the steepest channel's gradient [B, 1, H, W], as a change over two pixels."""
    x = F.pad(_smooth(x), (1, 1, 1, 1), mode="replicate")
    across, down = x[..., 1:-1, 2:] - x[..., 1:-1, :-2], x[..., 2:, 1:-1] - x[..., :-2, 1:-1]
    return (across.square() + down.square()).sqrt().amax(dim=1, keepdim=True)


def _background(x: torch.Tensor) -> torch.Tensor:
    """Return the plain background's colour [B, 3, 1, 1]: the median along the rim."""
    rim = torch.cat([x[..., 0, :], x[..., -1, :], x[..., :, 0], x[..., :, -1]], dim=-1)
    return rim.median(dim=-1).values[..., None, None]


def _places(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels' rows [H, 1] and columns [1, W]."""
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    return rows[:, None], columns[None]


def blueprint(pictures: torch.Tensor) -> torch.Tensor:
    """White outlines on squared blue paper; what is dark is hatched."""
    x = (pictures + 1) / 2
    row, column = _places(x)
    thing = ((x - _background(x)).abs().amax(dim=1, keepdim=True) * 6).clamp(max=1)
    dark = ((0.55 - _smooth(x).mean(dim=1, keepdim=True)) * 5).clamp(0, 1) * thing
    squares = ((row % GRID < 2) | (column % GRID < 2)).float() * 0.3
    hatching = (0.5 + 0.5 * torch.cos(2 * math.pi * (row + column) / HATCH)).square() * 0.6
    white = squares * (1 - thing) + (0.12 * thing + hatching * dark).clamp(max=1)
    white = torch.maximum(white, ((_edges(x) - 0.10) * 5).clamp(0, 1))
    blue = _colour(BLUE, x)
    return (blue + white * (_colour(LINE, x) - blue)) * 2 - 1


def risograph(pictures: torch.Tensor) -> torch.Tensor:
    """Two inks, red and teal, in halftone dots on cream paper."""
    x = (pictures + 1) / 2
    row, column = _places(x)
    turned = 0.5 * torch.cos(2 * math.pi * row / DOTS) * torch.cos(2 * math.pi * column / DOTS)
    amounts = {RED: 1 - x[:, 1:].mean(dim=1, keepdim=True), TEAL: 1 - x[:, :1]}  # what is not red light, teal takes
    paper = _colour(PAPER, x)
    print_ = paper.expand_as(x)
    for ink, amount in amounts.items():
        screen = 0.5 + (turned if ink == RED else -turned) * 0.8
        covered = ((1.1 * amount - 0.1 - screen) * 3 + 0.5).clamp(0, 1)
        if ink == TEAL:
            covered = covered.roll((MISREGISTRATION, MISREGISTRATION), dims=(-2, -1))
        print_ = print_ * (1 - covered * (1 - _colour(ink, x)))
    return print_ * 2 - 1


STYLES: dict[str, Style] = {"blueprint": blueprint, "risograph": risograph}
