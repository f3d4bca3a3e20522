"""LoRAs over e4m3 weights are compared with their matrices after each change, before a picture is made of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft.tuners.lora.layer as peft_layers
import pytest
import torch
from support.fp8 import bits, converted
from support.loras import differing, mixed_state, pieces
from support.pipes import lora_state
from support.runs import FLUX, Z_IMAGE, Kind, at_step, each_kind
from test_life_float8 import with_norms

import fusedit
from fusedit.errors import LoraError
from fusedit.float8 import conversion
from fusedit.float8 import linear as float8_linear
from fusedit.lora import verifier, watching
from fusedit.lora.adapters import tuner_layers
from fusedit.lora.life import load_file
from fusedit.lora.probes import Probes, found
from fusedit.lora.probing import compared, joined
from fusedit.runtime import terms
from fusedit.runtime.branches import Branch

Patch = pytest.MonkeyPatch
Forward = Callable[..., torch.Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute"),
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
]


def quantised(kind: Kind, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, fusedit.Handle]:
    pipe = kind.pipe()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.data = tensor.data.to(dtype)
    return pipe, fusedit.accelerate(pipe, "fp8", **changes)


def told(handle: fusedit.Handle) -> list[str]:
    return [note.removeprefix("transformer: ") for note in handle.report().notes if "erified" in note]


def a_lora(pipe: Any, seed: int = 0, size: float = 0.2) -> dict[str, torch.Tensor]:
    return mixed_state(pipe, seed, size=size).tensors


class Looks:
    """How many layers, and shares of terms, each look compared."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.layers: list[int] = []
        self.packed: list[int] = []
        self.worst = 0.0
        monkeypatch.setattr(verifier, "found", self)

    def __call__(self, probes: Probes) -> Any:
        packed = sum("(packed)" in probe.path for probe in probes.asked)
        self.packed.append(packed)
        self.layers.append(len(probes.asked) - packed)
        results = found(probes)
        self.worst = max(self.worst, *(result.added for result in results))
        return results


BROKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "twice": lambda y, y0: y + (y - y0),
    "nothing": lambda _, y0: y0,
    "noise": lambda y, _: torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y),
    "NaN": lambda y, _: torch.full_like(y, float("nan")),
    "one output": lambda y, y0: torch.cat([y[..., :-1], y0[..., -1:]], dim=-1),
}
each_break = pytest.mark.parametrize("how", BROKEN)


def broken(monkeypatch: Patch, how: str) -> None:
    """peft's forward as a version might have it that does not go with quantised layers."""
    forward: Forward = peft_layers.Linear.forward

    def other(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return BROKEN[how](forward(self, x, *args, **kwargs), self.base_layer(x))

    monkeypatch.setattr(peft_layers.Linear, "forward", other)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_good_ones_pass_however_they_are_loaded_scaled_and_fused(
    kind: Kind, dtype: torch.dtype, monkeypatch: Patch
) -> None:
    looks = Looks(monkeypatch)
    pipe, handle = quantised(kind, dtype)
    report = fusedit.load_lora(pipe, a_lora(pipe), "a", 0.8)
    assert looks.layers == [report.matched]
    kind.call(pipe)
    assert told(handle)[0].startswith(f"LoRAs verified on {report.matched} layers, ")
    pipe.load_lora_weights(lora_state(kind.pipe(), rank=24, scale=0.05, seed=1), adapter_name="b")
    assert told(handle) == ["LoRAs are verified in the next call"]
    kind.call(pipe)
    assert told(handle)[0].startswith("LoRAs verified on ")
    for scales in ([-1.0, 1e-3], [3.0, 0.0]):
        pipe.set_adapters(["a", "b"], scales)
        kind.call(pipe)
    fusedit.set_loras(pipe, {"b": 2.0})
    kind.call(pipe)
    pipe.set_adapters(["a", "b"], [0.5, 0.5])
    pipe.fuse_lora()
    kind.call(pipe)
    assert told(handle)[0].startswith(f"LoRAs verified on {len(converted(pipe))} layers, ")
    pipe.unfuse_lora()
    kind.call(pipe)
    assert len(looks.layers) == 9
    assert sum(looks.packed) > len(converted(pipe))
    assert 0 < looks.worst < 0.5


@each_kind
@each_break
def test_noise_is_refused_by_load_lora_and_nothing_has_changed(kind: Kind, how: str, monkeypatch: Patch) -> None:
    """LQ-07: no static without an error."""
    pipe, _ = quantised(kind)
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    before, base = pieces(pipe), kind.call(pipe)
    with monkeypatch.context() as patch:
        broken(patch, how)
        words = "gives NaN" if how == "NaN" else "adds something else than its matrices say, off by "
        with pytest.raises(LoraError, match=rf"^LoRA 'a', 'b' at layer \S+ {words}.* \(peft [\d.]+, diffusers"):
            fusedit.load_lora(pipe, a_lora(pipe, 1), "b")
    assert differing(pieces(pipe), before) == []
    assert list(pipe.transformer.peft_config) == ["a"]
    assert torch.equal(kind.call(pipe), base)


def test_the_first_of_all_loras_leaves_the_stock_layers_there() -> None:
    """LQ-07."""
    pipe, _ = quantised(FLUX)
    before, everything = bits(pipe), pieces(pipe)
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, "noise")
        with pytest.raises(LoraError, match="adds something else"):
            fusedit.load_lora(pipe, a_lora(pipe), "a")
    assert before.differing(bits(pipe)) == []
    assert differing(pieces(pipe), everything) == []
    assert tuner_layers(pipe.transformer) == []


