"""load_lora, set_loras and unload_lora: pictures are those of stock with the same LoRA, and all of it is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from support.loras import differing, mixed_state, pieces
from support.pipes import lora_state, relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, fused

import fusedit

CLOSE = 2e-5
FLUX_SUBSETS = (
    (),
    ("x_embedder", "context_embedder", "time_text_embed"),
    ("norm_out.linear", "proj_out"),
    ("norm1.linear", "norm.linear"),
    ("transformer_blocks.1.attn.to_q",),
)
Z_IMAGE_SUBSETS = (
    (),
    ("all_x_embedder", "cap_embedder", "t_embedder"),
    ("all_final_layer",),
    ("adaLN_modulation",),
    ("layers.1.attention.to_q", "w1"),
)
SUBSETS = [(FLUX, names) for names in FLUX_SUBSETS] + [(Z_IMAGE, names) for names in Z_IMAGE_SUBSETS]


@pytest.mark.parametrize(("kind", "names"), SUBSETS, ids=str)
@pytest.mark.parametrize("first", ["lora", "accelerate"])
def test_any_subset_of_layers_equals_stock(kind: Kind, names: tuple[str, ...], first: str) -> None:
    """LF-08: every linear layer that stock can adapt, before and after accelerate, at any scale; CMP-08: and back."""
    reference, pipe = kind.pipe(), kind.pipe()
    plain = kind.call(reference)
    before = pieces(pipe)
    state = lora_state(pipe, names=names)
    reference.load_lora_weights(dict(state), adapter_name="a")
    handle = None
    if first == "accelerate":
        handle = fusedit.accelerate(pipe)
        kind.call(pipe)
    report = fusedit.load_lora(pipe, state, "a", scale=1.0)
    assert (report.matched, report.total, report.missing) == (len(state) // 2, len(state) // 2, ())
    handle = handle or fusedit.accelerate(pipe)
    assert relative(kind.call(reference), plain) > 1e-4
    for scale in (1.0, -0.35, 4.0):
        reference.set_adapters(["a"], [scale])
        fusedit.set_loras(pipe, {"a": scale})
        assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    fusedit.set_loras(pipe, {})
    assert relative(kind.call(pipe), plain) < CLOSE
    fusedit.unload_lora(pipe, "a")
    assert relative(kind.call(pipe), plain) < CLOSE
    assert fused(handle) > 0
    handle.restore()
    assert differing(pieces(pipe), before) == []
    assert torch.equal(kind.call(pipe), plain)


@each_kind
def test_several_at_once_with_mixed_ranks_and_alphas(kind: Kind) -> None:
    """Against the dense W + s alpha / r B A, since stock reads an alpha a layer from no file of this kind."""
    pipe, dense = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe)
    first, second = mixed_state(pipe, seed=1), mixed_state(pipe, seed=2)
    fusedit.load_lora(pipe, first.tensors, "first", 0.7)
    fusedit.load_lora(pipe, second.tensors, "second", -0.4)
    assert pipe.get_active_adapters() == ["first", "second"]
    first.add_to(dense, 0.7)
    second.add_to(dense, -0.4)
    assert relative(kind.call(pipe), kind.call(dense)) < CLOSE
    assert any("'first' at 0.7: matched" in note for note in handle.report().notes)
    assert any("'second' at -0.4: matched" in note for note in handle.report().notes)


@each_kind
def test_diffusers_sees_them_and_its_calls_work(kind: Kind, tmp_path: Path) -> None:
    reference, pipe = kind.pipe(), kind.pipe()
    plain = kind.call(reference)
    fusedit.accelerate(pipe)
    states = {name: mixed_state(pipe, seed=i).tensors for i, name in enumerate("ab")}
    for name, state in states.items():
        fusedit.load_lora(pipe, state, name)
        fusedit.load_lora(reference, state, name)
    assert pipe.get_list_adapters() == {"transformer": ["a", "b"]}
    for call in (
        lambda p: p.set_adapters(["b", "a"], [0.3, 0.9]),
        lambda p: p.disable_lora(),
        lambda p: p.enable_lora(),
        lambda p: p.delete_adapters("a"),
    ):
        call(pipe)
        call(reference)
        assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    with_b = kind.call(pipe)
    type(pipe).save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(pipe.transformer, adapter_name="b"),
        transformer_lora_adapter_metadata=pipe.transformer.peft_config["b"].to_dict(),
    )
    pipe.unload_lora_weights()
    assert relative(kind.call(pipe), plain) < CLOSE
    file = tmp_path / "pytorch_lora_weights.safetensors"
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="by_diffusers")
    pipe.set_adapters(["by_diffusers"], [0.3])
    assert relative(kind.call(pipe), with_b) < CLOSE
    pipe.unload_lora_weights()
    fusedit.load_lora(pipe, file, "by_fusedit", 0.3)
    assert relative(kind.call(pipe), with_b) < CLOSE


def test_what_diffusers_has_loaded_is_set_and_unloaded_too() -> None:
    pipe = FLUX.pipe()
    plain, state = FLUX.call(pipe), FLUX.pipe().transformer.state_dict()
    pipe.load_lora_weights(lora_state(pipe), adapter_name="a")
    fusedit.set_loras(pipe, {"a": 0.0})
    assert torch.equal(FLUX.call(pipe), plain)
    fusedit.unload_lora(pipe, "a")
    assert [name for name, value in pipe.transformer.state_dict().items() if not torch.equal(value, state[name])] == []
    assert pipe.get_list_adapters() == {}


def test_a_lora_loaded_under_disable_lora_is_switched_on_by_set_loras() -> None:
    pipe = FLUX.pipe()
    plain = FLUX.call(pipe)
    fusedit.load_lora(pipe, lora_state(pipe), "a")
    with_a = FLUX.call(pipe)
    pipe.disable_lora()
    assert torch.equal(FLUX.call(pipe), plain)
    fusedit.set_loras(pipe, {"a": 1.0})
    assert torch.equal(FLUX.call(pipe), with_a)


def test_names_come_from_files_and_stay_unique(tmp_path: Path) -> None:
    pipe = FLUX.pipe()
    state = lora_state(pipe, names=("proj_out",))
    file = tmp_path / "my style.v2.safetensors"
    save_file(state, file)
    reports = [fusedit.load_lora(pipe, path) for path in (file, str(file), state)]
    assert [report.name for report in reports] == ["my_style_v2", "my_style_v2_2", "lora"]
    assert pipe.get_active_adapters() == ["my_style_v2", "my_style_v2_2", "lora"]
    assert reports[0].file == str(file)
    assert (
        str(reports[0])
        == "LoRA 'my_style_v2' (diffusers) at 1: " + f"matched {len(state) // 2} of {len(state) // 2} layers"
    )
    assert reports[0].to_dict()["missing"] == []


def test_a_partial_match_lists_what_did_not_match() -> None:
    """LF-07."""
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe)
    state = lora_state(pipe, names=("proj_out",))
    state |= {f"transformer.transformer_blocks.9.attn.to_q.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
    report = fusedit.load_lora(pipe, state, "part")
    assert report.matched == report.total - 1 == len(state) // 2 - 1
    assert [path for path, _ in report.missing] == ["transformer_blocks.9.attn.to_q"]
    assert "transformer_blocks.9.attn.to_q" in str(report)
    note = next(note for note in handle.report().notes if "'part'" in note)
    assert f"matched {report.matched} of {report.total} layers, without transformer_blocks.9" in note


def test_the_tensors_given_may_be_changed_afterwards_and_random_numbers_are_left_alone() -> None:
    pipe, state = FLUX.pipe(), lora_state(FLUX.pipe())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fusedit.load_lora(pipe, state, "a")
    assert torch.equal(torch.rand(3), expected)
    with_a = FLUX.call(pipe)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(FLUX.call(pipe), with_a)


def test_loading_in_inference_mode_leaves_usable_layers() -> None:
    pipe, reference = FLUX.pipe(), FLUX.pipe()
    state = lora_state(pipe)
    with torch.inference_mode():
        fusedit.load_lora(pipe, state, "a")
    fusedit.load_lora(reference, state, "a")
    assert not any(p.is_inference() for p in pipe.transformer.parameters())
    assert torch.equal(FLUX.call(pipe), FLUX.call(reference))


@each_kind
def test_in_bf16_the_matrices_are_bf16_as_stocks(kind: Kind) -> None:
    reference, pipe = kind.pipe().to(torch.bfloat16), kind.pipe().to(torch.bfloat16)
    state = lora_state(pipe, scale=0.1)
    reference.load_lora_weights(dict(state), adapter_name="a")
    fusedit.load_lora(pipe, state, "a")
    assert torch.equal(kind.call(pipe), kind.call(reference))


def test_new_weights_by_assignment_under_a_lora_are_followed() -> None:
    """LL-07: load_state_dict(assign=True) replaces the parameters below the LoRA layers."""
    pipe, other = FLUX.pipe(), FLUX.pipe(4)
    fusedit.accelerate(pipe)
    state = lora_state(pipe)
    for each in (pipe, other):
        fusedit.load_lora(each, state, "a")
    FLUX.call(pipe)
    new: dict[str, Any] = {name: value.clone() for name, value in other.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(new, assign=True)
    assert relative(FLUX.call(pipe), FLUX.call(other)) < CLOSE


@pytest.mark.parametrize("level", ["leaf_level", "block_level"])
def test_under_group_offload_layers_come_and_go_with_their_groups(level: str) -> None:
    reference, pipe = FLUX.pipe(), FLUX.pipe()
    state = mixed_state(pipe).tensors
    fusedit.load_lora(reference, state, "a")
    fusedit.accelerate(pipe)
    options: dict[str, Any] = {"num_blocks_per_group": 1} if level == "block_level" else {}
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type=level, **options
    )
    plain = FLUX.call(pipe)
    fusedit.load_lora(pipe, state, "a")
    assert relative(FLUX.call(pipe), FLUX.call(reference)) < CLOSE
    fusedit.unload_lora(pipe, "a")
    assert relative(FLUX.call(pipe), plain) < CLOSE
