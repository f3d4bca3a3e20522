"""LoRAs inside the products of whole models: the pictures are those of stock, in both tiers, with nothing stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.loras import mixed_state
from support.pipes import relative
from support.runs import Kind, each_kind

import fusedit
from fusedit import ops
from fusedit.lora.adapters import tuner_layers
from fusedit.models._lora_ready import lora_ready
from fusedit.runtime import terms as terms_of

CLOSE = 2e-5
PARTS = {
    "all": (),
    "q and the feed-forward layer": ("to_q", "net.0.proj", "proj_mlp", "w3"),
    "outputs": ("to_out", "to_add_out", "net.2", "proj_out", "w2"),
    "modulation": ("norm1", "norm.linear", "norm_out", "adaLN"),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns each first half of a term had."""
    seen: list[int] = []

    def count(op: Any) -> None:
        plain = op.unchecked

        def counting(x: Any, down: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(down))
            return plain(x, down, *args, **kwargs)

        monkeypatch.setattr(op, "unchecked", counting)

    count(ops.low_rank)
    count(ops.scaled_low_rank)
    return seen


def terms(handle: fusedit.Handle) -> Any:
    return next(cache for cache in handle.report().caches if cache.name == "LoRA terms")


def load(pipe: Any, name: str, *, seed: int = 0, names: tuple[str, ...] = (), size: float = 0.2) -> None:
    fusedit.load_lora(pipe, dict(mixed_state(pipe, seed, names, size).tensors), name)


@each_kind
@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_exact_pictures_are_those_of_stock(kind: Kind, names: tuple[str, ...], counted: list[int]) -> None:
    """Ranks 1 to 6 side by side, some layers without; then a second adapter, other scales, and none."""
    reference, pipe = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe)
    plain = kind.call(pipe)
    assert counted == []
    for each in (reference, pipe):
        load(each, "a", names=names)
    first = kind.call(pipe)
    assert relative(first, kind.call(reference)) < CLOSE
    assert relative(first, plain) > 1e-3
    assert counted
    for each in (reference, pipe):
        load(each, "b", seed=3, names=names)
        fusedit.set_loras(each, {"a": 0.3, "b": -1.2})
    assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    for each in (reference, pipe):
        fusedit.set_loras(each, {"a": 0.0, "b": 0.5})
    assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    assert terms(handle).reasons == {}
    assert all(site.stock == 0 for site in handle.report().rewritten), "nothing falls back for a LoRA"
    for name in ("a", "b"):
        fusedit.unload_lora(pipe, name)
    assert torch.equal(kind.call(pipe), plain)
    assert terms(handle).entries == terms(handle).bytes == 0


@each_kind
def test_one_pass_reads_what_layers_share(kind: Kind, counted: list[int]) -> None:
    pipe = kind.pipe()
    fusedit.accelerate(pipe)
    load(pipe, "a", names=("attn.to_", "attention.to_"))
    kind.call(pipe)
    layers = [path for path, _ in tuner_layers(pipe.transformer) if path.endswith(("to_q", "to_k", "to_v"))]
    assert sum(width == 24 for width in counted) * 3 >= len(layers)  # three layers of 8 ranks each, padded
    assert set(counted) <= {8, 24, 32}