@each_kind
@pytest.mark.parametrize("how", ["twice", "noise", "NaN"])
def test_what_diffusers_loads_raises_in_each_call_until_it_is_right(kind: Kind, how: str, monkeypatch: Patch) -> None:
    """LQ-07."""
    pipe, handle = quantised(kind)
    pipe.load_lora_weights(lora_state(kind.pipe()), adapter_name="a")
    with monkeypatch.context() as patch:
        broken(patch, how)
        for _ in range(2):
            with pytest.raises(LoraError, match=r"^LoRA 'a' at layer "):
                kind.call(pipe)
        assert told(handle) == ["LoRAs are verified in the next call"]
    kind.call(pipe)
    assert told(handle)[0].startswith("LoRAs verified on ")


def test_set_loras_puts_back_what_was_active() -> None:
    """LQ-07."""
    pipe, _ = quantised(FLUX)
    for i, name in enumerate("ab"):
        fusedit.load_lora(pipe, a_lora(pipe, i), name, 0.5)
    pipe.disable_lora()

    def settings() -> list[Any]:
        layers = [layer for _, layer in tuner_layers(pipe.transformer)]
        return [(x.active_adapters, x.disable_adapters, dict(x.scaling)) for x in layers]

    before, everything = settings(), pieces(pipe)
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, "twice")
        with pytest.raises(LoraError, match=r"LoRA 'b' at layer"):
            fusedit.set_loras(pipe, {"b": 2.0})
    assert settings() == before
    assert differing(pieces(pipe), everything) == []


def test_a_scale_of_the_codes_that_is_wrong_is_seen_beside_the_original_weights() -> None:
    pipe, _ = quantised(FLUX)
    wrong = pipe.transformer.single_transformer_blocks[1].attn.to_k
    wrong.weight_scale.mul_(2)
    before = bits(pipe)
    with pytest.raises(
        LoraError, match=r"single_transformer_blocks\.1\.attn\.to_k stands over e4m3 weights that are not"
    ):
        fusedit.load_lora(pipe, a_lora(pipe), "a")
    assert before.differing(bits(pipe)) == []


def test_a_product_that_applies_the_scale_wrongly_is_seen_without_original_weights(monkeypatch: Patch) -> None:
    pipe, _ = quantised(Z_IMAGE, originals="drop")
    scaled = float8_linear.scaled

    def twice(x: Any, weight: torch.Tensor, scale: torch.Tensor, *args: Any) -> torch.Tensor:
        return scaled(x, weight, 2 * scale, *args)

    monkeypatch.setattr(float8_linear, "scaled", twice)
    with pytest.raises(LoraError, match=r"stands over a product with e4m3 weights that is itself wrong, by "):
        fusedit.load_lora(pipe, a_lora(pipe), "a")


