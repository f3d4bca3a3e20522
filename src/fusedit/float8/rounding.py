"""Rounding to e4m3 where the inputs of a layer are known: what one code misses, the codes after it make up for.

Nearest codes miss every weight by 2.6 % on average, and so the result. Where inputs x have second moments H = E[x x^T],
the error (w - q) x is smallest not for the nearest codes, but for those that GPTQ (Frantar et al. 2022) finds: one
input after the other is rounded, and its error is taken off the weights that are still to come, as far as H says that
their inputs go together. Codes and scales look as before; only which neighbour a weight is rounded to changes.
It is meant for modulation layers: what they read is known without any picture, but for the pooled prompt. On tiny-flux
what they add to the error falls to 0.28 of what the nearest codes add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from fusedit.ops._fp8 import E4M3_MAX, to_e4m3

Tensor = torch.Tensor
DAMPING: Final = 0.1
"""Of the mean moment, added to all: how far inputs may differ from the samples. 0.03 is as good, 0.3 a tenth worse."""
BLOCK: Final = 128
"""Inputs whose errors are put off together, as one product."""
MOST: Final = 1 << 28
"""Weights that are rounded at once, 1 GiB in fp32: one step an input serves all of them."""


class Moments:
    """The second moments of an input, ready for rounding.

    Args:
        samples: [n, K] of any dtype and device, n of any size.
    """

    def __init__(self, samples: Tensor) -> None:
        x = samples.double()
        moments = x.T @ x / len(x)
        # Large inputs first: their errors have the most others to be made up by.
        self.order = torch.argsort(moments.diagonal(), descending=True)
        moments = moments[self.order][:, self.order]
        moments.diagonal().add_(DAMPING * moments.diagonal().mean().clamp_min(1e-30))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
        self.factor = torch.linalg.cholesky(inverse, upper=True).float()

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> e4m3 codes [N, K] and scale fp32 [N], amax of each row over 448."""
        scale = (weight.abs().amax(1).float() / E4M3_MAX).clamp_min(2.0**-100)
        left = (weight.float() / scale[:, None])[:, self.order]
        codes = torch.empty_like(left, dtype=torch.float8_e4m3fn)
        for first in range(0, left.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            now, factor = left[:, block], self.factor[block, block]
            missed = torch.empty_like(now)
            for k in range(now.shape[1]):
                codes[:, first + k] = to_e4m3(now[:, k])
                missed[:, k] = (now[:, k] - codes[:, first + k].float()) / factor[k, k]
                now[:, k + 1 :] -= missed[:, k : k + 1] * factor[k, k + 1 :]
            left[:, first + BLOCK :] -= missed @ self.factor[block, first + BLOCK :]
        made = torch.empty_like(codes)
        made[:, self.order] = codes
        return made, scale


class Rounder:
    """Codes of the layers whose inputs are known, some layers at a time.

    Args:
        samples: [n, K] of these inputs; None: no layer's are known.
        layers: path -> layer, in the order in which they are asked for.
        wanted: path -> precision; only those of `weights` with K inputs are rounded here.
        device: where; None: where the weights lie.
    """

    def __init__(
        self,
        samples: Tensor | None,
        layers: Mapping[str, nn.Linear],
        wanted: Mapping[str, str],
        device: torch.device | None,
    ) -> None:
        usable = samples is not None and bool(torch.isfinite(samples).all())
        self.layers = {
            path: layer
            for path, layer in layers.items()
            if samples is not None and usable and wanted[path] == "weights" and layer.in_features == samples.shape[1]
        }
        self.device = device
        self._moments: Moments | None = None
        self._samples = samples
        self._made: dict[str, tuple[Tensor, Tensor]] = {}

    def codes(self, path: str) -> tuple[Tensor, Tensor] | None:
        """Codes and scale of this layer where its weight lies, or None where its inputs are not known."""
        if path not in self.layers:
            return None
        if path not in self._made:
            self._made = self._round(path)
        codes, scale = self._made.pop(path)
        where = self.layers[path].weight.device
        return codes.to(where), scale.to(where)

    def _round(self, first: str) -> dict[str, tuple[Tensor, Tensor]]:
        """The layers from this one on, as many as fit."""
        paths = list(self.layers)
        chosen: list[str] = []
        size = 0
        for path in paths[paths.index(first) :]:
            size += self.layers[path].weight.numel()
            if chosen and size > MOST:
                break
            chosen.append(path)
        device = self.device or self.layers[first].weight.device
        weights = [self.layers[path].weight.data.to(device) for path in chosen]
        if self._moments is None:
            assert self._samples is not None
            self._moments = Moments(self._samples.to(device))
        codes, scale = self._moments.round(torch.cat(weights))
        rows = [len(weight) for weight in weights]
        parts = zip(torch.split(codes, rows), torch.split(scale, rows), strict=True)
        return {path: (c.clone(), s.clone()) for path, (c, s) in zip(chosen, parts, strict=True)}
