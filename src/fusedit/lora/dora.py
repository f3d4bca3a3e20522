"""DoRA: a LoRA whose new weight is rescaled to learnt norms. By peft where they are of rows, by InputDora of columns.

    W' = V diag(m / norm(V)),  V = W + s B A,  norm(V)[k] = sqrt(sum_n V[n, k]^2)

W [N, K], m [K]: one norm an input, as OneTrainer writes by default. Applied as x W'^T = (x g) W^T + s ((x g) A^T) B^T
with g = m / norm(V), which is computed at each call, in fp32: weights and scales may change. Source: Liu et al. 2024,
section 4.1, where norms are of columns.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn


def add_dora(layer: Any, name: str, magnitude: nn.Parameter) -> None:
    """Make adapter `name` of a peft LoRA layer a DoRA: magnitude [N] are norms of rows, [1, K] of columns."""
    holder = DoraLinearLayer(fan_in_fan_out=False)
    holder.weight = magnitude
    layer.lora_magnitude_vector[name] = holder
    layer.use_dora[name] = True
    layer.lora_variant[name] = InputDora() if magnitude.ndim == 2 else DoraLinearVariant()


class InputDora(LoraVariant):  # type: ignore[misc]
    """peft's DoRA, with a norm for each input in the place of one for each output."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Nothing to do: `add_dora` brings everything."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:  # noqa: ARG004
        gain = InputDora._gain(module, active_adapter, _unmerged(module))
        module._cache_store(f"{active_adapter}-weight_norm", gain)
        weight: Tensor = module.get_base_layer().weight.data  # not `orig_weight`: others have just been merged anew
        delta: Tensor = module.get_delta_weight(active_adapter)
        return ((weight.float() + delta.float()) * gain).to(weight.dtype)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data.copy_(InputDora.merge_safe(module, active_adapter, orig_weight.data))

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        gain: Tensor = module._cache_pop(f"{active_adapter}-weight_norm")
        delta: Tensor = module.get_delta_weight(active_adapter)
        return (orig_weight.data.float() / gain - delta.float()).to(orig_weight.dtype)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG004
        weight: Tensor = dequantize_module_weight(module.get_base_layer())
        gain = InputDora._gain(module, active_adapter, weight)
        x = module.lora_dropout[active_adapter](x)
        low: Tensor = module.lora_B[active_adapter](module.lora_A[active_adapter]((x * gain).to(x.dtype)))
        # `result` holds x W^T and the bias already, perhaps other adapters too: what is missing is x (g - 1) W^T.
        rest = nn.functional.linear((x * (gain - 1)).to(weight.dtype), weight)
        scaling: float = module.scaling[active_adapter]
        return result + rest + low * scaling

    @staticmethod
    def _gain(module: Any, name: str, weight: Tensor) -> Tensor:
        """g, fp32 [K]."""
        up, down = module.lora_B[name].weight.detach(), module.lora_A[name].weight.detach()
        new = torch.addmm(weight.detach().float(), up.float(), down.float(), alpha=module.scaling[name])
        magnitude: Tensor = module.lora_magnitude_vector[name].weight.detach().float()[0]
        norm: Tensor = torch.linalg.vector_norm(new, dim=0)
        return magnitude / norm


def _unmerged(module: Any) -> Tensor:
    """The layer's weight without the adapters that are merged into it by now: what `forward` sees."""
    with module._unmerged_base_weight() as weight:
        found: Tensor = weight
    return found
