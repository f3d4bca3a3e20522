"""LoRAs of mixed ranks and alphas, what they add to weights written out, and a look at everything a LoRA may change."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Mixed(NamedTuple):
    """A LoRA in diffusers' layout with an alpha for some layers.

    Attributes:
        tensors: its keys.
        deltas: module path -> what it adds to that weight at scale 1.
    """

    tensors: dict[str, torch.Tensor]
    deltas: dict[str, torch.Tensor]

    def add_to(self, pipe: Any, scale: float) -> None:
        """W + scale * delta, into the weights."""
        with torch.no_grad():
            for path, delta in self.deltas.items():
                pipe.transformer.get_parameter(f"{path}.weight").add_(delta, alpha=scale)


def mixed_state(pipe: Any, seed: int = 0, names: tuple[str, ...] = (), size: float = 0.2) -> Mixed:
    """A LoRA for every linear layer, or those that a name is part of, of rank 1 to 6; every second one has an alpha."""
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for i, (path, layer) in enumerate(linear_layers(pipe.transformer).items()):
        if names and not any(name in path for name in names):
            continue
        rank = 1 + (i + seed) % 6
        down = torch.randn(rank, layer.in_features, generator=generator) * size
        up = torch.randn(layer.out_features, rank, generator=generator) * size
        alpha = float(1 + i % 5) if i % 2 else None
        tensors[f"transformer.{path}.lora_A.weight"] = down
        tensors[f"transformer.{path}.lora_B.weight"] = up
        if alpha is not None:
            tensors[f"transformer.{path}.alpha"] = torch.tensor(alpha)
        deltas[path] = (1.0 if alpha is None else alpha / rank) * up @ down
    return Mixed(tensors, deltas)


def linear_layers(module: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Path -> linear layer of the stock model, also below LoRA layers."""
    return {
        path.removesuffix(".base_layer"): layer
        for path, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in path
    }


Pieces = dict[str, Any]


def pieces(pipe: Any) -> Pieces:
    """Every module (by identity and class), every parameter (by identity and bits) and what peft leaves on a module."""
    found: Pieces = {}
    for part, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for path, module in component.named_modules():
            found[f"{part}.{path} module"] = (id(module), type(module))
            found[f"{part}.{path} attributes"] = sorted(
                name
                for name in vars(module)
                if name != "_diffusers_hook"  # stock sets it in the first call
            )
        for path, parameter in component.named_parameters():
            found[f"{part}.{path}"] = (id(parameter), parameter.requires_grad, parameter.detach().clone())
    return found


def differing(a: Pieces, b: Pieces) -> list[str]:
    """What is not the same in both, be it by one bit."""
    return [key for key in sorted(a.keys() | b.keys()) if key not in a or key not in b or not _same(a[key], b[key])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(a[-1], torch.Tensor):
        return bool(a[:-1] == b[:-1] and torch.equal(a[-1], b[-1]))
    return bool(a == b)
