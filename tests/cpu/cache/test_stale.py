"""Attempts to make a kept prompt stale by whatever may change an encoder between two calls, also where nothing shows.

Each change is made between two calls with the same prompt. The second must give what stock gives now, and that must
differ from what it gave before, or the attempt shows nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from support.prompts import embeds, equal, prompts_of, quiet
from support.whole_pipes import flux_pipe, z_image_pipe
from tokenizers.normalizers import Replace
from torch import nn
from transformers import T5EncoderModel

import fusedit
from fusedit.cache.watch import State, examine

Change = Callable[[Any], Any]


def t5_weight(pipe: Any) -> nn.Parameter:
    weight: nn.Parameter = pipe.text_encoder_2.get_parameter("encoder.block.0.layer.0.SelfAttention.o.weight")
    return weight


def other_t5(pipe: Any) -> Any:
    torch.manual_seed(5)
    return T5EncoderModel(pipe.text_encoder_2.config).eval()


def in_place(pipe: Any) -> None:
    with torch.no_grad():
        t5_weight(pipe).mul_(2)


def one_element_through_data(pipe: Any) -> None:
    t5_weight(pipe).data[3, 3] += 1


def negated_through_data(pipe: Any) -> None:
    t5_weight(pipe).data.neg_()


def rows_exchanged_through_data(pipe: Any) -> None:
    weight = pipe.text_encoder_2.shared.weight
    weight.data.copy_(weight.data.roll(1, 0))


def other_storage(pipe: Any) -> None:
    t5_weight(pipe).data = t5_weight(pipe).detach() * 2


def other_parameter(pipe: Any) -> None:
    layer = pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention
    layer.o.weight = nn.Parameter(layer.o.weight.detach() * 2)


def in_place_in_clip(pipe: Any) -> None:
    with torch.no_grad():
        pipe.text_encoder.final_layer_norm.bias.add_(1)


def loaded(pipe: Any) -> None:
    pipe.text_encoder_2.load_state_dict(other_t5(pipe).state_dict())


def assigned(pipe: Any) -> None:
    pipe.text_encoder_2.load_state_dict(other_t5(pipe).state_dict(), assign=True)


def other_dtype(pipe: Any) -> None:
    pipe.text_encoder_2.to(torch.bfloat16)


def through_another_dtype(pipe: Any) -> None:
    pipe.text_encoder_2.to(torch.bfloat16).to(torch.float32)


def other_encoder(pipe: Any) -> None:
    pipe.text_encoder_2 = other_t5(pipe)


def other_encoder_registered(pipe: Any) -> None:
    pipe.register_modules(text_encoder_2=other_t5(pipe))


def layer_replaced(pipe: Any) -> None:
    attention = pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention
    attention.o = copy.deepcopy(attention.o)
    attention.o.weight.data *= 2


def attribute(pipe: Any) -> None:
    pipe.text_encoder_2.encoder.final_layer_norm.variance_epsilon = 1.0


def layer_taken_out(pipe: Any) -> None:
    pipe.text_encoder_2.encoder.block = nn.ModuleList()


def other_tokenizer(pipe: Any) -> None:
    pipe.tokenizer_2 = copy.deepcopy(pipe.tokenizer_2)
    tokenizer_in_place(pipe)


def tokenizer_in_place(pipe: Any) -> None:
    pipe.tokenizer_2.backend_tokenizer.normalizer = Replace("fox", "cat")


def shared_layer(pipe: Any) -> None:
    blocks = pipe.text_encoder_2.encoder.block
    blocks.append(blocks[0])


def token_added(pipe: Any) -> None:
    pipe.tokenizer_2.add_tokens(["red fox"])
    pipe.text_encoder_2.resize_token_embeddings(len(pipe.tokenizer_2))


def tokenizer_pads_left(pipe: Any) -> None:
    pipe.tokenizer_2.padding_side = "left"


def clip_length(pipe: Any) -> None:
    pipe.tokenizer_max_length = 2


def other_activation(pipe: Any) -> None:
    pipe.text_encoder_2.encoder.block[0].layer[1].DenseReluDense.act = nn.GELU().eval()


def adapter(pipe: Any, name: str = "a", seed: int = 0) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q", "k", "v"]), pipe.text_encoder_2, adapter_name=name)
    torch.manual_seed(seed)
    for layer in adapters(pipe):
        layer.lora_B[name].weight.data.normal_()
        layer.set_adapter([name])


def adapters(pipe: Any) -> list[Any]:
    return [module for module in pipe.text_encoder_2.modules() if isinstance(module, LoraLayer)]


def adapter_merged_and_taken_out(pipe: Any) -> None:
    adapter(pipe)
    for layer in adapters(pipe):
        layer.merge()
    recurse_remove_peft_layers(pipe.text_encoder_2)
    del pipe.text_encoder_2.peft_config


def number_of_layers(pipe: Any) -> None:
    pipe.text_encoder.config.num_hidden_layers = 1


def qwen_in_place(pipe: Any) -> None:
    pipe.text_encoder.layers[0].mlp.down_proj.weight.data *= 2


def qwen_buffer(pipe: Any) -> None:
    pipe.text_encoder.rotary_emb.inv_freq.data *= 2


def qwen_buffer_replaced(pipe: Any) -> None:
    pipe.text_encoder.rotary_emb.inv_freq = pipe.text_encoder.rotary_emb.inv_freq * 2


def chat_template(pipe: Any) -> None:
    pipe.tokenizer.chat_template = pipe.tokenizer.chat_template + " snow"


FLUX: list[Change] = [
    in_place, one_element_through_data, negated_through_data, rows_exchanged_through_data, other_storage,
    other_parameter, in_place_in_clip, loaded, assigned, other_dtype, through_another_dtype, other_encoder,
    other_encoder_registered, layer_replaced, attribute, layer_taken_out, other_tokenizer, tokenizer_in_place,
    token_added, shared_layer, tokenizer_pads_left, clip_length, other_activation, adapter,
    adapter_merged_and_taken_out,
]  # fmt: skip
Z_IMAGE: list[Change] = [number_of_layers, qwen_in_place, qwen_buffer, qwen_buffer_replaced, chat_template]


@pytest.mark.parametrize(
    ("make", "change"),
    [(flux_pipe, change) for change in FLUX] + [(z_image_pipe, change) for change in Z_IMAGE],
    ids=lambda value: value.__name__,
)
def test_a_change_between_two_calls_is_followed(make: Any, change: Change, runs: Counter[str]) -> None:
    pipe = make()
    handle = fusedit.accelerate(pipe)
    before = embeds(pipe)
    count = runs.total()
    assert equal(embeds(pipe), before)
    assert runs.total() == count, "nothing was kept, so the test shows nothing"
    change(pipe)
    now = embeds(pipe)
    with handle.paused():
        right = embeds(pipe)
    assert not equal(right, before)
    assert equal(now, right)
    count = runs.total()
    assert equal(embeds(pipe), right)
    assert runs.total() == count, "what was computed after the change is kept again"


def test_a_merge_leaves_no_trace_but_the_content() -> None:
    pipe = flux_pipe()
    with torch.no_grad():
        before = examine("t5", pipe.text_encoder_2)
        assert isinstance(before, State)
        content = before.content()
        adapter_merged_and_taken_out(pipe)
        after = examine("t5", pipe.text_encoder_2)
    assert isinstance(after, State)
    assert after.facts == before.facts, "then the facts alone would do, and this test is no longer the hard case"
    assert after.content() != content


def test_tensors_that_are_plain_attributes_are_read_too() -> None:
    encoder = flux_pipe().text_encoder_2
    encoder.encoder.table = torch.ones(4)
    with torch.no_grad():
        before = examine("t5", encoder)
        assert isinstance(before, State)
        content = before.content()
        encoder.encoder.table.data[2] = 5
        after = examine("t5", encoder)
    assert isinstance(after, State)
    assert after.facts == before.facts
    assert after.content() != content


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_an_adapter_through_its_whole_life(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    seen = [embeds(pipe)]
    steps: list[Callable[[], Any]] = [
        lambda: adapter(pipe),
        lambda: [layer.set_scale("a", 0.5) for layer in adapters(pipe)],
        lambda: [layer.enable_adapters(False) for layer in adapters(pipe)],
        lambda: [layer.enable_adapters(True) for layer in adapters(pipe)],
        lambda: adapter(pipe, "b", seed=1),
        lambda: [layer.set_adapter(["a", "b"]) for layer in adapters(pipe)],
        lambda: [layer.merge() for layer in adapters(pipe)],
        lambda: [layer.unmerge() for layer in adapters(pipe)],
        lambda: [layer.delete_adapter("b") for layer in adapters(pipe)],
        lambda: recurse_remove_peft_layers(pipe.text_encoder_2),
    ]
    for step in steps:
        step()
        now = embeds(pipe)
        with handle.paused():
            assert equal(now, embeds(pipe))
        count = runs.total()
        assert equal(embeds(pipe), now)
        assert runs.total() == count, prompts_of(handle).reasons
        seen.append(now)
    assert len({tensor[1].sum().item() for tensor in seen}) == 1, "CLIP was never touched"
    assert sum(not equal(a, b) for a, b in itertools.pairwise(seen)) >= 7


def clip_lora(pipe: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """A LoRA of the CLIP encoder in diffusers' layout."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, module in pipe.text_encoder.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "v_proj")):
            for part, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
                state[f"text_encoder.{name}.lora_{part}.weight"] = torch.randn(*shape, generator=generator)
    return state


