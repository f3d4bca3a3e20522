"""Rounding to e4m3 where the inputs of a layer are known: what one code misses, the codes after it make up for.

Nearest codes miss every weight by 2.6 % on average, and so the result. Where inputs x have second moments H = E[x x^T],
the error (w - q) x is smallest not for the nearest codes, but for those that GPTQ (Frantar et al. 2022) finds: one
input after the other is rounded, and its error is taken off the weights that are still to come, as far as H says that
their inputs go together. Codes and scales look as before; only which neighbour a weight is rounded to changes.
Where the inputs come from: float8/calibration.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from fusedit.float8 import choice
from fusedit.float8.round_panel import PANEL, round_panel
from fusedit.ops._fp8 import E4M3_MAX

Tensor = torch.Tensor
DAMPING: Final = 0.1
"""Of each input's own moment, added to it: how far inputs may differ from the samples."""
WIDEST: Final = 4096
"""Inputs whose errors may be made up by one another. With all 15,360 of FLUX's closing product the factors would take
25 times as long, and gain nothing that was seen on the embedded models."""
MOST: Final = 1 << 28
"""Weights that are rounded at once, 1 GiB in fp32."""


class Moments:
    """The second moments of an input, ready for rounding.

    Args:
        samples: [n, K] of any floating dtype and device, n of any size.

    Attributes:
        reason: why nothing can be rounded for them, or empty.
    """

    def __init__(self, samples: Tensor) -> None:
        n, K = samples.shape
        self.groups = next(g for g in range(-(-K // WIDEST), K + 1) if K % g == 0)
        x = samples.float().view(n, self.groups, -1).transpose(0, 1)
        x = x / x.abs().amax().clamp_min(1e-30)  # only proportions count, and squares must not overflow
        moments = x.mT @ x / n
        own = moments.diagonal(dim1=1, dim2=2)
        # Large inputs first: their errors have the most others to be made up by.
        self.order = torch.argsort(own, dim=1, descending=True)
        own = own.gather(1, self.order).clone()
        moments = moments.gather(1, self.order[:, :, None].expand_as(moments))
        moments = moments.gather(2, self.order[:, None].expand_as(moments))
        least = own.mean(1, keepdim=True).clamp_min(1e-30) * 1e-4  # inputs that are always 0 among the samples
        moments.diagonal(dim1=1, dim2=2).add_(DAMPING * own + least)
        # H^-1 = U^T U with U upper triangular: of the flipped H = L L^T, U is the flipped L^-1.
        lower, failed = torch.linalg.cholesky_ex(moments.flip(1, 2))
        one = torch.eye(own.shape[1], dtype=own.dtype, device=own.device).expand_as(lower)
        self.factor = torch.linalg.solve_triangular(lower, one, upper=False).flip(1, 2).contiguous()
        self.reason = ""
        if bool(failed.any()) or not bool(self.factor.isfinite().all()):  # no promise that NaN is a failure
            finite = bool(moments.isfinite().all())
            self.reason = f"the second moments of what they read are not {'positive definite' if finite else 'finite'}"

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> e4m3 codes [N, K] and scale fp32 [N], amax of each row over 448."""
        scale = (weight.abs().amax(1).float() / E4M3_MAX).clamp_min(2.0**-100)
        left = (weight.float() / scale[:, None]).view(len(weight), self.groups, -1).transpose(0, 1)
        order = self.order[:, None].expand_as(left)
        left = left.gather(2, order)
        codes = torch.empty_like(left, dtype=torch.float8_e4m3fn)
        for first in range(0, left.shape[2], PANEL):
            panel = slice(first, first + PANEL)
            codes[..., panel], missed = round_panel(left[..., panel], self.factor[:, panel, panel])
            if first + PANEL < left.shape[2]:
                left[..., first + PANEL :].baddbmm_(missed, self.factor[:, panel, first + PANEL :], alpha=-1)
        made = torch.empty_like(codes).view(torch.uint8).scatter_(2, order, codes.view(torch.uint8))
        return made.transpose(0, 1).reshape(weight.shape).view(torch.float8_e4m3fn), scale


Codes = tuple[Tensor, Tensor]
"""e4m3 [N, K] and scale fp32 [N]."""


class Rounder:
    """Codes of the layers whose inputs are known, some layers at a time.

    Args:
        samples: path -> [n, K] of what the layer reads; the same tensor for layers that read the same.
        layers: path -> layer, in the order in which they are asked for.
        device: where; None: where the weights lie.
        known: path -> codes that were made before.
        choices: path -> how its codes are chosen with these, see float8/choice.py.
    """

    def __init__(
        self,
        samples: Mapping[str, Tensor],
        layers: Mapping[str, nn.Linear],
        device: torch.device | None = None,
        known: Mapping[str, Codes] | None = None,
        choices: Mapping[str, str] | None = None,
    ) -> None:
        self.layers, self.device = layers, device
        self._made: dict[str, Codes] = dict(known or {})
        given = {path: samples[path] for path in layers if path in samples and path not in self._made}
        self._samples = {path: rows for path, rows in given.items() if _usable(rows, layers[path])}
        self._moments: dict[int, Moments] = {}
        misfits = dict.fromkeys(given.keys() - self._samples.keys(), choice.nearest("the samples are not theirs"))
        self._choices = dict(choices or {}) | misfits

    def codes(self, path: str) -> Codes | None:
        """Codes and scale of this layer where its weight lies, or None: then the nearest ones are right."""
        if path in self._samples:
            with torch.autocast((self.device or self.layers[path].weight.device).type, enabled=False):
                self._round(path)
        if path not in self._made:
            return None
        codes, scale = self._made.pop(path)
        where = self.layers[path].weight.device
        return codes.to(where), scale.to(where)

    def choice(self, path: str) -> str:
        """How the codes of this layer, which were asked for, were chosen."""
        return self._choices.get(path, "")

    def _round(self, first: str) -> None:
        """This layer and the next ones that read the same, as many as fit."""
        samples = self._samples[first]
        device = self.device or self.layers[first].weight.device
        chosen: list[str] = []
        size = 0
        for path, other in list(self._samples.items()):
            size += self.layers[path].weight.numel() if other is samples else 0
            if other is samples and (not chosen or size <= MOST):
                chosen.append(path)
                del self._samples[path]
        moments = self._moments.pop(id(samples), None) or Moments(samples.to(device))
        if any(other is samples for other in self._samples.values()):
            self._moments[id(samples)] = moments
        if moments.reason:
            self._choices |= dict.fromkeys(chosen, choice.nearest(moments.reason))
            return
        weights = [self.layers[path].weight.data.to(device) for path in chosen]
        codes, scale = moments.round(torch.cat(weights))
        rows = [len(weight) for weight in weights]
        parts = zip(torch.split(codes, rows), torch.split(scale, rows), strict=True)
        self._made |= {path: (c.clone(), s.clone()) for path, (c, s) in zip(chosen, parts, strict=True)}


def _usable(samples: Tensor, layer: nn.Linear) -> bool:
    return samples.shape[1] == layer.in_features and len(samples) > 0
