"""LoRAs that diffusers itself loads, before and after accelerate(plan="fp8")."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fp8 import bits, converted
from support.pipes import lora_state, relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind

import fusedit
from fusedit.float8.linear import Float8Linear

NAMES = ("to_q", "to_out", "net.0", "net.2", "proj_mlp", "proj_out", "w1", "w2")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute"),
    pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters, an inconsistency"),
]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def load(pipe: Any, names: tuple[str, ...] = NAMES, seed: int = 0) -> None:
    plain = FLUX.pipe() if type(pipe).__name__.startswith("Flux") else Z_IMAGE.pipe()
    pipe.load_lora_weights(lora_state(plain, names=names, seed=seed), adapter_name=f"a{seed}")


@each_kind
@pytest.mark.parametrize("order", ["lora first", "fp8 first"])
def test_effect_and_scale(kind: Kind, order: str) -> None:
    """LQ-01, LQ-02, LQ-07: loads in both orders, acts as on the unquantised model, and at 0 is the base exactly."""
    stock, pipe = kind.pipe(), kind.pipe()
    plain = kind.call(stock)
    load(stock)
    if order == "lora first":
        load(pipe)
        fusedit.accelerate(pipe, "fp8")
        pipe.disable_lora()
        base = kind.call(pipe)
        pipe.enable_lora()
    else:
        fusedit.accelerate(pipe, "fp8")
        base = kind.call(pipe)
        load(pipe)
    assert {p.dtype for name, p in pipe.transformer.named_parameters() if "lora_" in name} == {torch.float32}
    for scale in (1.0, 4.0):
        for each in (stock, pipe):
            each.set_adapters("a0", scale)
        right, made = kind.call(stock), kind.call(pipe)
        assert torch.isfinite(made).all()
        assert relative(made - base, right - plain) < 0.35, "weaker, stronger or noise"
        assert correlation(made - base, right - plain) > 0.95
    assert relative(right, plain) > 0.1, "the LoRA has no effect: the test shows nothing"
    pipe.set_adapters("a0", 0.0)
    assert torch.equal(kind.call(pipe), base)
    pipe.unload_lora_weights()
    assert torch.equal(kind.call(pipe), base)


def test_a_lora_of_the_modulation_at_scale_zero_changes_the_order_of_sums_alone() -> None:
    pipe = FLUX.pipe()
    fusedit.accelerate(pipe, "fp8")
    base = FLUX.call(pipe)
    load(pipe, ("norm1.linear", "norm.linear"))
    assert relative(FLUX.call(pipe), base) > 0.05
    pipe.set_adapters("a0", 0.0)
    assert relative(FLUX.call(pipe), base) < 1e-5


def test_several_and_a_swap_leave_nothing_behind() -> None:
    """CMP-08, LQ-06: each state equals that of a pipeline made for it."""
    kind = FLUX
    pipe, fresh = kind.pipe(), kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    before, base = bits(pipe), kind.call(pipe)
    for seed in (1, 2):
        load(pipe, seed=seed)
    pipe.set_adapters(["a1", "a2"], [0.7, -0.4])
    both = kind.call(pipe)
    pipe.delete_adapters("a1")
    pipe.set_adapters("a2", 1.0)
    second = kind.call(pipe)
    fusedit.accelerate(fresh, "fp8")
    load(fresh, seed=2)
    assert relative(second, kind.call(fresh)) < 1e-4
    load(fresh, seed=1)
    fresh.set_adapters(["a1", "a2"], [0.7, -0.4])
    assert relative(both, kind.call(fresh)) < 0.02
    pipe.unload_lora_weights()
    assert torch.equal(kind.call(pipe), base)
    assert [name for name in before.differing(bits(pipe)) if "bias" not in name] == []


@each_kind
def test_fusing_and_unfusing_by_diffusers(kind: Kind) -> None:
    """LQ-03 to LQ-05: codes are never added to; twenty cycles leave every bit."""
    pipe, stock = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    load(pipe)
    load(stock)
    stock.fuse_lora()
    before = {path: layer.weight.detach().clone().view(torch.uint8) for path, layer in converted(pipe).items()}
    for _ in range(20):
        pipe.fuse_lora()
        pipe.unfuse_lora()
    unfused = kind.call(pipe)
    pipe.fuse_lora()
    assert relative(kind.call(pipe), kind.call(stock)) < 0.1
    for path, layer in converted(pipe).items():
        assert torch.equal(layer.weight.view(torch.uint8), before[path])
    assert any("side branch" in note for note in handle.report().notes)
    pipe.unfuse_lora()
    assert torch.equal(kind.call(pipe), unfused)


def test_a_delta_far_below_a_step_of_the_codes_is_not_lost() -> None:
    """LQ-03."""
    torch.manual_seed(0)
    stock = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        stock.weight.normal_()
    made = Float8Linear.convert(stock, activations=False, keep=False)
    down, up = torch.randn(4, 64), torch.randn(64, 4) * 1e-4
    x = torch.randn(8, 64)
    with torch.no_grad():
        base = made(x)
        made.branches = {"a": [(down, up, 1.0)]}
        assert relative(made(x) - base, x @ (up @ down).T) < 0.01


@each_kind
@pytest.mark.parametrize("order", ["lora first", "fp8 first"])
def test_dora_reads_values_and_not_codes(kind: Kind, order: str) -> None:
    """LF-09 on e4m3: peft asks for the weight's norm, which has to be that of its values."""
    from peft import LoraConfig

    def add(pipe: Any) -> None:
        torch.manual_seed(5)
        targets = ["to_q", "to_k"]
        pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, use_dora=True, target_modules=targets), "d")
        for name, p in pipe.transformer.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                torch.nn.init.normal_(p, std=0.5)
        pipe.transformer.requires_grad_(False)

    stock, pipe = kind.pipe(), kind.pipe()
    plain = kind.call(stock)
    add(stock)
    if order == "lora first":
        add(pipe)
        fusedit.accelerate(pipe, "fp8")
    else:
        fusedit.accelerate(pipe, "fp8")
        add(pipe)
    right = kind.call(stock)
    assert relative(right, plain) > 0.02, "DoRA has no effect: the test shows nothing"
    base = relative(kind.call(accelerated(kind)), plain)
    assert relative(kind.call(pipe), right) < 3 * base + 0.01


def accelerated(kind: Kind) -> Any:
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    return pipe


def test_a_module_that_reads_its_layers_dtype_gets_the_compute_dtype() -> None:
    """LQ-04, LQ-09: codes are told by the parameter itself, and the layer says what it computes in."""
    pipe = FLUX.pipe().to(torch.bfloat16)
    fusedit.accelerate(pipe, "fp8")
    for layer in converted(pipe).values():
        assert layer.weight.dtype is torch.float8_e4m3fn
        assert layer.compute_dtype is torch.bfloat16
        assert layer.dequantize().dtype is torch.bfloat16
    load(pipe)
    lora = {p.dtype for name, p in pipe.transformer.named_parameters() if "lora_" in name}
    assert not any(dtype.itemsize == 1 for dtype in lora)
