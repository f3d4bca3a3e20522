"""What a LoRA file holds, whatever wrote it: low-rank layers by the path of the module that each of them changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class LoraLayer(NamedTuple):
    """One adapted linear layer: W becomes W + scale * up @ down, with DoRA rescaled to the norms in `magnitude`.

    Attributes:
        down: A [R, K], K the layer's inputs.
        up: B [N, R], N the layer's outputs.
        alpha: the scale is alpha / R; None: 1.
        magnitude: DoRA. [N]: the norms of the rows of the new weight (one an output, as peft has it); [1, K]: those of
            its columns (one an input, OneTrainer's default), which peft cannot do. None: no DoRA.
    """

    down: Tensor
    up: Tensor
    alpha: float | None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def delta(self, weight: Tensor | None = None) -> Tensor:
        """What is added to the layer's weight, dense: fp32 [N, K] on the device of `up`.

        Args:
            weight: the layer's own weight [N, K]; only DoRA depends on it.

        Raises:
            ValueError: DoRA without a weight.
        """
        change = self.scale * (self.up.float() @ self.down.float())
        if self.magnitude is None:
            return change
        if weight is None:
            raise ValueError("a DoRA layer's change depends on the weight that it is added to; pass weight=")
        base = weight.to(change)
        new = base + change
        along = 0 if self.magnitude.ndim == 2 else 1
        norm: Tensor = torch.linalg.vector_norm(new, dim=along, keepdim=True)
        return new * (self.magnitude.to(new).reshape(norm.shape) / norm) - base


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as read from a file.

    Attributes:
        format: who writes such keys: `diffusers`, `kohya`, `ai-toolkit`, `onetrainer`, `xlabs`, `bfl`, `bfl-control`,
            `lokr`, `loha`.
        family: `flux`, `z-image`, or None where the names fit both.
        layers: path of a linear layer in the diffusers transformer -> its change; fused layers of the file are split.
        text: `text_encoder` and `text_encoder_2` -> path in that transformers module -> its change.
        extra: what belongs to the transformer and is no low-rank layer, by parameter. `NAME` replaces the parameter
            (norm scales of control LoRAs, as diffusers does it); `NAME.diff` is added to it, times the LoRA's scale
            (biases; a missing bias counts as zero).
        keys: how many keys the file has.
        unmatched: the keys that no rule took.
        notes: sentences about what was decided while reading, for reports.
    """

    format: str
    family: str | None
    layers: Mapping[str, LoraLayer]
    text: Mapping[str, Mapping[str, LoraLayer]]
    extra: Mapping[str, Tensor]
    keys: int
    unmatched: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