@each_kind
@pytest.mark.parametrize(("which", "size"), tuple(zip(PARTS, (0.1, 0.15, 0.1, 0.3), strict=True)))
def test_fp8_pictures_are_those_of_the_tier(
    kind: Kind, which: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far from stock with the same LoRA as without one, and near to what the products give without terms."""
    reference, pipe = kind.pipe(), kind.pipe()
    plain = kind.call(reference)
    handle = fusedit.accelerate(pipe, "fp8")
    own = relative(kind.call(pipe), plain)
    for each in (reference, pipe):
        load(each, "a", names=PARTS[which], size=size)
    stock, made = kind.call(reference), kind.call(pipe)
    assert relative(made, stock) < min(2.5 * own, 0.8 * relative(stock, plain))
    assert terms(handle).reasons == {}
    sites = {site.site: site.fused for site in handle.report().rewritten}
    assert sites[f"{kind.name}.fp8"] > 0
    monkeypatch.setattr(terms_of, "MOST_RANKS", 0)
    behind = kind.call(pipe)
    assert any("ranks" in reason for reason in terms(handle).reasons)
    assert relative(made, behind) < 2.5 * own


@each_kind
def test_fp8_norms_give_rows_to_layers_with_loras(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass quantises for itself what a norm has made, with a LoRA as without."""
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    passes: list[int] = []
    plain = ops.quantize_rows.unchecked

    def counting(x: Any, **kwargs: Any) -> Any:
        if x.ndim == 3:  # and no matrix of a LoRA
            passes.append(x.shape[-1])
        return plain(x, **kwargs)

    monkeypatch.setattr(ops.quantize_rows, "unchecked", counting)
    kind.call(pipe)
    without = len(passes)
    load(pipe, "a")
    passes.clear()
    kind.call(pipe)
    assert len(passes) == without > 0


@each_kind
@pytest.mark.parametrize("base", ["exact", "fp8"])
def test_edits_within_a_run_are_taken_at_once(kind: Kind, base: str) -> None:
    def edit(pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            for _, layer in tuner_layers(pipe.transformer):
                if i == 0:
                    layer.lora_A["a"].weight.mul_(0.5)
                elif i == 1:
                    layer.set_scale("a", 3.0)
                else:
                    layer.lora_B["a"].weight.neg_()
        return kwargs

    results = []
    for accelerated in (True, False):
        pipe = kind.pipe()
        if accelerated:
            fusedit.accelerate(pipe, base)
        load(pipe, "a", size=0.1)
        results.append(kind.call(pipe, num_inference_steps=5, callback_on_step_end=edit))
    assert relative(*results) < (CLOSE if base == "exact" else 0.2)


@each_kind
def test_what_was_fused_beside_codes_is_a_term_too(kind: Kind, counted: list[int]) -> None:
    reference, pipe = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    own = relative(kind.call(pipe), kind.call(reference))
    for each in (reference, pipe):
        load(each, "a", size=0.1)
        each.fuse_lora()
        each.unload_lora_weights()
    assert relative(kind.call(pipe), kind.call(reference)) < 2.5 * own
    assert counted
    assert terms(handle).reasons == {}


@each_kind
def test_a_layer_that_has_to_be_called_is_called(kind: Kind) -> None:
    """One hook on one LoRA layer: that group goes another way, and its hook sees it."""
    reference, pipe = kind.pipe(), kind.pipe()
    fusedit.accelerate(pipe)
    seen: list[torch.Size] = []
    for each in (reference, pipe):
        load(each, "a")
        layer = next(layer for path, layer in tuner_layers(each.transformer) if path.endswith("to_k"))
        layer.register_forward_hook(lambda _module, _args, y: seen.append(y.shape) or 2 * y)
    assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    assert len(seen) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"bias": True, "gelu": True}, {"bias": False, "swiglu": True}], ids=str)
def test_all_that_a_lora_may_need_is_launched_before_there_is_one(dtype: torch.dtype, options: dict[str, bool]) -> None:
    """On a GPU these compile; tests there see that nothing else does."""
    used = ["low_rank", "scaled_low_rank", "add_low_rank", "linear_low_rank", "scaled_linear"]
    used += ["linear_gelu", "scaled_linear_gelu"] if "gelu" in options else ["linear_swiglu", "scaled_linear_swiglu"]
    for name in used:
        ops.registry()[name].ran.clear()
    lora_ready(torch.zeros(1, 3, 8, dtype=dtype), codes=True, **options)
    assert all(ops.registry()[name].ran["plain"] for name in used)


@each_kind
@pytest.mark.parametrize("base", ["exact", "fp8"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_another_default_dtype_changes_nothing(kind: Kind, base: str, default: torch.dtype) -> None:
    """Other code may have called torch.set_default_dtype: what is made here says which dtype it has."""
    reference, pipe = kind.pipe(), kind.pipe()
    torch.set_default_dtype(default)
    try:
        fusedit.accelerate(pipe, base)
        for each in (reference, pipe):
            load(each, "a", size=0.1)
        distance = relative(kind.call(pipe), kind.call(reference))
    finally:
        torch.set_default_dtype(torch.float32)
    assert distance < (1e-3 if base == "exact" else 0.2)


@each_kind
@pytest.mark.parametrize("small", [2.0**-95, 2.0**-113])
def test_a_lora_is_not_lost_however_small_its_first_half(kind: Kind, small: float) -> None:
    """Rows of numbers below 2^-91 count as zeros where activations are quantised. A power of two rounds nothing."""
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    plain, made = kind.call(pipe), []
    for factors in ({}, {"lora_A": small, "lora_B": 1 / small}):
        state = dict(mixed_state(pipe, 0, (), 0.1).tensors)
        for key, tensor in state.items():
            state[key] = tensor * next((by for name, by in factors.items() if name in key), 1)
        fusedit.load_lora(pipe, state, "a")
        made.append(kind.call(pipe))
        fusedit.unload_lora(pipe, "a")
    assert relative(made[0], plain) > 0.05
    assert relative(*made) < 1e-3
