"""LoRA layers as peft makes them, without what takes it long: nothing is initialised, and no name is looked up.

peft's injection takes 1.7 s of one CPU core for the 504 linear layers of FLUX.1-dev, with mixed ranks 3.1 s. Here its
constructor makes one layer, which says what a layer has in the peft that is installed; the others are made after it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fusedit.lora.blanks import Blank, linear
from fusedit.lora.layers import LoraLayer

_FLOAT8: Final = frozenset(
    value for name, value in vars(torch).items() if name.startswith("float8") and isinstance(value, torch.dtype)
)


@dataclass(frozen=True)
class Change:
    """What a LoRA does to one linear layer.

    Attributes:
        layer: its matrices.
        bias: added to the layer's output, times the LoRA's scale alone: [N], or None.
    """

    layer: LoraLayer
    bias: Tensor | None = None


def is_float8(weight: Tensor) -> bool:
    """Whether these are codes of eight bits: told by the parameter itself, whoever made it."""
    return weight.dtype in _FLOAT8


class Maker:
    """Makes LoRA layers with one adapter."""

    def __init__(self, name: str, config: Any) -> None:
        from peft.tuners.lora import Linear

        plain = copy.copy(config)  # a bias and DoRA are added to those layers that have one
        plain.use_dora = plain.lora_bias = False
        with torch.device("meta"):
            pattern: Any = Linear(nn.Linear(1, 1), name, plain, r=1, lora_alpha=1)
            self._linear = Blank(nn.Linear(1, 1))
        self._name = name
        self._layer = Blank(pattern)
        self._parts = {key: Blank(child) for key, child in pattern._modules.items() if key != "base_layer"}
        self._dropout = Blank(nn.Identity())

    def layer(self, base: Any, change: Change, compute: torch.dtype) -> Any:
        """A LoRA layer around `base`, which is not changed.

        Args:
            compute: the dtype of the matrices where the layer is stored in fewer bits; else they get the layer's own.
        """
        name, layer = self._name, change.layer
        dtype = getattr(base, "compute_dtype", compute) if is_float8(base.weight) else base.weight.dtype

        def own(t: Tensor) -> nn.Parameter:
            # A copy even of a tensor that fits: saving refuses shared memory, and a caller may edit what it gave.
            return nn.Parameter(t.detach().to(base.weight.device, dtype, copy=True).contiguous(), requires_grad=False)

        made = self._like_pattern(base)
        space, parts = made.__dict__, made._modules
        space["in_features"], space["out_features"] = base.in_features, base.out_features
        made.r[name], made.lora_alpha[name] = layer.rank, layer.rank if layer.alpha is None else layer.alpha
        made.scaling[name] = layer.scale
        for half, matrix in (("lora_A", layer.down), ("lora_B", layer.up)):
            parts[half]._modules[name] = linear(self._linear, own(matrix), base.training)
        if change.bias is not None:
            made.lora_B[name].bias = own(change.bias / layer.scale)  # peft scales it too
            made.lora_bias[name] = True
        if layer.magnitude is not None:
            from fusedit.lora.dora import add_dora

            add_dora(made, name, own(layer.magnitude))
        return made

    def _like_pattern(self, base: nn.Module) -> Any:
        """Another layer with the attributes of the pattern and empty containers of its own, around `base`."""
        training = base.training
        made = self._layer(training)
        made._modules["base_layer"] = base
        made._modules |= {key: part(training) for key, part in self._parts.items()}
        made._modules["lora_dropout"]._modules[self._name] = self._dropout(training)
        return made


def description(changes: Mapping[str, Change]) -> Any:
    """peft's description of an adapter, which is saved with it."""
    from peft import LoraConfig

    ranks = {path: change.layer.rank for path, change in changes.items()}
    alphas = {path: change.layer.scale * change.layer.rank for path, change in changes.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return LoraConfig(
        r=int(rank),
        lora_alpha=alpha,
        target_modules=list(changes),
        rank_pattern={f"^{path}": r for path, r in ranks.items() if r != rank},
        alpha_pattern={f"^{path}": a for path, a in alphas.items() if a != alpha},
        use_dora=any(change.layer.magnitude is not None for change in changes.values()),
        lora_bias=any(change.bias is not None for change in changes.values()),
        init_lora_weights=False,
        inference_mode=True,
    )