def test_a_scale_that_is_a_numpy_number_is_followed() -> None:
    """Which can be held neither weakly nor as one of Python's own numbers."""
    pipe: Any = quiet(flux_pipe())
    fusedit.accelerate(pipe)
    norm = pipe.text_encoder_2.encoder.final_layer_norm
    drawn = []
    for eps in (0.25, 0.5, 0.25):
        norm.variance_epsilon = np.float64(eps)
        drawn.append(embeds(pipe))
    assert not equal(drawn[0], drawn[1])
    assert equal(drawn[0], drawn[2])


def test_a_lora_through_diffusers_own_calls(runs: Counter[str]) -> None:
    pipe: Any = quiet(flux_pipe())
    handle = fusedit.accelerate(pipe)
    first = embeds(pipe)

    def followed(changed: bool, **arguments: Any) -> list[torch.Tensor]:
        now = embeds(pipe, **arguments)
        with handle.paused():
            assert equal(now, embeds(pipe, **arguments))
        assert equal(embeds(pipe, **arguments), now)
        assert equal(now, first) != changed
        return now

    pipe.load_lora_weights(clip_lora(pipe), adapter_name="a")
    whole = followed(True)
    pipe.set_adapters("a", 0.5)
    half = followed(True)
    assert not equal(half, whole)
    assert not equal(followed(True, lora_scale=0.25), half)
    assert equal(followed(True), half)
    pipe.set_adapters("a", 1.0)
    pipe.fuse_lora(components=["text_encoder"])
    fused = followed(True)
    pipe.unfuse_lora(components=["text_encoder"])
    followed(True)
    pipe.fuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()  # fused weights stay
    assert equal(followed(True), fused)
    assert prompts_of(handle).reasons == {}
    assert runs["T5EncoderModel"] < runs["CLIPTextModel"], "T5 was kept all the while"


