"""Runs of whole pipelines: modulation tables are used and right, nothing kept from one step to the next gets stale.

Tiny models have too few tokens for a table, so here a row may be kept for every token.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.pipes import flux_inputs, flux_pipe, lora_state, relative
from support.runs import (
    FLUX,
    KINDS,
    Z_IMAGE,
    Kind,
    at_step,
    each_kind,
    framed,
    picture,
    rows,
    site,
    with_control,
    with_image,
)

import fusedit
from fusedit.models import _modulation as modulation
from fusedit.plan import Plan
from fusedit.runtime import install

CLOSE = 2e-5
UNWATCHED = "inputs or weights that cannot be watched (inference mode, or a LoRA layer that does more than add)"


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulation, "TOKENS_PER_ROW", 1)


def found(handle: fusedit.Handle) -> tuple[int, int]:
    """Modulation rows that came from tables of earlier calls, and those of calls that made a table or found none."""
    report = rows(handle)
    return report.hits, report.misses


def both(kind: Kind, make: Callable[[], dict[str, Any]], seed: int = 0) -> tuple[torch.Tensor, Any, fusedit.Handle]:
    """Draws what stock draws, with arguments made anew for either; -> the drawing, its pipeline and handle."""
    stock = kind.call(kind.pipe(seed), **make())
    pipe = kind.pipe(seed)
    handle = fusedit.accelerate(pipe)
    fused = kind.call(pipe, **make())
    assert relative(fused, stock) < CLOSE
    return fused, pipe, handle


# -- Tables --------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_row_of_a_run_comes_from_a_table_and_none_is_left(kind: Kind, batch: int) -> None:
    pipe = kind.pipe()
    arguments = {**kind.prompt(pipe, (7,) * batch), "num_inference_steps": 5}
    first, pipe, handle = both(kind, lambda: dict(arguments))
    assert found(handle) == (4 * batch, batch)
    assert rows(handle).entries == rows(handle).bytes == 0
    assert rows(handle).reasons == {}
    assert torch.equal(kind.call(pipe, **arguments), first)
    assert found(handle) == (8 * batch, 2 * batch)
    without = fusedit.accelerate(pipe, Plan().without(f"{kind.name}.modulation"))
    assert relative(kind.call(pipe, **arguments), first) < CLOSE
    assert found(without) == (0, 0)


@each_kind
def test_tables_are_kept_within_a_run_only(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    seen: list[int] = []
    kind.call(pipe, **at_step(0, lambda *_: seen.append(rows(handle).entries)))
    assert seen == [3]
    assert rows(handle).entries == 0


@each_kind
@pytest.mark.parametrize("batch", [1, 3])
def test_a_run_longer_than_a_table_is_computed_in_parts(
    kind: Kind, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modulation, "ROWS", 8)
    arguments = {**kind.prompt(kind.pipe(), (7,) * batch), "num_inference_steps": 40}
    _, _, handle = both(kind, lambda: dict(arguments))
    parts = -(-40 // (8 // batch))
    assert found(handle) == ((40 - parts) * batch, parts * batch)


@each_kind
@pytest.mark.parametrize("guided", [False, True])
def test_a_part_that_is_over_takes_no_memory(kind: Kind, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulation, "ROWS", 8)
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    tables = 2 if guided and kind is FLUX else 1  # Z-Image takes both conditionings in one call
    kept: list[int] = []

    def look(_pipe: Any, _i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        kept.append(rows(handle).entries)
        return kwargs

    arguments = {"num_inference_steps": 20, "callback_on_step_end": look}
    kind.call(pipe, **arguments, **(kind.negative(pipe) if guided else {}))
    assert kept[0] == 8 * tables
    assert max(kept) == 8 * tables <= rows(handle).capacity
    assert kept[-1] == 0


def test_more_conditionings_than_there_are_tables_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables are kept; a third takes the place of the one made first."""
    monkeypatch.setattr(modulation, "ROWS", 4)
    direct = Direct(FLUX, 1)
    handle = direct.accelerated()
    t = direct.scheduler.timesteps[0]
    pooled = [torch.randn(1, direct.arguments["pooled_projections"].shape[1]) for _ in range(3)]
    for i, hits, entries in ((0, 0, 4), (1, 0, 8), (0, 1, 8), (1, 1, 8), (2, 0, 8), (1, 1, 8), (0, 0, 8)):
        check(direct, handle, lambda i=i: direct.at(t, pooled_projections=pooled[i]), hits)
        assert rows(handle).entries == entries <= rows(handle).capacity == 8


