"""The prompt cache: what it saves, and every way to lay hands on it, its pipeline and what it gives."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
from collections import Counter
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline, ZImageControlNetModel
from support.prompts import embeds, equal, latents, prompts_of, quiet
from support.whole_pipes import SMALL, flux_pipe, z_image_pipe

import fusedit
from fusedit.cache.prompts import PromptCache
from fusedit.cache.store import Store
from fusedit.errors import UsageError
from fusedit.plan import Plan

OPTIONS = ("is_distilled",)  # arguments that are no components
OURS = ("encode_prompt", "__getstate__")
MAKERS = {"flux": flux_pipe, "z_image": z_image_pipe}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def pipe(request: pytest.FixtureRequest) -> Any:
    return quiet(request.param())


@pytest.mark.parametrize("name", ["tiny-flux", "tiny-z-image"])
def test_the_second_call_runs_no_encoder_and_draws_the_same_bits(name: str, runs: Counter[str]) -> None:
    pipe: Any = quiet(fusedit.load(name, dtype="fp32", device="cpu"))
    handle = fusedit.accelerate(pipe)
    first = latents(pipe, "red apple, 3d style")
    count = runs.total()
    assert count > 0
    assert torch.equal(latents(pipe, "red apple, 3d style"), first)
    assert runs.total() == count
    report = prompts_of(handle)
    assert (report.hits, report.misses) == (1, 1)
    with handle.paused():
        paused = latents(pipe, "red apple, 3d style")
    assert runs.total() == 2 * count, "paused runs stock"
    handle.restore()
    assert torch.equal(latents(pipe, "red apple, 3d style"), paused)
    assert (prompts_of(handle).hits, prompts_of(handle).misses) == (1, 1)


def test_kept_embeddings_are_stock_embeddings(pipe: Any, runs: Counter[str]) -> None:
    stock = embeds(pipe)
    fusedit.accelerate(pipe)
    assert equal(embeds(pipe), stock)
    count = runs.total()
    assert equal(embeds(pipe), stock)
    assert runs.total() == count


FLUX_ARGUMENTS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "green fox"},
    "another prompt": {"prompt": "green"},
    "prompt_2": {"prompt_2": "cat in snow"},
    "batch": {"prompt": ["red fox", "green fox"]},
    "two pictures": {"num_images_per_prompt": 2},
    "length": {"max_sequence_length": 32},
    "lora_scale": {"lora_scale": 0.5},
}
Z_IMAGE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "green fox"},
    "another prompt": {"prompt": "green"},
    "batch": {"prompt": ["red fox", "green"]},
    "length": {"max_sequence_length": 2},
    "negative": {"negative_prompt": "snow"},
    "no guidance": {"do_classifier_free_guidance": False},
}


@pytest.mark.parametrize(
    ("make", "changes"),
    [(flux_pipe, value) for value in FLUX_ARGUMENTS.values()]
    + [(z_image_pipe, value) for value in Z_IMAGE_ARGUMENTS.values()],
    ids=[f"flux-{name}" for name in FLUX_ARGUMENTS] + [f"z_image-{name}" for name in Z_IMAGE_ARGUMENTS],
)
def test_every_argument_has_its_stock_effect(make: Any, changes: dict[str, Any], runs: Counter[str]) -> None:
    pipe = make()
    plain, stock = embeds(pipe), embeds(pipe, **{"prompt": "red fox", **copy.deepcopy(changes)})
    assert not equal(plain, stock) or "lora_scale" in changes
    fusedit.accelerate(pipe)
    for _ in range(2):
        assert equal(embeds(pipe), plain)
        assert equal(embeds(pipe, **{"prompt": "red fox", **copy.deepcopy(changes)}), stock)
    before = runs.total()
    embeds(pipe)
    embeds(pipe, **{"prompt": "red fox", **copy.deepcopy(changes)})
    assert runs.total() == before


def every_class() -> list[Any]:
    """Every pipeline class of the two families that encodes prompts."""
    found = []
    for make, family in ((flux_pipe, diffusers.pipelines.flux), (z_image_pipe, diffusers.pipelines.z_image)):
        for name in family._import_structure.values():
            kinds = [getattr(family, item) for item in name]
            found += [(make, kind) for kind in kinds if hasattr(kind, "encode_prompt")]
    return found


@pytest.mark.parametrize(("make", "kind"), every_class(), ids=lambda value: value.__name__)
def test_every_pipeline_of_the_family_encodes_as_stock(make: Any, kind: Any, runs: Counter[str]) -> None:
    parts = make().components
    if kind.__name__.startswith("ZImageControlNet"):
        places = {"control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": 9}
        parts["controlnet"] = ZImageControlNetModel(**places, dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2)
    pipe = kind(**{name: parts.get(name) for name in inspect.signature(kind).parameters if name not in OPTIONS})
    more = (
        {"num_condition_images": 2}
        if "num_condition_images" in inspect.signature(kind.encode_prompt).parameters
        else {}
    )
    stock = embeds(pipe, ["red fox", "cat"], **more)
    cache = PromptCache(pipe)
    assert cache.refusal(pipe) is None
    cache.install()
    count = runs.total()
    assert equal(embeds(pipe, ["red fox", "cat"], **more), stock)
    assert runs.total() == 2 * count
    assert equal(embeds(pipe, ["red fox", "cat"], **more), stock)
    assert runs.total() == 2 * count
    assert (cache.report().hits, cache.report().misses) == (1, 1)


def test_only_what_was_not_encoded_before_is_encoded(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    embeds(pipe, "red fox", prompt_2="cat")
    embeds(pipe, "red fox", prompt_2="apple")
    assert runs == {"CLIPTextModel": 1, "T5EncoderModel": 2}
    assert prompts_of(handle).misses == 2
    embeds(pipe, "red fox", prompt_2="cat", num_images_per_prompt=3)
    assert runs == {"CLIPTextModel": 1, "T5EncoderModel": 2}
    assert prompts_of(handle).hits == 1
    assert prompts_of(handle).entries == 2


def test_true_guidance_keeps_both_prompts(runs: Counter[str]) -> None:
    pipe = quiet(flux_pipe())
    handle = fusedit.accelerate(pipe)
    arguments = {"negative_prompt": "snow", "true_cfg_scale": 3.0}
    first = latents(pipe, **arguments)
    assert torch.equal(latents(pipe, **arguments), first)
    assert runs == {"CLIPTextModel": 2, "T5EncoderModel": 2}
    assert (prompts_of(handle).hits, prompts_of(handle).misses) == (2, 2)


def test_embeddings_given_by_the_caller_pass_untouched_and_uncounted(pipe: Any, runs: Counter[str]) -> None:
    fusedit_free = embeds(pipe)
    handle = fusedit.accelerate(pipe)
    count = runs.total()
    if isinstance(pipe, FluxPipeline):
        given: Any = fusedit_free[0]
        returned = pipe.encode_prompt(None, prompt_embeds=given, pooled_prompt_embeds=fusedit_free[1])
    else:
        given = fusedit_free[:1]
        returned = pipe.encode_prompt("x", prompt_embeds=given, do_classifier_free_guidance=False)
    assert returned[0] is given
    assert runs.total() == count
    assert (prompts_of(handle).hits, prompts_of(handle).misses, prompts_of(handle).reasons) == (0, 0, {})


def test_what_callers_do_to_embeddings_and_lists_stays_theirs(pipe: Any) -> None:
    stock = embeds(pipe, ["red fox", "cat"])
    fusedit.accelerate(pipe)
    for _ in range(3):  # of what was computed, of what was kept, of a copy of that
        got = embeds(pipe, ["red fox", "cat"])
        assert equal(got, stock)
        for tensor in got:
            tensor.zero_()
    texts = ["red fox", "cat"]
    embeds(pipe, texts)
    assert texts == ["red fox", "cat"], "stock Z-Image writes its template into the list"
    texts[0] = "green fox"
    assert not equal(embeds(pipe, texts), stock)
    assert equal(embeds(pipe, ["red fox", "cat"]), stock)


def test_embeddings_of_an_inference_mode_call_serve_the_next_one_too(pipe: Any, runs: Counter[str]) -> None:
    stock = embeds(pipe)
    fusedit.accelerate(pipe)
    with torch.inference_mode():
        inside = embeds(pipe)
    count = runs.total()
    outside = embeds(pipe)
    assert equal(inside, stock)
    assert equal(outside, stock)
    assert runs.total() == count
    assert not any(tensor.is_inference() for tensor in outside)


def test_it_is_bounded_in_number_and_the_longest_unused_goes_first(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    prompts = [" ".join(["red"] * n) for n in range(1, 19)]
    for prompt in prompts:
        embeds(pipe, prompt)
        embeds(pipe, prompts[0])
    report = prompts_of(handle)
    assert (report.entries, report.capacity) == (16, 16)
    count = runs.total()
    for prompt in (prompts[0], *prompts[3:]):
        embeds(pipe, prompt)
    assert runs.total() == count
    embeds(pipe, prompts[1])
    assert runs.total() == count + 2


def test_it_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, runs: Counter[str]) -> None:
    pipe = flux_pipe()
    size = sum(t.nbytes for t in embeds(pipe)[:2])
    monkeypatch.setattr("fusedit.cache.prompts.Store", functools.partial(Store, limit=3 * size))
    handle = fusedit.accelerate(pipe)
    for prompt in ("red", "green", "blue", "cat"):
        embeds(pipe, prompt)
    assert prompts_of(handle).bytes <= 3 * size
    count = runs.total()
    embeds(pipe, "cat")
    embeds(pipe, "blue")
    assert runs.total() == count
    embeds(pipe, ["red"] * 9)
    assert prompts_of(handle).reasons == {"larger than the cache": 1}
    assert prompts_of(handle).bytes <= 3 * size
    embeds(pipe, "cat")
    assert runs.total() == count + 2, "what is too large pushed nothing else out"


def test_bytes_are_those_of_what_is_read_not_of_all_that_the_encoder_gives() -> None:
    pipe = z_image_pipe()
    handle = fusedit.accelerate(pipe)
    embeds(pipe, do_classifier_free_guidance=False)
    assert prompts_of(handle).bytes == 512 * 16 * 4  # one of three hidden states, no keys and values


def test_restore_leaves_nothing_behind(pipe: Any) -> None:
    before = dict(vars(pipe))
    stock = pipe.encode_prompt
    handle = fusedit.accelerate(pipe)
    assert all(name in vars(pipe) for name in OURS)
    assert inspect.signature(pipe.encode_prompt) == inspect.signature(stock)
    assert pipe.encode_prompt.__doc__ == stock.__doc__
    embeds(pipe)
    held = pipe.encode_prompt
    handle.restore()
    assert vars(pipe).keys() == before.keys()
    assert pipe.encode_prompt == stock
    assert prompts_of(handle).bytes == 0
    count = prompts_of(handle).misses
    with torch.no_grad():
        held("red fox")
    assert prompts_of(handle).misses == count, "whoever kept it gets stock"


def test_accelerating_twice_keeps_what_is_kept_and_another_plan_starts_anew(pipe: Any, runs: Counter[str]) -> None:
    first = fusedit.accelerate(pipe)
    embeds(pipe)
    assert fusedit.accelerate(pipe) is first
    count = runs.total()
    embeds(pipe)
    assert runs.total() == count
    second = fusedit.accelerate(pipe, Plan(cache={"prompts": False}))
    assert second is not first
    assert not any(name in vars(pipe) for name in OURS)
    embeds(pipe)
    assert runs.total() == 2 * count
    assert not any(cache.name == "prompts" for cache in second.report().caches)
    assert any("encoded anew in every call: switched off by the plan" in note for note in second.report().notes)
    third = fusedit.accelerate(pipe)
    first.restore()
    assert "encode_prompt" in vars(pipe), "restoring a replaced handle must not undo the new one"
    del vars(pipe)["encode_prompt"]
    fourth = fusedit.accelerate(pipe)
    assert fourth is not third
    fourth.restore()
    assert not any(name in vars(pipe) for name in OURS)


def test_copies_are_stock_and_share_nothing(pipe: Any, runs: Counter[str]) -> None:
    handle = fusedit.accelerate(pipe)
    pickled = pickle.loads(pickle.dumps(pipe))
    stock = embeds(pipe)
    other = quiet(type(pipe).from_pipe(pipe))
    for copied in (copy.copy(pipe), copy.deepcopy(pipe), pickled, other):
        assert not any(name in vars(copied) for name in OURS)
        count, report = runs.total(), prompts_of(handle)
        assert equal(embeds(copied), stock)
        assert runs.total() > count
        assert prompts_of(handle) == report
        again = fusedit.accelerate(copied)
        embeds(copied)
        embeds(copied)
        assert (prompts_of(again).hits, prompts_of(again).misses) == (1, 1)
        assert prompts_of(handle) == report
        again.restore()
    assert all(name in vars(pipe) for name in OURS)
    count = runs.total()
    assert equal(embeds(pipe), stock)
    assert runs.total() == count


def test_attributes_carried_over_by_hand_are_no_cache_of_the_other_pipeline() -> None:
    pipe, other = flux_pipe(), flux_pipe()
    fusedit.accelerate(pipe)
    vars(other).update({name: vars(pipe)[name] for name in OURS})
    handle = fusedit.accelerate(other)
    embeds(other)
    assert prompts_of(handle).misses == 1
    handle.restore()
    assert not any(name in vars(other) for name in OURS)


def test_a_copied_or_pickled_method_belongs_to_the_copy() -> None:
    pipe = flux_pipe()
    stock = embeds(pipe)
    fusedit.accelerate(pipe)
    for method in (copy.deepcopy(pipe.encode_prompt), pickle.loads(pickle.dumps(pipe.encode_prompt))):
        assert inspect.ismethod(method)
        assert method.__self__ is not pipe
        with torch.no_grad():
            assert torch.equal(method("red fox")[0], stock[0])
    assert copy.copy(pipe.encode_prompt) is pipe.encode_prompt


def test_two_pipelines_over_the_same_encoders_have_a_cache_each(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    other = FluxImg2ImgPipeline.from_pipe(pipe)
    a, b = fusedit.accelerate(pipe), fusedit.accelerate(other)
    embeds(pipe)
    embeds(other)
    assert runs == {"CLIPTextModel": 2, "T5EncoderModel": 2}
    a.restore()
    embeds(other)
    assert runs == {"CLIPTextModel": 2, "T5EncoderModel": 2}
    assert prompts_of(b).hits == 1


def test_a_wrapper_put_over_it_is_kept_and_runs_stock_after_restore(runs: Counter[str]) -> None:
    pipe: Any = flux_pipe()
    handle = fusedit.accelerate(pipe)
    inner, calls = pipe.encode_prompt, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inner(*args, **kwargs)

    pipe.encode_prompt = wrapper
    embeds(pipe)
    embeds(pipe)
    assert prompts_of(handle).hits == 1
    assert fusedit.accelerate(pipe) is handle
    assert any("encode_prompt was replaced after accelerate()" in note for note in handle.report().notes)
    handle.restore()
    assert pipe.encode_prompt is wrapper
    assert not any("encode_prompt was replaced" in note for note in handle.report().notes)
    count = runs.total()
    embeds(pipe)
    assert runs.total() == 2 * count
    assert len(calls) == 3
    pipe.encode_prompt = inner  # unwrapping later brings nothing back
    embeds(pipe)
    assert runs.total() == 3 * count
    again = fusedit.accelerate(pipe)
    embeds(pipe)
    assert prompts_of(again).misses == 1


def test_an_encode_prompt_replaced_before_is_left_alone() -> None:
    pipe: Any = flux_pipe()

    def mine(*args: Any, **kwargs: Any) -> Any:
        return FluxPipeline.encode_prompt(pipe, *args, **kwargs)

    pipe.encode_prompt = mine
    handle = fusedit.accelerate(pipe)
    assert pipe.encode_prompt is mine
    assert any("encode_prompt of this pipeline was replaced" in note for note in handle.report().notes)
    assert fusedit.accelerate(pipe) is handle
    handle.restore()
    assert pipe.encode_prompt is mine
    assert "__getstate__" not in vars(pipe)


def test_a_pipeline_of_somebody_elses_class_is_left_alone() -> None:
    class Mine(FluxPipeline):
        pass

    pipe = Mine(**flux_pipe().components)
    handle = fusedit.accelerate(pipe)
    assert "encode_prompt" not in vars(pipe)
    assert any("Mine is no FLUX or Z-Image pipeline of diffusers" in note for note in handle.report().notes)


def test_a_dropped_pipeline_is_freed_at_once_and_says_so() -> None:
    import weakref

    pipe = flux_pipe()
    cache = PromptCache(pipe)
    cache.install()
    embeds(pipe)
    alive, method = weakref.ref(pipe), pipe.encode_prompt
    del pipe
    assert alive() is None, "no reference cycle: the weights go with the last reference"
    with pytest.raises(UsageError, match="keep the pipeline"):
        method("red fox")


def test_an_error_of_stock_comes_through_and_counts_nothing(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    with pytest.raises(TypeError, match="encode_prompt"):
        pipe.encode_prompt()
    with pytest.raises(Exception, match=r"str|text|int"):
        embeds(pipe, [3])
    assert prompts_of(handle).hits == prompts_of(handle).misses == runs.total() == 0


def test_model_offload_wakes_no_encoder_for_a_kept_prompt(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.hooks import CpuOffload

    woken: Counter[Any] = Counter()
    move = CpuOffload.pre_forward

    def pre_forward(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        woken[module is pipe.transformer] += 1
        return move(self, module, *args, **kwargs)

    monkeypatch.setattr(CpuOffload, "pre_forward", pre_forward)
    stock = latents(pipe)
    handle = fusedit.accelerate(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    first = latents(pipe)
    count = woken[False]
    assert count > 0
    assert torch.equal(latents(pipe), first)
    assert woken[False] == count
    with handle.paused():
        assert torch.equal(latents(pipe), stock)
    assert woken[False] == 2 * count
    assert woken[True] == 6
    assert prompts_of(handle).reasons == {}
    pipe.remove_all_hooks()
    assert torch.equal(latents(pipe), first)


def test_comparisons_never_serve_stock_from_the_cache(runs: Counter[str]) -> None:
    pipe = flux_pipe()
    handle = fusedit.accelerate(pipe)
    embeds(pipe)
    runs.clear()
    size = {"width": SMALL["width"], "height": SMALL["height"], "steps": SMALL["steps"]}
    result = fusedit.compare(pipe, "red fox", seeds=[0, 1], flip=False, search=False, **size)
    # Stock twice to warm up and for both pairs; fused once, its warm-up.
    assert runs == {"CLIPTextModel": 5, "T5EncoderModel": 5}
    assert "fused took its prompt from the cache 2 of 3 times, stock encodes it every time" in result.notes
    assert result.noise.repeats
    assert (prompts_of(handle).hits, prompts_of(handle).misses) == (0, 1), "the caller's own cache took no part"


def test_the_report_says_what_is_kept_in_words_and_as_data(pipe: Any) -> None:
    handle = fusedit.accelerate(pipe)
    embeds(pipe)
    embeds(pipe)
    pipe.encode_prompt("red fox")
    report = handle.report()
    text = " ".join(str(report).split())
    assert "prompts: 1 reused, 2 computed, " in text
    assert " MiB; not kept: gradients are on (call under torch.no_grad) (1x)" in text
    assert "text encoders run stock" in text
    cache = report.to_dict()["caches"][0]
    assert (cache["name"], cache["hits"], cache["misses"], cache["capacity"]) == ("prompts", 1, 2, 16)
    assert cache["bytes"] > 0
    assert sum(cache["reasons"].values()) == 1


def test_pipelines_without_encoders_or_prompts_work_as_before() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    pipe = FluxPipeline(**{**flux_pipe().components, "text_encoder": None, "text_encoder_2": None})
    handle = fusedit.accelerate(pipe)
    assert not any("text encoders" in note for note in handle.report().notes)
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    handle = fusedit.accelerate(DDPMPipeline(unet, DDPMScheduler()), strict=False)
    assert any("DDPMPipeline has no encode_prompt" in note for note in handle.report().notes)


def test_calls_from_several_threads_fail_in_no_bookkeeping(pipe: Any) -> None:
    """Entries come, go and are counted at once; the texts are more than there are places."""
    handle = fusedit.accelerate(pipe)
    texts = [
        f"{a} {b} {c}" for a in ("red", "green") for b in ("apple", "fox", "cat") for c in ("snow", "3d", "style", "in")
    ]
    failed: list[str] = []

    def work(first: int) -> None:
        for i in range(60):
            try:
                embeds(pipe, texts[(7 * i + first) % len(texts)])
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(5 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failed == []
    assert prompts_of(handle).entries == prompts_of(handle).capacity