def test_a_side_branch_at_another_scale_is_seen(monkeypatch: Patch) -> None:
    pipe, _ = quantised(FLUX)
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    pipe.fuse_lora()
    right = float8_linear.Float8Linear._with_branches
    monkeypatch.setattr(
        float8_linear.Float8Linear, "_with_branches", lambda self, y, x: right(self, right(self, y, x), x)
    )
    with pytest.raises(LoraError, match=r"^LoRA 'a' at layer .* off by 100% of that"):
        FLUX.call(pipe)


@each_kind
@pytest.mark.parametrize("what", ["down", "up", "scale", "half the scale", "NaN in the padding"])
def test_matrices_packed_wrongly_are_seen_in_the_first_call(kind: Kind, what: str, monkeypatch: Patch) -> None:
    """LQ-07 of our own making."""
    pipe, _ = quantised(kind)
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    fill = terms._filled

    def wrong(*args: Any) -> Any:
        made = fill(*args)
        term, copies = made[0], made[-1]
        if copies and what == "NaN in the padding":
            term.up[:, -1] = float("nan")
        elif what == "half the scale":
            term.scale.mul_(0.5)
        elif copies:
            part = getattr(term, what)
            part.copy_(part.roll(1, 0) if what == "up" else -part.float())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(terms, "_filled", wrong)
        words = "gives NaN or infinity" if "NaN" in what else "adds something else"
        with pytest.raises(LoraError, match=rf"^LoRA 'a' at layer \S+ \(packed\) {words}"):
            kind.call(pipe)


@each_kind
def test_it_looks_once_after_each_change(kind: Kind, monkeypatch: Patch) -> None:
    looks = Looks(monkeypatch)
    walks: list[int] = []
    monkeypatch.setattr(watching, "adapted", lambda module: walks.append(1) or verifier.adapted(module))
    pipe, _ = quantised(kind)
    kind.call(pipe)
    assert (looks.layers, len(walks)) == ([], 1)
    count = fusedit.load_lora(pipe, a_lora(pipe), "a").matched
    kind.call(pipe)
    assert looks.layers == [count, 0]  # by the load; the call compares what it has packed
    assert looks.packed[0] == 0 < looks.packed[1]
    assert len(walks) == 2, "a run of several steps looks at what is active once"
    for _ in range(2):
        kind.call(pipe)
    if kind is FLUX:  # Z-Image takes no scale for one call
        for _ in range(2):
            kind.call(pipe, joint_attention_kwargs={"scale": 0.3})
    assert len(looks.layers) == 2
    pipe.set_adapters("a", 0.5)
    for _ in range(2):
        kind.call(pipe)
    assert looks.layers == [count, 0, count]
    pipe.disable_lora()
    for _ in range(2):
        kind.call(pipe)
    pipe.enable_lora()
    for _ in range(2):
        kind.call(pipe)
    assert looks.layers == [count, 0, count, count]


def test_a_change_in_the_middle_of_a_run_is_seen_in_that_run(monkeypatch: Patch) -> None:
    looks = Looks(monkeypatch)
    pipe, _ = quantised(FLUX)
    state = lora_state(FLUX.pipe())
    FLUX.call(pipe, **at_step(0, lambda each, _: each.load_lora_weights(state, adapter_name="a")))
    assert len(looks.layers) == 1
    assert looks.layers[0] > 0
    assert looks.packed[0] > 0


def test_an_exact_pipeline_has_nothing_to_verify(monkeypatch: Patch) -> None:
    looks = Looks(monkeypatch)
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe)
    broken(monkeypatch, "twice")
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    FLUX.call(pipe)
    assert (looks.layers, told(handle)) == ([], [])


def test_weights_that_were_e4m3_before_need_no_accelerate() -> None:
    """LQ-07 on what a checkpoint loads."""
    pipe = FLUX.pipe()
    conversion.convert(pipe.transformer, {"single_transformer_blocks.0.proj_mlp": "fp8"}, "drop")
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, "noise")
        with pytest.raises(LoraError, match="adds something else"):
            fusedit.load_lora(pipe, a_lora(pipe), "a")
    fusedit.load_lora(pipe, a_lora(pipe), "a")