def test_fused_and_unloaded_between_two_calls() -> None:
    pipe: Any = quiet(flux_pipe())
    handle = fusedit.accelerate(pipe)
    pipe.load_lora_weights(clip_lora(pipe, seed=1), adapter_name="once")  # what loading leaves on the encoder stays
    pipe.unload_lora_weights()
    before = embeds(pipe)
    pipe.load_lora_weights(clip_lora(pipe), adapter_name="a")
    pipe.fuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()
    now = embeds(pipe)
    with handle.paused():
        assert equal(now, embeds(pipe))
    assert not equal(now, before)


def test_torchs_own_switches_are_followed(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    fusedit.accelerate(pipe)
    embeds(pipe)
    count = runs.total()
    sdp = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        torch.backends.cuda.enable_mem_efficient_sdp(not sdp)  # type: ignore[no-untyped-call]
        embeds(pipe)
        assert runs.total() == 2 * count
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(sdp)  # type: ignore[no-untyped-call]


def _hooked(pipe: Any) -> None:
    pipe.text_encoder_2.encoder.block[0].register_forward_hook(lambda *_: None)


def _pre_hooked(pipe: Any) -> None:
    pipe.text_encoder_2.register_forward_pre_hook(lambda *_: None)


def _forward_replaced(pipe: Any) -> None:
    inner = pipe.text_encoder_2.encoder.forward
    pipe.text_encoder_2.encoder.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def _accelerate_hook(pipe: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.text_encoder_2, ModelHook())


def _group_offload(pipe: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        pipe.text_encoder_2,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )


def _quantised(pipe: Any) -> None:
    class Params4bit(nn.Parameter):
        pass

    layer = pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention.q
    layer.weight = Params4bit(layer.weight.data, requires_grad=False)


def _said_to_be_quantised(pipe: Any) -> None:
    pipe.text_encoder_2.config.quantization_config = {"quant_method": "hqq"}


def _compiled(pipe: Any) -> None:
    pipe.text_encoder_2.compile(backend="eager")


def _training(pipe: Any) -> None:
    pipe.text_encoder_2.train()


def _one_dropout_trains(pipe: Any) -> None:
    pipe.text_encoder_2.encoder.dropout.train()


def _inference(pipe: Any) -> None:
    with torch.inference_mode():
        pipe.text_encoder_2.shared.weight = nn.Parameter(pipe.text_encoder_2.shared.weight.clone(), requires_grad=False)


def _hidden_module(pipe: Any) -> None:
    pipe.text_encoder_2.extra = [nn.Linear(2, 2)]


UNWATCHABLE: list[tuple[Change, str]] = [
    (_hooked, "text_encoder_2 has a forward hook"),
    (_pre_hooked, "text_encoder_2 has a forward hook"),
    (_forward_replaced, "the forward of text_encoder_2 was replaced"),
    (_accelerate_hook, "text_encoder_2 has an accelerate hook"),
    (_group_offload, "text_encoder_2 has a diffusers hook"),
    (_quantised, "text_encoder_2 has a weight of class Params4bit"),
    (_said_to_be_quantised, "text_encoder_2 is quantised (hqq)"),
    (_compiled, "text_encoder_2 is compiled (module.compile())"),
    (_training, "text_encoder_2 is in training mode"),
    (_one_dropout_trains, "text_encoder_2 is in training mode"),
    (_inference, "text_encoder_2 was loaded under inference_mode"),
    (_hidden_module, "text_encoder_2 keeps a Linear outside"),
]


@pytest.mark.parametrize(("change", "reason"), UNWATCHABLE, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("kept_before", [True, False])
def test_what_cannot_be_watched_runs_every_time_and_says_why(
    change: Change, reason: str, kept_before: bool, runs: Counter[str]
) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    if kept_before:
        embeds(pipe)
    change(pipe)
    runs.clear()
    embeds(pipe)
    embeds(pipe)
    assert runs["CLIPTextModel"] == (0 if kept_before else 1)
    assert change is _compiled or runs["T5EncoderModel"] == 2
    [(said, count)] = prompts_of(handle).reasons.items()
    assert said.startswith(reason)
    assert count == 2
    assert prompts_of(handle).hits == 0
    torch._dynamo.reset()


def test_gradients_and_autocast_go_through_stock(runs: Counter[str]) -> None:
    pipe: Any = flux_pipe()
    handle = fusedit.accelerate(pipe)
    embeds(pipe)
    got = pipe.encode_prompt("red fox")[0]
    assert got.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        embeds(pipe)
    assert runs == {"CLIPTextModel": 3, "T5EncoderModel": 3}
    assert prompts_of(handle).reasons == {
        "gradients are on (call under torch.no_grad)": 1,
        "autocast is on": 1,
    }


def test_a_forward_hook_for_all_modules_is_seen(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    embeds(pipe)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        embeds(pipe)
    finally:
        hook.remove()
    assert runs == {"CLIPTextModel": 2, "T5EncoderModel": 2}
    assert prompts_of(handle).reasons == {"a forward hook for all modules is set": 1}


def test_an_encoder_that_is_no_module_is_called_as_it_is() -> None:
    pipe: Any = flux_pipe()
    encoder = pipe.text_encoder_2

    class Remote:
        dtype, device = encoder.dtype, encoder.device

        def modules(self) -> list[nn.Module]:
            return []

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return encoder(*args, **kwargs)

    stock = embeds(pipe)
    handle = fusedit.accelerate(pipe)
    vars(pipe)["text_encoder_2"] = Remote()
    assert equal(embeds(pipe), stock)
    assert equal(embeds(pipe), stock)
    assert prompts_of(handle).reasons == {"text_encoder_2 is no torch module": 2}


def test_an_encoder_that_changes_itself_is_not_kept(runs: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = flux_pipe()
    counted = T5EncoderModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return counted(self, *args, **kwargs)

    monkeypatch.setattr(T5EncoderModel, "forward", forward)
    handle = fusedit.accelerate(pipe)
    embeds(pipe)
    embeds(pipe)
    assert runs["T5EncoderModel"] == 2
    assert prompts_of(handle).reasons == {"running text_encoder_2 changed it": 2}