@each_kind
@pytest.mark.parametrize("batch", [1, 2])
def test_the_memory_of_tables_is_stated(kind: Kind, batch: int) -> None:
    direct = Direct(kind, batch)
    handle = direct.accelerated()
    direct.frame(lambda: direct.at(direct.scheduler.timesteps[0]))
    model, report = direct.model, rows(handle)
    if kind is FLUX:
        norms = [norm for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
        norms += [*(block.norm for block in model.single_transformer_blocks), model.norm_out]
        width, keys = sum(norm.linear.out_features for norm in norms), 4 * batch * 2  # time step and guidance
    else:
        blocks = (*model.noise_refiner, *model.layers)
        width, keys = sum(block.adaLN_modulation[0].out_features for block in blocks), 4  # one time step for all items
    assert report.entries == 4 * batch
    assert report.bytes == 4 * (4 * batch * width + keys)


@each_kind
def test_rows_are_counted_exactly_in_low_precision(kind: Kind) -> None:
    """305 is no number of bfloat16."""
    pipe = kind.pipe().to(torch.bfloat16)
    handle = fusedit.accelerate(pipe)
    kind.call(pipe, **kind.prompt(pipe, (7,) * 5), num_inference_steps=74)
    assert found(handle) == (61 * 5, 13 * 5)


@each_kind
def test_a_table_of_fewer_than_two_steps_is_not_made(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulation, "ROWS", 3)
    prompt = kind.prompt(kind.pipe(), (7, 7))
    _, _, handle = both(kind, lambda: dict(prompt))
    assert found(handle) == (0, 2 * 3)
    assert all("more memory than the step saves" in reason for reason in rows(handle).reasons)


@each_kind
def test_true_guidance_takes_all_rows_of_both_conditionings_from_tables(kind: Kind) -> None:
    pipe = kind.pipe()
    arguments = {**kind.negative(pipe), "num_inference_steps": 4}
    guided, pipe, handle = both(kind, lambda: dict(arguments))
    assert found(handle) == (2 * 3, 2)
    assert rows(handle).entries == 0
    assert relative(guided, kind.call(pipe, num_inference_steps=4)) > 1e-3


@each_kind
def test_true_guidance_in_parts_keeps_both_conditionings(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulation, "ROWS", 8)
    arguments = {**kind.negative(kind.pipe()), "num_inference_steps": 40}
    _, _, handle = both(kind, lambda: dict(arguments))
    parts = 5 if kind is FLUX else 10  # Z-Image takes both conditionings in one call
    assert found(handle) == (2 * (40 - parts), 2 * parts)


@each_kind
def test_guidance_that_ends_within_a_run(kind: Kind) -> None:
    """Z-Image then goes on with half the batch; FLUX has no such switch, so its callback raises the other guidance."""

    def end(pipe: Any, _kwargs: dict[str, Any]) -> None:
        pipe._guidance_scale = 0.0

    arguments = {**kind.negative(kind.pipe()), "num_inference_steps": 4}
    _, _, handle = both(kind, lambda: {**arguments, **at_step(1, end)})
    assert found(handle) == ((2 * 3, 2) if kind is FLUX else (2 + 1, 2 + 1))


@each_kind
def test_img2img_begins_in_the_middle_of_the_schedule(kind: Kind) -> None:
    """Strength 0.6 leaves the last 3 of 5 steps; a table of two rows begins with its second."""
    arguments = {"image": picture(), "strength": 0.6, "num_inference_steps": 5}
    pipe = with_image(kind.pipe())
    stock = kind.call(pipe, **arguments)
    handle = fusedit.accelerate(pipe)
    fused = kind.call(pipe, **arguments)
    assert relative(fused, stock) < CLOSE
    assert relative(fused, kind.call(pipe, **{**arguments, "image": 1 - picture()})) > 1e-3
    assert found(handle) == (2 * 2, 2)
    assert site(handle, f"{kind.name}.attention").fused > 0


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
@each_kind
def test_controlnet_runs_through_the_fused_forward(kind: Kind) -> None:
    pipe = with_control(kind.pipe())
    arguments = {"control_image": picture(), "controlnet_conditioning_scale": 0.7}
    stock = kind.call(pipe, **arguments)
    handle = fusedit.accelerate(pipe)
    fused = kind.call(pipe, **arguments)
    assert relative(fused, stock) < CLOSE
    assert found(handle) == (2, 1)
    assert site(handle, f"{kind.name}.attention").stock == 0
    off = kind.call(pipe, **{**arguments, "controlnet_conditioning_scale": 0.0})
    assert relative(fused, off) > 1e-3


# -- Time steps and guidance that no table was made for ------------------------------------------------------------


class Direct:
    """Calls of the transformer inside one run of a pipeline whose scheduler knows four steps."""

    def __init__(self, kind: Kind, batch: int) -> None:
        self.kind = kind
        pipe = kind.pipe()
        self.model, self.frame = pipe.transformer, framed(pipe)
        self.scheduler = pipe.scheduler
        self.scheduler.set_timesteps(sigmas=[0.9, 0.7, 0.4, 179 / 256], mu=0.0)
        self.scheduler.set_begin_index(0)
        self.batch, generator = batch, torch.Generator().manual_seed(4)
        if kind is FLUX:
            prompt = flux_inputs(pipe, batch)
            self.arguments: dict[str, Any] = {
                "hidden_states": torch.randn(batch, 12, 16, generator=generator),
                "encoder_hidden_states": prompt["prompt_embeds"],
                "pooled_projections": prompt["pooled_prompt_embeds"],
                "img_ids": torch.zeros(12, 3),
                "txt_ids": torch.zeros(7, 3),
                "guidance": torch.full([1], 3.5).expand(batch),
            }
        else:
            self.arguments = {
                "x": list(torch.randn(batch, 4, 1, 8, 8, generator=generator)),
                "cap_feats": kind.prompt(pipe, (7,) * batch)["prompt_embeds"],
            }

    def at(self, *timesteps: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.Tensor:
        """The output for scheduler's time steps, one an item or one for all, given to the model as pipelines do."""
        t = torch.stack([torch.as_tensor(timestep) for timestep in timesteps]).float()
        t = t.expand(self.batch) if len(t) == 1 else t
        given = {"timestep": (t / 1000).to(dtype)} if self.kind is FLUX else {"t": ((1000 - t) / 1000).to(dtype)}
        return torch.stack(list(self.model(**{**self.arguments, **given, **changes})[0]))

    def accelerated(self) -> fusedit.Handle:
        return fusedit.accelerate(self.frame)


def check(direct: Direct, handle: fusedit.Handle, call: Callable[[], torch.Tensor], hits: int) -> torch.Tensor:
    """One call equals stock's, and takes this many of its rows from a table of an earlier call."""
    before = found(handle)
    fused: torch.Tensor = direct.frame(call)
    after = found(handle)
    with handle.paused():
        assert relative(fused, direct.frame(call)) < 1e-6
    assert (after[0] - before[0], after[1] - before[1]) == (hits, direct.batch - hits)
    return fused


@each_kind
@pytest.mark.parametrize("batch", [1, 2])
def test_a_table_answers_for_no_time_step_it_was_not_made_for(kind: Kind, batch: int) -> None:
    direct = Direct(kind, batch)
    handle = direct.accelerated()
    known = direct.scheduler.timesteps
    for i, t in enumerate(known):
        check(direct, handle, lambda t=t: direct.at(t), batch if i else 0)
    for t in (500.0, float(known[1]) + 1e-3, float(known[1]) * (1 + 2e-7), 0.0, 1000.0, -3.0):
        near = check(direct, handle, lambda t=t: direct.at(t), 0)
        assert not torch.equal(near, direct.frame(lambda: direct.at(known[1])))
    if batch == 2:
        mixed = check(direct, handle, lambda: direct.at(known[1], 123.0), 1)
        swapped = check(direct, handle, lambda: direct.at(123.0, known[1]), 1)
        assert not torch.equal(mixed, swapped)
        check(direct, handle, lambda: direct.at(known[2], known[0]), 2)


@each_kind
def test_a_table_tells_time_steps_of_another_precision_apart(kind: Kind) -> None:
    """179 / 256 is the same number in bfloat16, but times 1000 it is not."""
    direct = Direct(kind, 1)
    handle = direct.accelerated()
    exact = direct.frame(lambda: direct.at(direct.scheduler.timesteps[3]))
    low = direct.frame(lambda: direct.at(direct.scheduler.timesteps[3], dtype=torch.bfloat16))
    with handle.paused():
        stock = direct.frame(lambda: direct.at(direct.scheduler.timesteps[3], dtype=torch.bfloat16))
    assert relative(low, stock) < 1e-6
    assert torch.equal(low, exact) == (kind is FLUX)  # which takes the time step to the dtype of the image first


def test_a_table_answers_for_no_guidance_it_was_not_made_for() -> None:
    direct = Direct(FLUX, 2)
    handle = direct.accelerated()
    t = direct.scheduler.timesteps[0]
    first = check(direct, handle, lambda: direct.at(t), 0)
    for guidance, hits in (([3.5, 3.5], 2), ([7.0, 7.0], 0), ([3.5, 7.0], 1), ([7.0, 3.5], 1), ([3.5000002, 3.5], 1)):
        tensor = torch.tensor(guidance)
        again = check(direct, handle, lambda tensor=tensor: direct.at(t, guidance=tensor), hits)
        assert torch.equal(again, first) == (guidance == [3.5, 3.5])
    inplace = torch.full([2], 3.5)
    check(direct, handle, lambda: direct.at(t, guidance=inplace), 2)
    inplace.mul_(2)
    check(direct, handle, lambda: direct.at(t, guidance=inplace), 0)
    assert torch.equal(check(direct, handle, lambda: direct.at(t), 2), first)


def test_pooled_embeddings_are_told_apart_by_identity_and_version() -> None:
    direct = Direct(FLUX, 2)
    handle = direct.accelerated()
    t = direct.scheduler.timesteps[1]
    first = check(direct, handle, lambda: direct.at(t), 0)
    check(direct, handle, lambda: direct.at(t), 2)
    pooled = direct.arguments["pooled_projections"]
    same = pooled.clone()
    assert relative(check(direct, handle, lambda: direct.at(t, pooled_projections=same), 0), first) < 1e-6
    pooled.mul_(1.5)
    second = check(direct, handle, lambda: direct.at(t), 0)
    assert relative(second, first) > 1e-3
    pooled[0].zero_()  # through a view
    third = check(direct, handle, lambda: direct.at(t), 0)
    assert relative(third[0], second[0]) > 1e-3
    assert relative(third[1], second[1]) < 1e-6
    for _ in range(20):  # a freed tensor's identity and address must not come back to life
        other = torch.randn(2, pooled.shape[1])
        check(direct, handle, lambda other=other: direct.at(t, pooled_projections=other), 0)
        del other


@each_kind
def test_one_conditioning_serves_a_whole_batch_as_in_stock(kind: Kind) -> None:
    direct = Direct(kind, 2)
    handle = direct.accelerated()
    t = direct.scheduler.timesteps[0].reshape(1)
    one: dict[str, Any] = {"t": (1000 - t) / 1000}
    if kind is FLUX:
        pooled = direct.arguments["pooled_projections"][:1]
        one = {"timestep": (t / 1000).expand(2), "pooled_projections": pooled}
    for hits in (0, 2):
        check(direct, handle, lambda: direct.at(t[0], **one), hits)


class Lying:
    """step_index as fusedit sees it; the scheduler itself and its pipeline see the truth."""

    def __init__(self, lie: Any) -> None:
        self.lie = lie

    def on(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(scheduler)
        scheduler.__class__ = type(kind.__name__, (kind,), {})
        true_run = install._run_of

        def run_of(pipe: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(scheduler), "step_index", self.lie)
                return true_run(pipe)

        monkeypatch.setattr(install, "_run_of", run_of)


@each_kind
@pytest.mark.parametrize("lie", [0, 1, 2, 3, 4, 7, 1000, -1, -5, None, "three", 1.0])
def test_a_scheduler_that_does_not_know_its_step_changes_no_result(
    kind: Kind, lie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modulation, "ROWS", 2)
    stock = kind.call(kind.pipe(), num_inference_steps=5)
    pipe = kind.pipe()
    Lying(lie).on(pipe.scheduler, monkeypatch)
    handle = fusedit.accelerate(pipe)
    assert relative(kind.call(pipe, num_inference_steps=5), stock) < CLOSE
    assert sum(found(handle)) == 5
    assert found(handle)[0] <= 2


def other_times(pipe: Any, _kwargs: dict[str, Any]) -> None:
    """New time steps in the middle of a run, whose loop goes on with the old ones."""
    pipe.scheduler.set_timesteps(sigmas=[0.95, 0.6, 0.35, 0.15], mu=0.2)
    pipe.scheduler.set_begin_index(2)


def other_scheduler(pipe: Any, kwargs: dict[str, Any]) -> None:
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other_times(pipe, kwargs)


def no_scheduler_of_ours(pipe: Any, kwargs: dict[str, Any]) -> None:
    """One without `timesteps` as a tensor: no run is known."""
    other_times(pipe, kwargs)
    pipe.scheduler.timesteps = pipe.scheduler.timesteps.tolist()


@each_kind
@pytest.mark.parametrize("change", [other_times, other_scheduler, no_scheduler_of_ours])
def test_time_steps_that_change_within_a_run(kind: Kind, change: Callable[..., None]) -> None:
    plain = kind.call(kind.pipe(), num_inference_steps=4)
    changed, _, handle = both(kind, lambda: {"num_inference_steps": 4, **at_step(1, change)})
    assert relative(changed, plain) > 1e-3
    assert found(handle) == (1, 3)


@each_kind
@pytest.mark.parametrize("how", ["the same", "written into"])
def test_a_scheduler_that_keeps_its_tensor_of_time_steps(kind: Kind, how: str) -> None:
    """Between its runs nothing may be kept: embeddings change in a way that no identity and no version shows."""
    pipe, fresh = kind.pipe(), kind.pipe()
    fusedit.accelerate(pipe)
    kept: Any = type(pipe.scheduler)

    class Keeping(kept):  # type: ignore[misc]
        def set_timesteps(
            self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None
        ) -> None:
            before = self.timesteps if getattr(self, "num_inference_steps", None) else None
            super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu)
            if before is not None:
                self.timesteps = before.copy_(self.timesteps) if how == "written into" else before

    given = kind.prompt(pipe)
    for each in (pipe, fresh):
        each.scheduler = Keeping.from_config(each.scheduler.config)
    first = kind.call(pipe, **given)
    for value in given.values():
        for t in value if isinstance(value, list) else [value]:
            if isinstance(t, torch.Tensor):
                t.data.copy_(t.flip(-1))
    again = kind.call(pipe, **given)
    assert relative(again, first) > 1e-4
    assert relative(again, kind.call(fresh, **given)) < CLOSE


# -- Weights, prompts and LoRAs that change ------------------------------------------------------------------------


def edit_in_place(model: Any, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(-1.7)


def edit_through_a_view(model: Any, name: str) -> None:
    model.get_parameter(name).detach()[..., ::2].mul_(-1.7)


def load_into(model: Any, name: str) -> None:
    model.load_state_dict({name: model.get_parameter(name).detach() * -1.7}, strict=False)


def assign(model: Any, name: str) -> None:
    model.load_state_dict({name: model.get_parameter(name).detach() * -1.7}, strict=False, assign=True)


def replace_parameter(model: Any, name: str) -> None:
    owner, _, leaf = name.rpartition(".")
    value = torch.nn.Parameter(model.get_parameter(name).detach() * -1.7)
    setattr(model.get_submodule(owner), leaf, value)


def replace_module(model: Any, name: str) -> None:
    owner, _, leaf = name.rpartition(".")
    if not owner:
        return replace_parameter(model, name)
    made = copy.deepcopy(model.get_submodule(owner))
    made.get_parameter(leaf).data.mul_(-1.7)
    outer, _, last = owner.rpartition(".")
    return setattr(model.get_submodule(outer), last, made)


EDITS = (edit_in_place, edit_through_a_view, load_into, assign, replace_parameter, replace_module)
WEIGHTS = [
    pytest.param(kind, name, edit, id=f"{edit.__name__}-{name}")
    for kind in KINDS
    for edit in EDITS
    for name in (*kind.conditions, *kind.others)
    if edit is edit_in_place or name in (kind.conditions[0], kind.conditions[3], kind.others[0])
]


@pytest.mark.parametrize(("kind", "name", "edit"), WEIGHTS)
def test_weights_edited_within_a_run_take_effect_at_once(kind: Kind, name: str, edit: Callable[..., None]) -> None:
    def change(pipe: Any, _kwargs: dict[str, Any]) -> None:
        edit(pipe.transformer, name)

    untouched = kind.call(kind.pipe(), num_inference_steps=4)
    first, pipe, handle = both(kind, lambda: {"num_inference_steps": 4, **at_step(1, change)})
    assert relative(first, untouched) > 1e-5
    made = 1 if name in kind.others or name.startswith("all_final_layer") else 2  # the last norm's is no part of it
    assert found(handle) == (4 - made, made), "a table of the new weights serves the steps that follow"
    fresh = kind.pipe()
    edit(fresh.transformer, name)
    fusedit.accelerate(fresh)
    assert torch.equal(kind.call(pipe), kind.call(fresh))


def test_pooled_embeddings_edited_within_a_run_take_effect_at_once() -> None:
    def make() -> dict[str, Any]:
        given = flux_inputs(flux_pipe())
        edit = at_step(1, lambda *_: given["pooled_prompt_embeds"].mul_(1.5))
        return {**given, **edit, "num_inference_steps": 4}

    plain = FLUX.call(flux_pipe(), num_inference_steps=4)
    changed, _, handle = both(FLUX, make)
    assert relative(changed, plain) > 1e-4
    assert found(handle) == (2, 2)


@each_kind
def test_the_run_before_leaves_no_trace(kind: Kind) -> None:
    """Another prompt, guidance, length of prompt, batch, size, number of steps; and back: the first bits again."""
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    variants: list[dict[str, Any]] = [
        {},
        kind.prompt(pipe, seed=5),
        kind.prompt(pipe, (40,)),
        kind.prompt(pipe, (7, 40)),
        kind.negative(pipe),
        {"width": 48, "height": 64},
        {"width": 32, "height": 32},
        {"num_inference_steps": 5},
        {"guidance_scale": 6.0} if kind is FLUX else {"sigmas": [0.8, 0.5, 0.2]},
    ]
    first = kind.call(pipe)
    for variant in variants:
        other = fusedit.accelerate(fresh := kind.pipe())
        assert torch.equal(kind.call(pipe, **variant), kind.call(fresh, **variant)), variant
        hits, misses = found(other)
        assert hits == (variant.get("num_inference_steps", 3) - 1) * misses, "one table for each conditioning"
        assert torch.equal(kind.call(pipe), first), variant
    assert rows(handle).reasons == {}


@each_kind
def test_a_batch_item_equals_its_solo_run(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    lengths = (7, 40, 9) if kind is Z_IMAGE else (7, 7, 7)
    prompt = kind.prompt(pipe, lengths)
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    batch = kind.call(pipe, **prompt, generator=generators)
    for i in range(3):
        alone = {name: value[i : i + 1] for name, value in prompt.items()}
        solo = kind.call(pipe, **alone, generator=torch.Generator().manual_seed(i))
        assert relative(batch[i : i + 1], solo) < CLOSE
        assert all(relative(batch[i], batch[j]) > 1e-2 for j in range(i))
    assert found(handle) == (3 * 2 + 3 * 2, 3 + 3)


@each_kind
@pytest.mark.parametrize("part", [0, 1, 2], ids=["modulation", "embeddings", "others"])
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_that_comes_and_goes_between_runs(kind: Kind, part: int) -> None:
    reference, pipe = kind.pipe(), kind.pipe()
    handle = fusedit.accelerate(pipe)
    plain = kind.call(pipe)
    state = lora_state(pipe, names=kind.lora[part])
    actions: list[Callable[[Any], Any]] = [
        lambda each: each.load_lora_weights(dict(state), adapter_name="a"),
        lambda each: each.set_adapters(["a"], [0.4]),
        lambda each: each.transformer.disable_adapters(),
        lambda each: each.transformer.enable_adapters(),
        lambda each: each.fuse_lora(),
        lambda each: each.unfuse_lora(),
    ]
    seen = [plain]
    for act in actions:
        for each in (reference, pipe):
            act(each)
        before = found(handle)
        fused = kind.call(pipe)
        assert relative(fused, kind.call(reference)) < CLOSE
        assert found(handle) == (before[0] + 2, before[1] + 1), "what a LoRA adds is part of the rows of a table"
        seen.append(fused)
    assert relative(seen[1], plain) > 1e-3
    assert relative(seen[2], seen[1]) > 1e-3
    assert relative(seen[3], plain) < CLOSE
    assert site(handle, f"{kind.name}.modulation").stock == 0
    assert rows(handle).reasons == {}
    before = found(handle)
    for each in (reference, pipe):
        each.unload_lora_weights()
    assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    assert found(handle)[0] == before[0] + 2, "tables are used again"


@each_kind
@pytest.mark.parametrize("part", [0, 1, 2], ids=["modulation", "embeddings", "others"])
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_that_comes_and_goes_within_a_run(kind: Kind, part: int) -> None:
    state = lora_state(kind.pipe(), names=kind.lora[part])
    actions: list[Callable[[Any], Any]] = [
        lambda each: each.load_lora_weights(dict(state), adapter_name="a"),
        lambda each: each.set_adapters(["a"], [0.4]),
        lambda each: each.fuse_lora(),
        lambda each: each.unfuse_lora(),
        lambda each: each.unload_lora_weights(),
    ]

    def act(pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i < len(actions):
            actions[i](pipe)
        return kwargs

    plain = kind.call(kind.pipe(), num_inference_steps=7)
    changed, _, handle = both(kind, lambda: {"num_inference_steps": 7, "callback_on_step_end": act})
    assert relative(changed, plain) > 1e-3
    hits, _ = found(handle)
    assert hits == 4 if part == 2 else 1 <= hits < 6  # fusing and unfusing make their tables anew


@each_kind
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_that_is_fused_between_two_steps(kind: Kind) -> None:
    """Loaded, fused and unloaded in one callback: all that is left of it are other bits in the same parameters."""
    state = lora_state(kind.pipe())

    def fuse(pipe: Any, _: dict[str, Any]) -> None:
        pipe.load_lora_weights(dict(state))
        pipe.fuse_lora()
        pipe.unload_lora_weights()

    plain = kind.call(kind.pipe(), num_inference_steps=5)
    changed, _, handle = both(kind, lambda: {"num_inference_steps": 5, **at_step(1, fuse)})
    assert relative(changed, plain) > 1e-2
    assert found(handle) == (3, 2)


def theta(model: Any) -> None:
    model.pos_embed.theta = 50


def other_embedder(model: Any) -> None:
    model.pos_embed = type(model.pos_embed)(theta=50, axes_dim=model.pos_embed.axes_dim)


def other_scale(model: Any) -> None:
    model.time_text_embed.time_proj.scale = 3.0


def other_activation(model: Any) -> None:
    model.time_text_embed.timestep_embedder.act = torch.nn.GELU()


def other_time_scale(model: Any) -> None:
    model.t_scale = 500.0


@pytest.mark.parametrize(
    ("kind", "change"),
    [(FLUX, theta), (FLUX, other_embedder), (FLUX, other_scale), (FLUX, other_activation), (Z_IMAGE, other_time_scale)],
)
def test_settings_of_hoisted_modules_that_change_within_a_run(kind: Kind, change: Callable[[Any], None]) -> None:
    def edit(pipe: Any, _: dict[str, Any]) -> None:
        change(pipe.transformer)

    plain = kind.call(kind.pipe(), num_inference_steps=4)
    changed, _, _ = both(kind, lambda: {"num_inference_steps": 4, **at_step(1, edit)})
    assert relative(changed, plain) > 1e-4


@each_kind
def test_a_pipeline_that_sets_no_time_steps_has_no_run(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    kind.call(pipe)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    assert install._run_of(pipe) is None
    pipe.scheduler.set_timesteps(3, mu=0.5)
    assert install._run_of(pipe) is not None
    handle.restore()


@each_kind
def test_another_dtype_and_back_equals_a_fresh_pipeline_that_took_the_same_way(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    first = kind.call(pipe)
    low = kind.call(pipe.to(torch.bfloat16))
    assert found(handle) == (4, 2)
    fresh = kind.pipe().to(torch.bfloat16)
    fusedit.accelerate(fresh)
    assert torch.equal(low, kind.call(fresh))
    again = kind.call(pipe.to(torch.float32))
    assert torch.equal(again, kind.call(fresh.to(torch.float32)))
    assert relative(again, first) > 0  # bfloat16 rounded the weights


def replaced(pipe: Any, other: Any, blocks: str, attention: str) -> None:  # noqa: ARG001
    getattr(pipe.transformer, blocks)[1] = getattr(other.transformer, blocks)[1]


def swapped(pipe: Any, other: Any, blocks: str, attention: str) -> None:  # noqa: ARG001
    owner = getattr(pipe.transformer, blocks)
    owner[0], owner[1] = owner[1], owner[0]


def dropped(pipe: Any, other: Any, blocks: str, attention: str) -> None:  # noqa: ARG001
    setattr(pipe.transformer, blocks, getattr(pipe.transformer, blocks)[1:])


def attention_replaced(pipe: Any, other: Any, blocks: str, attention: str) -> None:
    setattr(getattr(pipe.transformer, blocks)[1], attention, getattr(getattr(other.transformer, blocks)[1], attention))


@each_kind
@pytest.mark.parametrize("change", [replaced, swapped, dropped, attention_replaced])
def test_blocks_that_are_replaced_after_accelerate_are_followed(kind: Kind, change: Callable[..., None]) -> None:
    """As stock does, which looks its blocks up at each call; between runs and within one."""
    names = ("transformer_blocks", "attn") if kind is FLUX else ("layers", "attention")

    def script(pipe: Any) -> list[torch.Tensor]:
        other = kind.pipe(5)
        within = kind.call(pipe, **at_step(0, lambda *_: change(pipe, other, *names)))
        return [within, kind.call(pipe)]

    plain = kind.call(kind.pipe())
    stock = script(kind.pipe())
    pipe = kind.pipe()
    fusedit.accelerate(pipe)
    kind.call(pipe)
    fused = script(pipe)
    assert all(relative(x, plain) > 1e-3 for x in stock)
    assert all(relative(x, y) < CLOSE for x, y in zip(fused, stock, strict=True))


# -- Inference mode ------------------------------------------------------------------------------------------------


def test_embeddings_made_in_inference_mode_are_not_watched_and_counted() -> None:
    pipe = flux_pipe()
    stock = FLUX.call(pipe)
    handle = fusedit.accelerate(pipe)
    with torch.inference_mode():
        fused = FLUX.call(pipe)
    assert relative(fused, stock) < CLOSE
    assert found(handle) == (0, 3)
    assert rows(handle).reasons == {UNWATCHED: 3}


def test_weights_made_in_inference_mode_are_not_watched_and_counted() -> None:
    with torch.inference_mode():
        pipe = Z_IMAGE.pipe()
        stock = Z_IMAGE.call(pipe)
        handle = fusedit.accelerate(pipe)
        assert relative(Z_IMAGE.call(pipe), stock) < CLOSE
    assert found(handle) == (0, 3)
    assert rows(handle).reasons == {UNWATCHED: 3}


@each_kind
@pytest.mark.parametrize("first", ["inference", "normal"])
def test_a_run_may_change_between_inference_mode_and_none(kind: Kind, first: str) -> None:
    direct = Direct(kind, 1)
    handle = direct.accelerated()
    times = direct.scheduler.timesteps

    def run() -> list[torch.Tensor]:
        made = []
        for i in range(4):
            with torch.inference_mode() if (i % 2 == 0) == (first == "inference") else nullcontext():
                made.append(direct.at(times[i]).clone())
        return made

    fused = direct.frame(run)
    assert sum(found(handle)) == 4
    with handle.paused():
        stock = direct.frame(run)
    assert all(relative(a, b) < 1e-6 for a, b in zip(fused, stock, strict=True))


# -- Several pipelines, exceptions, threads ------------------------------------------------------------------------


def interrupted(kind: Kind, pipe: Any, step: int = 1) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        kind.call(pipe, **at_step(step, fail))


@each_kind
def test_after_an_exception_in_a_callback_the_next_run_equals_a_fresh_one(kind: Kind) -> None:
    pipe = kind.pipe()
    handle = fusedit.accelerate(pipe)
    interrupted(kind, pipe)
    assert rows(handle).entries == 3, "the run ended early, so its table was never let go: the test shows something"
    assert found(handle) == (1, 1)
    assert "modulation rows: 1 reused, 1 computed, 3 of 64 kept" in str(handle.report())
    other = kind.prompt(pipe, seed=5)
    fusedit.accelerate(fresh := kind.pipe())
    assert torch.equal(kind.call(pipe, **other), kind.call(fresh, **other))
    assert rows(handle).entries == 0
    assert found(handle) == (3, 2)
    interrupted(kind, pipe, 0)
    handle.restore()
    stock = kind.call(kind.pipe())
    assert torch.equal(kind.call(pipe), stock)


@each_kind
def test_two_pipelines_do_not_disturb_each_other(kind: Kind) -> None:
    """One draws whole pictures in the callbacks of the other."""
    a, b = kind.pipe(0), kind.pipe(1)
    alone = [kind.call(each) for each in (a, b)]
    handles = [fusedit.accelerate(each) for each in (a, b)]
    inner: list[torch.Tensor] = []

    def draw(_pipe: Any, _i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        inner.append(kind.call(b))
        return kwargs

    outer = kind.call(a, callback_on_step_end=draw)
    assert relative(outer, alone[0]) < CLOSE
    assert all(relative(picture, alone[1]) < CLOSE for picture in inner)
    assert [found(handle) for handle in handles] == [(2, 1), (6, 3)]


@pytest.mark.parametrize("kinds", [(FLUX, FLUX), (Z_IMAGE, Z_IMAGE), (FLUX, Z_IMAGE)], ids=str)
def test_two_pipelines_in_two_threads(kinds: tuple[Kind, Kind]) -> None:
    """Step by step in turn, so that each works while the other is in the middle of a run."""
    pipes = [kind.pipe(i) for i, kind in enumerate(kinds)]
    stock = [kind.call(pipe, num_inference_steps=4) for kind, pipe in zip(kinds, pipes, strict=True)]
    handles = [fusedit.accelerate(pipe) for pipe in pipes]
    barrier, drawn = threading.Barrier(2, timeout=60), {}

    def turn(_pipe: Any, _i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        barrier.wait()
        return kwargs

    def work(i: int) -> None:
        drawn[i] = kinds[i].call(pipes[i], num_inference_steps=4, callback_on_step_end=turn)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(relative(drawn[i], stock[i]) < CLOSE for i in range(2))
    assert [found(handle) for handle in handles] == [(3, 1), (3, 1)]


@each_kind
def test_modules_shared_with_the_transformer_of_another_pipeline(kind: Kind) -> None:
    """An edit through the other one, in the middle of a run; both stay right."""

    def shared() -> tuple[Any, Any]:
        a, b = kind.pipe(0), kind.pipe(1)
        names = ("time_text_embed", "norm_out") if kind is FLUX else ("t_embedder", "cap_embedder", "context_refiner")
        for name in (*names, "transformer_blocks" if kind is FLUX else "layers"):
            setattr(b.transformer, name, getattr(a.transformer, name))
        return a, b

    def script(a: Any, b: Any) -> list[torch.Tensor]:
        def edit(*_: Any) -> None:
            made.append(kind.call(b))
            edit_in_place(b.transformer, kind.conditions[0])
            edit_in_place(b.transformer, kind.conditions[3])

        made: list[torch.Tensor] = []
        made.append(kind.call(a, num_inference_steps=4, **at_step(1, edit)))
        return [*made, kind.call(b), kind.call(a)]

    stock = script(*shared())
    a, b = shared()
    handles = [fusedit.accelerate(each) for each in (a, b)]
    assert all(relative(x, y) < CLOSE for x, y in zip(script(a, b), stock, strict=True))
    assert [found(handle) for handle in handles] == [(2 + 2, 2 + 1), (2 + 2, 1 + 1)]
    assert relative(stock[0], kind.call(kind.pipe(0), num_inference_steps=4)) > 1e-4