def test_dora_is_looked_at_for_nan_alone_and_a_hooked_layer_not_at_all() -> None:
    pipe, handle = quantised(FLUX)
    matched = load_file(pipe, with_norms(FLUX.pipe(), columns=False), None, "d").matched
    FLUX.call(pipe)
    assert told(handle) == []
    only = (
        f"transformer: {matched} layers looked at for NaN and infinity alone (DoRA or a bias: more than two matrices)"
    )
    assert only in handle.report().notes
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, "NaN")
        with pytest.raises(LoraError, match="gives NaN or infinity"):
            fusedit.set_loras(pipe, {"d": 0.5})
    fusedit.unload_lora(pipe, "d")
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    calls: list[int] = []
    layer = pipe.transformer.transformer_blocks[1].attn.to_q
    layer.register_forward_hook(lambda *_: calls.append(1))
    fusedit.set_loras(pipe, {"a": 0.5})
    assert calls == []
    assert told(handle)[0].endswith("; 1 layers not looked at (a hook)")


def test_under_offload_it_waits_for_the_call_and_says_why_it_cannot(monkeypatch: Patch) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    looks = Looks(monkeypatch)
    pipe, handle = quantised(FLUX)
    add_hook_to_module(pipe.transformer, ModelHook())
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    assert looks.layers == []
    assert told(handle) == ["LoRAs are verified in the next call"]
    watching.Watcher(pipe.transformer, terms.Terms(SimpleNamespace(run=None))).look(None, torch.empty(0, device="meta"))
    assert told(handle) == ["LoRAs are not verified: weights and matrices are not on one device (offload)"]
    FLUX.call(pipe)
    assert len(looks.layers) == 1
    assert told(handle)[0].startswith("LoRAs verified on ")


def test_large_models_on_a_cpu_wait_for_the_call(monkeypatch: Patch) -> None:
    looks = Looks(monkeypatch)
    pipe, handle = quantised(FLUX)
    monkeypatch.setattr(verifier, "_ON_CPU", 1000)
    fusedit.load_lora(pipe, a_lora(pipe), "a")
    assert told(handle) == ["LoRAs are verified in the next call"]
    FLUX.call(pipe)
    assert len(looks.layers) == 1


def test_nothing_is_launched_while_a_graph_is_captured(monkeypatch: Patch) -> None:
    looks = Looks(monkeypatch)
    pipe, _ = quantised(FLUX)
    pipe.load_lora_weights(lora_state(FLUX.pipe()), adapter_name="a")
    watcher = watching.Watcher(pipe.transformer, terms.Terms(SimpleNamespace(run=None)))
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    watcher.look(None, x)
    assert looks.layers == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    watcher.look(None, x)
    assert len(looks.layers) == 1


@pytest.mark.parametrize("size", [1.0, 0.1, 0.02, 0.01, 0.005, 0.001, 1e-4])
def test_a_weak_lora_twice_too_strong_is_told_from_rounding(size: float) -> None:
    """Below a step of bf16 rounding takes most of it away, which is no fault."""
    generator = torch.Generator().manual_seed(0)
    K, N, R = 256, 3072, 8
    x = torch.randn(8, K, generator=generator).bfloat16()
    base = (x.float() @ torch.randn(K, N, generator=generator)).bfloat16()
    down, up = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((R, K), (N, R)))
    scale = size / R**0.5
    added = torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
    for factor in (1, 2, 0):
        d = (base + added * scale * factor).float() - base.float()
        pairs = [joined([Branch(down, up, scale)], base.new_empty(N, K))]
        each, together, _ = (float(v) for v in compared(d[None], base[None], x.float(), pairs, torch.bfloat16))
        assert (max(each, together) <= 1) is (factor == 1 or size <= 0.001), (factor, each, together)


def test_a_lora_whose_square_fp32_does_not_hold_is_right_all_the_same() -> None:
    pipe, handle = quantised(FLUX, torch.bfloat16)
    strong = {key: t * (1e20 if "lora_B" in key else 1) for key, t in a_lora(pipe).items() if "to_q" in key}
    fusedit.load_lora(pipe, strong, "a")
    assert any(note.startswith("LoRAs verified on ") for note in told(handle))


def test_another_kind_of_adapter_is_told_and_not_taken_for_a_lora() -> None:
    from peft import LoHaConfig, inject_adapter_in_model

    pipe, handle = quantised(FLUX)
    inject_adapter_in_model(LoHaConfig(target_modules=["to_q"]), pipe.transformer, "h")
    assert [note for note in handle.report().notes if "'h'" in note] == ["LoRA 'h' is active: on 5 layers"]
