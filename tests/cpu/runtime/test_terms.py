"""Terms: what LoRA adds, packed, is never what it was before."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from fusedit.float8.linear import Float8Linear
from fusedit.ops._fp8 import quantized
from fusedit.ops._low_rank import low_rank
from fusedit.runtime import terms as terms_module
from fusedit.runtime.branches import split_for_packing
from fusedit.runtime.hoist import Run, RunCache
from fusedit.runtime.terms import MOST_RANKS, Term, Terms

Tensor = torch.Tensor
K = 24


def layer(N: int, ranks: tuple[int, ...], dtype: torch.dtype = torch.float32, codes: bool = False) -> Any:
    """A linear layer of K inputs with one adapter a rank, all active; without ranks as it is."""
    base = nn.Linear(K, N, dtype=dtype)
    if codes:
        Float8Linear.convert(base, activations=True, keep=False)
    made: Any = base
    for i, rank in enumerate(ranks):
        config = LoraConfig(r=rank, init_lora_weights=False)
        if made is base:
            made = LoraLinear(base, f"a{i}", config, r=rank, lora_alpha=rank / 2)
        else:
            made.update_layer(f"a{i}", r=rank, lora_alpha=3 * rank, config=config)
    if ranks:
        for i in range(len(ranks)):
            for half in (made.lora_A, made.lora_B):
                half[f"a{i}"].weight.data = torch.randn_like(half[f"a{i}"].weight).to(dtype)
        made.set_adapter([f"a{i}" for i in range(len(ranks))])
    return made.requires_grad_(False)


def parts(layers: list[Any]) -> list[Any]:
    return [split_for_packing(layer) for layer in layers]


def term(terms: Terms, layers: list[Any], form: Any = "parts", dtype: torch.dtype = torch.float32) -> Term | None:
    return terms.of(layers, parts(layers), dtype, form)


def dense(layers: list[Any], x: Tensor, divided: bool = False) -> Tensor:
    """What LoRA adds to each layer's output, written out.

    Args:
        divided: as the layers' products add it, in units of the codes, whose `down` is codes too.
    """
    added = []
    for part in parts(layers):
        delta = torch.zeros(len(part.base.weight), K)
        for down, up, scale in part.branches:
            rows, steps, _ = quantized(down.detach())
            kept = rows.float() * steps[:, None] if divided else down.detach().float()
            delta += scale * up.detach().float() @ kept
        added.append(x @ delta.T / (part.base.weight_scale if divided else 1.0))
    return torch.cat(added, dim=-1)


def added(found: Term | None, x: Tensor) -> Tensor:
    assert found is not None
    return low_rank((x @ found.down.float().T) * found.scale, found.up, found.part)


def in_a_run(cache: RunCache) -> Run:
    """The same run, at its next step."""
    before = cache.run
    timesteps, merged = (torch.arange(9.0), object()) if before is None else (before.timesteps, before.merged)
    run = Run(timesteps, 0 if before is None else before.step + 1, 0, merged)
    cache.begin(run)
    return run


@pytest.fixture
def terms() -> Terms:
    return Terms(RunCache())


@pytest.mark.parametrize("form", ["parts", "joint", "beside"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(
    ("widths", "ranks"),
    [
        ((16,), ((4,),)),
        ((16,), ((8,),)),
        ((16,), ((3, 5),)),
        ((16, 16, 16), ((4,), (2, 9), (8,))),
        ((16, 16, 40), ((4,), (), (1,))),
        ((16, 24, 8), ((4,), (3,), (1,))),
    ],
    ids=str,
)
def test_terms_add_what_the_adapters_do(
    terms: Terms, widths: tuple[int, ...], ranks: tuple[tuple[int, ...], ...], codes: bool, form: Any
) -> None:
    layers = [layer(n, r, codes=codes) for n, r in zip(widths, ranks, strict=True)]
    found = term(terms, layers, form)
    assert found is not None
    assert found.up.shape[1] % 8 == 0
    x = torch.randn(2, 5, K)
    expected = dense(layers, x, divided=codes and form != "beside")
    torch.testing.assert_close(added(found, x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_without_adapters_there_is_no_term(terms: Terms) -> None:
    layers = [layer(16, ()), layer(16, ())]
    assert term(terms, layers) is None
    layers = [layer(16, (4,))]
    layers[0].enable_adapters(False)
    assert term(terms, layers) is None
    assert terms.reasons == {}


def test_one_adapter_of_one_layer_is_used_as_it_lies(terms: Terms) -> None:
    one = layer(16, (8,))
    found = term(terms, [one])
    assert found is not None
    assert found.down.data_ptr() == one.lora_A["a0"].weight.data_ptr()
    assert found.up.data_ptr() == one.lora_B["a0"].weight.data_ptr()
    assert terms.report().bytes == 0
    pair = [layer(16, (8,)), one]
    term(terms, pair)
    assert terms.report().bytes == 4 * (2 * 8 * K + 32 * 8 + 16)


EDITS: dict[str, Any] = {
    "down in place": lambda one: one.lora_A["a0"].weight.mul_(2),
    "up in place": lambda one: one.lora_B["a1"].weight.mul_(2),
    "other memory": lambda one: setattr(one.lora_A["a0"].weight, "data", torch.randn(4, K)),
    "another parameter": lambda one: setattr(one.lora_B["a0"], "weight", nn.Parameter(torch.randn(16, 4), False)),
    "scale": lambda one: one.set_scale("a0", 3.0),
    "fewer adapters": lambda one: one.set_adapter(["a1"]),
    "one deleted": lambda one: one.delete_adapter("a0"),
    "a new one": lambda one: (
        one.update_layer("b", r=7, lora_alpha=1, config=LoraConfig(r=7, init_lora_weights=False)),
        one.set_adapter(["a0", "b"]),
        one.requires_grad_(False),
    ),
}


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_nothing_is_stale_within_a_run(terms: Terms, edit: str, codes: bool) -> None:
    layers = [layer(16, (4, 6), codes=codes), layer(16, (2,), codes=codes)]
    x = torch.randn(3, K)
    in_a_run(terms.cache)
    terms.refresh()
    before = added(term(terms, layers), x)
    in_a_run(terms.cache)
    terms.refresh()
    assert terms.report().hits == 1
    with torch.no_grad():
        EDITS[edit](layers[0])
    in_a_run(terms.cache)
    terms.refresh()
    after = added(term(terms, layers), x)
    expected = dense(layers, x, divided=codes)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(before, after)


def test_other_scales_of_the_codes_are_seen(terms: Terms) -> None:
    layers = [layer(16, (4,), codes=True)]
    x = torch.randn(3, K)
    in_a_run(terms.cache)
    terms.refresh()
    term(terms, layers)
    layers[0].base_layer.weight_scale.mul_(3)
    in_a_run(terms.cache)
    terms.refresh()
    torch.testing.assert_close(added(term(terms, layers), x), dense(layers, x, divided=True), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", ["another", "none"])
def test_writes_that_do_not_show_are_seen_by_the_next_run_in_the_same_memory(terms: Terms, run: str) -> None:
    layers = [layer(16, (4,)), layer(16, (2,))]
    x = torch.randn(3, K)
    in_a_run(terms.cache)
    terms.refresh()
    first = term(terms, layers)
    generation = terms.generation
    layers[0].lora_A["a0"].weight.data.mul_(5)
    terms.cache.begin(None)
    if run == "another":
        in_a_run(terms.cache)
    terms.refresh()
    second = term(terms, layers)
    assert first is not None
    assert second is not None
    assert second.down.data_ptr() == first.down.data_ptr()
    assert terms.generation == generation, "what a graph has captured is still there"
    torch.testing.assert_close(added(second, x), dense(layers, x), rtol=1e-4, atol=1e-3)


def test_another_run_reads_the_matrices_and_fills_nothing_again(terms: Terms) -> None:
    layers = [layer(16, (4,)), layer(16, (2,))]
    for _ in range(3):
        terms.cache.begin(None)
        for _ in range(2):
            in_a_run(terms.cache)
            terms.refresh()
            term(terms, layers)
    assert (terms.misses, terms.changes) == (1, 1)
    layers[1].lora_B["a0"].weight.data.mul_(2)
    terms.cache.begin(None)
    in_a_run(terms.cache)
    terms.refresh()
    assert (terms.misses, terms.changes) == (2, 2)
    x = torch.randn(3, K)
    torch.testing.assert_close(added(term(terms, layers), x), dense(layers, x), rtol=1e-4, atol=1e-3)


def test_no_layer_is_asked_while_the_look_is_the_same(terms: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, asked = [layer(16, (4,)), layer(16, (2,))], []

    def asking(part: Any) -> Any:
        asked.append(part)
        return split_for_packing(part)

    monkeypatch.setattr(terms_module, "split_for_packing", asking)
    in_a_run(terms.cache)
    terms.refresh(1)
    term(terms, layers)
    for look in (1, 1, 1, 2, 2):
        in_a_run(terms.cache)
        terms.refresh(look)
    assert len(asked) == 2 + 2  # both layers: the term is new to the second refresh, the fifth has a new look
    terms.refresh(2, offloaded=True)
    assert terms.report().entries == 0


def test_another_scale_copies_no_matrix(terms: Terms) -> None:
    layers = [layer(16, (4,)), layer(16, (2,))]
    in_a_run(terms.cache)
    terms.refresh()
    first = term(terms, layers)
    assert first is not None
    marked = first.down.fill_(7.0)
    layers[1].set_scale("a0", 9.0)
    in_a_run(terms.cache)
    terms.refresh()
    second = term(terms, layers)
    assert second is first
    assert bool((marked == 7).all())
    assert second.scale[8:10].tolist() == [layers[1].scaling["a0"]] * 2


def test_memory_is_not_taken_for_the_one_it_was(terms: Terms) -> None:
    """Matrices that are loaded where others lay, at the same version: the memory of the former is held until then."""
    in_a_run(terms.cache)
    terms.refresh()
    one = layer(16, (4,), codes=True)
    term(terms, [one])
    address = one.lora_A["a0"].weight.data_ptr()
    shape = one.lora_A["a0"].weight.shape
    del one.lora_A["a0"]
    made = [torch.randn(shape) for _ in range(50)]
    assert address not in [t.data_ptr() for t in made]


def test_an_unloaded_lora_leaves_no_copies(terms: Terms) -> None:
    bases = [nn.Linear(K, 16) for _ in range(2)]
    config = LoraConfig(r=4, init_lora_weights=False)
    layers = [LoraLinear(base, "a", config, r=4, lora_alpha=4).requires_grad_(False) for base in bases]
    term(terms, layers)
    assert terms.report().entries == 1
    generation = terms.generation
    del layers
    gc.collect()
    assert terms.report().entries == terms.report().bytes == 0
    assert terms.generation > generation


def test_padding_and_refilling_bring_nothing_in(terms: Terms) -> None:
    layers = [layer(16, (4,)), layer(16, (3,))]
    x = torch.randn(3, K)
    first = term(terms, layers)
    assert first is not None
    assert first.down[4:8].count_nonzero() == first.up[:, 4:].count_nonzero() == 0
    layers[0].lora_A["a0"].weight.data = torch.full((4, K), float("nan"))
    terms.refresh()
    assert added(term(terms, layers), x)[:, :16].isnan().all()
    assert not added(term(terms, layers), x)[:, 16:].isnan().any()


class Hooked:
    def __call__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.register_forward_hook(Hooked()), "called as it is"),
        (lambda one: one.lora_A["a0"].to(torch.float16), "float16 and activations float32"),
        (lambda one: one.update_layer("a0", r=MOST_RANKS + 1, lora_alpha=1, config=LoraConfig()), "257 ranks"),
    ],
    ids=["hook", "dtype", "ranks"],
)
def test_what_cannot_be_a_term_is_said(terms: Terms, change: Any, words: str) -> None:
    layers = [layer(16, (4,)), layer(16, (2,))]
    with torch.no_grad():
        change(layers[0])
        if words.startswith("float16"):
            layers[0].lora_B["a0"].to(torch.float16)
    assert term(terms, layers) is None
    assert [words in reason for reason in terms.reasons] in ([], [True])
    assert bool(terms.reasons) or any(part is None for part in parts(layers))


def test_layers_that_become_codes_get_a_term_of_codes(terms: Terms) -> None:
    layers, x = [layer(16, (4, 6)), layer(16, (2,))], torch.randn(3, K)
    term(terms, layers)
    for one in layers:
        Float8Linear.convert(one.base_layer, activations=True, keep=False)
    terms.refresh()
    expected = dense(layers, x, divided=True)
    torch.testing.assert_close(
        added(term(terms, layers), x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def test_codes_take_matrices_of_any_dtype(terms: Terms) -> None:
    layers = [layer(16, (4,), codes=True)]
    for half in (layers[0].lora_A, layers[0].lora_B):
        half["a0"].to(torch.float16)
    found = term(terms, layers, dtype=torch.bfloat16)
    assert found is not None
    assert found.down.dtype is torch.float8_e4m3fn
    assert found.up.dtype is torch.bfloat16


def test_under_offload_nothing_is_kept(terms: Terms) -> None:
    layers = [layer(16, (4,)), layer(16, (2,))]
    term(terms, layers)
    terms.refresh(offloaded=True)
    assert terms.report().entries == 0
    assert term(terms, layers) is None
    assert list(terms.reasons) == ["weights move between calls (offload)"]
