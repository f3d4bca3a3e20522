"""Random sequences of everything that can be done to LoRAs, on a stock pipeline and an accelerated one: pictures agree
after every step, and whenever no LoRA has touched the weights they are the first ones again.

Scales stay alone while something is fused: stock then subtracts the new scale, not the one that it has added.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.loras import linear_layers, mixed_state
from support.pipes import relative
from support.runs import Kind, each_kind

import fusedit
from fusedit.errors import LoraError

CLOSE = 5e-5
STEPS = 14
SUBSETS = ((), ("attn", "attention"), ("norm", "adaLN", "proj_out", "final"), ("embed", "ff", "feed_forward"))


class Pair:
    """The two pipelines, and what a sequence has done to them."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.random = kind, random.Random(seed)
        self.stock, self.ours = kind.pipe(), kind.pipe()
        self.plain = kind.call(self.stock, num_inference_steps=2)
        self.bits = {path: layer.weight.detach().clone() for path, layer in self.layers(self.ours)}
        self.handle = fusedit.accelerate(self.ours)
        self.count = 0
        self.touched = False  # a LoRA was fused and then unloaded: its effect stays in the weights

    def layers(self, pipe: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
        yield from linear_layers(pipe.transformer).items()

    def names(self) -> list[str]:
        return list(self.ours.get_list_adapters().get("transformer", []))

    def some(self) -> list[str]:
        return self.random.sample(self.names(), self.random.randint(1, len(self.names())))

    def fused_layers(self) -> set[str]:
        modules = self.ours.transformer.named_modules()
        return {path for path, module in modules if hasattr(module, "base_layer") and module.merged}

    def beside_fused(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether a LoRA would come upon a layer into which another one is fused."""
        return any(f"transformer.{path}.lora_A.weight" in state for path in self.fused_layers())

    def both(self, method: str, *args: Any, **kwargs: Any) -> None:
        for pipe in (self.stock, self.ours):
            getattr(pipe, method)(*args, **kwargs)

    # -- what may be done -------------------------------------------------------------------------------------------

    def load(self) -> None:
        if len(self.names()) > 2:
            return
        self.count += 1
        name, scale = f"n{self.count}", self.random.choice([1.0, 0.4, -0.8])
        state = mixed_state(self.ours, self.count, self.random.choice(SUBSETS), 0.15).tensors
        for pipe in (self.ours, self.stock):
            if self.beside_fused(state):
                with pytest.raises(LoraError, match="is fused into it"):
                    fusedit.load_lora(pipe, state, name, scale)
            else:
                fusedit.load_lora(pipe, state, name, scale)

    def load_by_diffusers(self) -> None:
        if len(self.names()) > 2 or self.ours.num_fused_loras:
            return
        self.count += 1
        tensors = mixed_state(self.ours, self.count, ("attn", "attention"), 0.15).tensors
        state = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
        for pipe in (self.stock, self.ours):
            pipe.load_lora_weights(dict(state), adapter_name=f"d{self.count}")

    def set(self) -> None:
        chosen = {name: self.random.choice([1.0, 0.3, -1.0, 0.0]) for name in self.some()} if self.names() else {}
        for pipe in (self.ours, self.stock):
            if self.fused_layers():
                with pytest.raises(LoraError, match="scales are frozen"):
                    fusedit.set_loras(pipe, chosen)
            else:
                fusedit.set_loras(pipe, chosen)

    def set_by_diffusers(self) -> None:
        if self.names() and not self.ours.num_fused_loras:
            some = self.some()
            self.both("set_adapters", some, [self.random.choice([0.7, -0.2]) for _ in some])

    def fuse(self) -> None:
        if self.names():
            scale = 1.0 if self.ours.num_fused_loras else self.random.choice([1.0, 0.6])
            self.both("fuse_lora", lora_scale=scale, adapter_names=self.some())

    def unfuse(self) -> None:
        if self.fused_layers():
            for pipe in (self.stock, self.ours):
                for module in pipe.transformer.modules():  # peft warns of each layer that is not merged
                    if hasattr(module, "base_layer") and module.merged:
                        module.unmerge()
            self.both("unfuse_lora")

    def switch(self) -> None:
        if self.names():
            self.both(self.random.choice(["disable_lora", "enable_lora"]))

    def unload(self) -> None:
        if self.names():
            name = self.random.choice(self.names())
            if name in self.ours.fused_loras:
                self.unfuse()
            fusedit.unload_lora(self.ours, name)
            fusedit.unload_lora(self.stock, name)

    def delete(self) -> None:
        if self.names() and not self.ours.num_fused_loras:
            self.both("delete_adapters", self.random.choice(self.names()))

    def unload_all(self) -> None:
        self.touched |= bool(self.ours.num_fused_loras)
        self.both("unload_lora_weights")

    def accelerate_anew(self) -> None:
        if not self.ours.num_fused_loras:
            self.handle.restore()
            self.handle = fusedit.accelerate(self.ours)

    def step(self) -> str:
        weighted = {
            "load": 5, "load_by_diffusers": 2, "set": 3, "set_by_diffusers": 3, "fuse": 3, "unfuse": 2, "switch": 2,
            "unload": 2, "delete": 1, "unload_all": 1, "accelerate_anew": 1,
        }  # fmt: skip
        chosen = self.random.choices(list(weighted), list(weighted.values()))[0]
        getattr(self, chosen)()
        return chosen


@each_kind
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.filterwarnings("ignore:Already unmerged")
@pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted")
def test_any_sequence_equals_stock(kind: Kind, seed: int) -> None:
    pair = Pair(kind, seed)
    done: list[str] = []
    for _ in range(STEPS):
        done.append(pair.step())
        stock, ours = (kind.call(pipe, num_inference_steps=2) for pipe in (pair.stock, pair.ours))
        assert relative(ours, stock) < CLOSE, done
        assert pair.ours.fused_loras == pair.stock.fused_loras, done
        if not pair.touched and not pair.ours.num_fused_loras:
            edited = [path for path, layer in pair.layers(pair.ours) if not torch.equal(layer.weight, pair.bits[path])]
            assert edited == [], done
    if not pair.touched:
        pair.unfuse()
        for name in pair.names():
            fusedit.unload_lora(pair.ours, name)
        assert relative(kind.call(pair.ours, num_inference_steps=2), pair.plain) < CLOSE
