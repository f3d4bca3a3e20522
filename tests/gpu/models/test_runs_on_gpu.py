"""Runs on a GPU, every step that may be captured in a CUDA graph: the bits of eager runs, no stale one, flat memory.

Captures that fail, and those beside other threads, are tested in processes of their own: see tests/gpu/runtime.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gpu import freed, peak_bytes
from support.gpu_runs import (
    EAGER,
    HEIGHT,
    WIDTH,
    GpuKind,
    Seen,
    cached,
    errors_of,
    flat,
    graphs_of,
    guidance,
    picture,
    prompt,
    same,
    stock_and_exact,
    told,
)
from support.pipes import lora_state, relative
from support.runs import framed, with_control, with_image
from support.runs import picture as random_image

import fusedit
from benchmarks.compilations import kernels, variants
from benchmarks.workloads import Workload
from fusedit.models import _modulation as modulation
from fusedit.ops import _hopper
from fusedit.runtime import graphs

Drawn = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured whatever the host's speed."""
    monkeypatch.setattr(graphs, "HOST_SHARE", 0.0)


# -- Replays -------------------------------------------------------------------------------------------------------


def test_replays_give_the_bits_and_the_counts_of_eager_steps(shallow: Workload) -> None:
    def script(_handle: fusedit.Handle) -> Drawn:
        return [picture(shallow, num_inference_steps=10) for _ in range(3)]

    drawn, report = same(shallow, script)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    found = cached(report, "graphs")
    assert found.hits + found.misses == 30
    assert found.hits >= 26
    assert found.entries == 1
    assert found.bytes > 0


def test_captured_steps_need_no_more_memory_than_stock(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    picture(shallow, 1024, 1024)
    fused = peak_bytes(lambda: picture(shallow, 1024, 1024))
    assert graphs_of(handle).entries == 1
    handle.restore()
    freed()
    picture(shallow, 1024, 1024)
    assert fused <= peak_bytes(lambda: picture(shallow, 1024, 1024))


def test_a_step_that_the_gpu_limits_runs_eagerly(shallow: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "HOST_SHARE", 1e9)
    eager, _ = told(shallow, EAGER, lambda _: [picture(shallow)])
    drawn, report = told(shallow, "exact", lambda _: [picture(shallow)])
    assert torch.equal(drawn[0], eager[0])
    found = cached(report, "graphs")
    assert (found.hits, found.entries) == (0, 0)
    assert any("GPU is the limit" in reason for reason in found.reasons)


def test_another_prompt_length_batch_guidance_or_size_and_back(kind: GpuKind, shallow: Workload) -> None:
    variants: list[dict[str, Any]] = [
        prompt(shallow, 64, seed=5),
        prompt(shallow, 37),
        {"batch": 2, **prompt(shallow, 64, 200)},
        guidance(shallow),
        {"guidance_scale": 7.0} if kind.name == "flux" else {**guidance(shallow), "guidance_scale": 1.5},
        {"width": 320},
        {"width": 512, "height": 128},  # as many tokens, other positions
    ]
    base = prompt(shallow, 64)

    def script(_handle: fusedit.Handle) -> Drawn:
        drawn = [picture(shallow, **base)]
        for variant in variants:
            drawn += [picture(shallow, **{**base, **variant}), picture(shallow, **base)]
        return drawn

    drawn, report = same(shallow, script)
    assert all(torch.equal(again, drawn[0]) for again in drawn[2::2])
    assert not any(other.shape == drawn[0].shape and torch.equal(other, drawn[0]) for other in drawn[1::2])
    assert cached(report, "graphs").entries <= graphs.CAPACITY


def test_outputs_that_were_kept_are_not_overwritten(shallow: Workload) -> None:
    """CG-01."""
    kept: Drawn = []
    copies: Drawn = []

    def keep(_model: Any, _args: Any, output: Any) -> None:
        kept.extend(output[0])
        copies.extend(item.clone() for item in output[0])

    def script(_handle: fusedit.Handle) -> Drawn:
        for seed in range(3):
            picture(shallow, generator=torch.Generator().manual_seed(seed))
        return kept

    hook = shallow.pipe.transformer.register_forward_hook(keep)
    try:
        _, report = told(shallow, "exact", script)
    finally:
        hook.remove()
    assert cached(report, "graphs").hits >= 12
    assert len(kept) == 18
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert not torch.equal(kept[0], kept[6])


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_lora_that_comes_and_goes(kind: GpuKind, shallow: Workload) -> None:
    pipe = shallow.pipe
    state = lora_state(pipe, scale=0.05, names=kind.lora)

    def script(_handle: fusedit.Handle) -> Drawn:
        drawn = [picture(shallow)]
        pipe.load_lora_weights(dict(state), adapter_name="a")
        try:
            drawn.append(picture(shallow))
            for scale in (0.5, 0.0, 1.0):
                pipe.set_adapters(["a"], [scale])
                drawn.append(picture(shallow))
            pipe.fuse_lora()
            drawn.append(picture(shallow))
            pipe.unfuse_lora()
        finally:
            pipe.unload_lora_weights()
            with torch.no_grad():  # fusing and unfusing in bf16 does not give back every bit
                for name, parameter in pipe.transformer.named_parameters():
                    parameter.copy_(before[name])
        return [*drawn, picture(shallow)]

    before = {name: parameter.clone() for name, parameter in pipe.transformer.named_parameters()}
    drawn, _ = same(shallow, script)
    assert torch.equal(drawn[-1], drawn[0])
    assert not torch.equal(drawn[1], drawn[0])
    assert not torch.equal(drawn[2], drawn[1])
    assert torch.equal(drawn[4], drawn[1])


def test_weights_edited_in_place_are_read_by_the_same_graph(kind: GpuKind, shallow: Workload) -> None:
    weights = [shallow.pipe.transformer.get_parameter(name) for name in kind.weights]

    def edit(by: float) -> None:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(by)

    def script(handle: fusedit.Handle) -> Drawn:
        drawn = [picture(shallow)]
        before = graphs_of(handle)
        edit(2.0)
        try:
            drawn.append(picture(shallow))
        finally:
            edit(0.5)  # exact in bf16
        drawn.append(picture(shallow))
        after = graphs_of(handle)
        assert after.misses == before.misses
        assert after.entries == before.entries
        return drawn

    drawn, _ = same(shallow, script)
    assert not torch.equal(drawn[1], drawn[0])
    assert torch.equal(drawn[2], drawn[0])


def test_a_transformer_that_was_away_is_captured_anew(shallow: Workload) -> None:
    model = shallow.pipe.transformer
    before = {name: parameter.cpu() for name, parameter in model.named_parameters()}

    def script(_handle: fusedit.Handle) -> Drawn:
        drawn = [picture(shallow)]
        model.to("cpu")
        model.to("cuda")
        for _ in range(2):
            drawn.append(picture(shallow))
            torch.full((2**28,), float("nan"), device="cuda")  # over whatever memory was freed
        return drawn

    drawn, report = same(shallow, script)
    assert all(torch.equal(again, drawn[0]) for again in drawn)
    assert all(torch.equal(parameter.cpu(), before[name]) for name, parameter in model.named_parameters())
    assert cached(report, "graphs").entries == 1


def test_many_sizes_keep_few_graphs(shallow: Workload) -> None:
    widths = [256, 272, 288, 304, 320, 336]

    def script(handle: fusedit.Handle) -> Drawn:
        drawn = []
        for _ in range(2):
            drawn += [picture(shallow, width=width) for width in widths]
            assert graphs_of(handle).entries == (graphs.CAPACITY if handle.plan.cache["graphs"] else 0)
        return drawn

    drawn, _ = same(shallow, script)
    assert all(torch.equal(drawn[i], drawn[i + len(widths)]) for i in range(len(widths)))


def test_out_of_memory_while_capturing_drops_all_graphs(shallow: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,), _ = told(shallow, EAGER, lambda _: [picture(shallow, width=320)])
    capture = graphs._captured

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def script(handle: fusedit.Handle) -> Drawn:
        picture(shallow)
        assert graphs_of(handle).entries == 1
        monkeypatch.setattr(graphs, "_captured", full)
        drawn = [picture(shallow, width=320)]
        assert graphs_of(handle).entries == 0
        assert graphs_of(handle).bytes == 0
        monkeypatch.setattr(graphs, "_captured", capture)
        return [*drawn, picture(shallow, width=320)]

    drawn, report = told(shallow, "exact", script)
    assert all(torch.equal(item, expected) for item in drawn)
    assert any("out of memory while capturing" in reason for reason in cached(report, "graphs").reasons)


def test_a_worker_thread_draws_the_same_bits(shallow: Workload) -> None:
    def script(_handle: fusedit.Handle) -> Drawn:
        with ThreadPoolExecutor(1) as worker:
            return [
                worker.submit(picture, shallow).result(),
                picture(shallow),
                worker.submit(picture, shallow).result(),
            ]

    drawn, _ = same(shallow, script)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_pictures_in_inference_mode_and_outside_by_turns(shallow: Workload) -> None:
    def script(_handle: fusedit.Handle) -> Drawn:
        drawn = []
        for inference in (True, False, True):
            if inference:
                with torch.inference_mode():
                    drawn.append(picture(shallow))
            else:
                drawn.append(picture(shallow))
        return [item.clone() for item in drawn]

    drawn, _ = same(shallow, script)
    assert torch.equal(drawn[2], drawn[0])  # what is kept for a run, as in the second, is computed otherwise


def test_an_exception_in_a_callback_leaves_the_next_run_right(shallow: Workload) -> None:
    def fail(_pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i == step:
            raise RuntimeError("interrupted")
        return kwargs

    (expected,), _ = told(shallow, EAGER, lambda _: [picture(shallow)])
    for step in (0, 1, 3):  # noqa: B007 - read by fail

        def script(handle: fusedit.Handle) -> Drawn:
            with pytest.raises(RuntimeError, match="interrupted"):
                picture(shallow, callback_on_step_end=fail)
            drawn = [picture(shallow), picture(shallow)]
            assert cached(handle.report(), "modulation rows").entries == 0
            return drawn

        drawn, report = told(shallow, "exact", script)
        assert all(torch.equal(item, expected) for item in drawn)
        assert cached(report, "graphs").hits > 0


# -- Tables, other pipelines ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_tables_answer_for_no_time_step_they_were_not_made_for(
    kind: GpuKind, shallow: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared on the device: counts and the error of each call, known time steps and others in one batch."""
    monkeypatch.setattr(modulation, "TOKENS_PER_ROW", 1)
    with Seen(shallow) as seen:
        picture(shallow, batch=2, num_inference_steps=2)
    frame = framed(shallow.pipe)
    frame.scheduler.set_timesteps(sigmas=[0.9, 0.7, 0.4, 0.2], mu=0.0, device="cuda")
    frame.scheduler.set_begin_index(0)
    known = frame.scheduler.timesteps
    handle = fusedit.accelerate(frame)

    def call(*steps: Any, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        t = torch.stack([torch.as_tensor(step, device="cuda") for step in steps]).float()
        if kind.name == "flux":
            return (), {**seen.kwargs, "timestep": t.to(torch.bfloat16) / 1000, **changes}
        images, _, *rest = seen.args
        return (images, (1000 - t) / 1000, *rest), {**seen.kwargs, **changes}

    calls = [(call(known[i], known[i]), 2 if i else 0) for i in range(4)]  # the first makes the table
    calls += [(call(500.0, 500.0), 0), (call(known[1], 500.0), 1), (call(500.0, known[3]), 1)]
    calls += [(call(known[2], known[0]), 2)]
    if kind.name == "flux":
        calls.append((call(known[0], known[0], guidance=torch.tensor([3.5, 7.0], device="cuda")), 1))
    made = []
    for (args, kwargs), hits in calls:
        before = cached(handle.report(), "modulation rows")
        made.append(frame(lambda args=args, kwargs=kwargs: shallow.pipe.transformer(*args, **kwargs)[0]))
        after = cached(handle.report(), "modulation rows")
        assert (after.hits - before.hits, after.misses - before.misses) == (hits, 2 - hits)
    model = shallow.pipe.transformer
    ours, stocks = 0.0, 0.0
    for ((args, kwargs), _), output in zip(calls, made, strict=True):
        our, stock = errors_of(output, *stock_and_exact(model, handle, args, kwargs))
        ours, stocks = ours + our, stocks + stock
    handle.restore()
    assert ours <= 1.05 * stocks


@torch.no_grad()
def test_one_conditioning_serves_a_whole_batch_as_in_stock(kind: GpuKind, shallow: Workload) -> None:
    with Seen(shallow) as seen:
        picture(shallow, batch=2, num_inference_steps=2)
    args, kwargs = seen.args, dict(seen.kwargs)
    if kind.name == "flux":
        kwargs |= {name: kwargs[name][:1] for name in ("timestep", "guidance", "pooled_projections")}
    else:
        args = (args[0], args[1][:1], *args[2:])
    handle = fusedit.accelerate(shallow.pipe)
    fused = shallow.pipe.transformer(*args, **kwargs)[0]
    ours, stock = errors_of(fused, *stock_and_exact(shallow.pipe.transformer, handle, args, kwargs))
    handle.restore()
    assert ours <= 1.05 * stock


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
@pytest.mark.parametrize("what", ["img2img", "controlnet"])
def test_other_pipelines_through_the_fused_forward(kind: GpuKind, what: str) -> None:
    """The last step of a fused run: its error against fp32 is no larger than stock's for the same inputs."""
    made = kind.make(**kind.shallow)
    image = random_image(WIDTH, HEIGHT)
    if what == "img2img":
        workload = replace(made, pipe=with_image(made.pipe))
        arguments: dict[str, Any] = {"image": image, "strength": 0.7, "num_inference_steps": 9}
    else:
        workload = replace(made, pipe=with_control(made.pipe))
        arguments = {"control_image": image, "controlnet_conditioning_scale": 0.5}
    handle = fusedit.accelerate(workload.pipe)
    with Seen(workload) as seen:
        drawn = picture(workload, **arguments)
    report = handle.report()
    assert all(site.stock == 0 for site in report.rewritten if site.site.startswith(kind.name)), report
    assert cached(report, "graphs").hits > 0
    assert torch.isfinite(drawn).all()
    assert not torch.equal(picture(workload, **{**arguments, next(iter(arguments)): 1 - image}), drawn)
    model = workload.pipe.transformer
    ours, stock = errors_of(seen.output, *stock_and_exact(model, handle, seen.args, seen.kwargs))
    handle.restore()
    assert ours <= 1.05 * stock


# -- One process ---------------------------------------------------------------------------------------------------


def test_the_memory_of_fifty_pictures_does_not_grow(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)

    def taken(pictures: int) -> tuple[int, int]:
        for i in range(pictures):
            picture(shallow, width=(256, 320)[i % 2], generator=torch.Generator().manual_seed(i))
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left in cycles
        stats = torch.cuda.memory_stats()
        return int(stats["requested_bytes.all.current"]), int(stats["reserved_bytes.all.current"])

    before = taken(20)
    assert taken(30) == before
    assert graphs_of(handle).entries == 2
    handle.restore()


def test_nothing_is_compiled_after_warm_up(shallow: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in kernels():  # as in a new process
        kernel.device_caches.clear()
    monkeypatch.setattr(_hopper, "_known", set())
    handle = fusedit.accelerate(shallow.pipe)
    picture(shallow, 512, 512)
    picture(shallow, 512, 512, 2)
    before = variants()
    assert before > 0
    sizes = [(256, 256), (272, 528), (640, 512), (768, 768), (1024, 768), (1024, 1024), (336, 304), (1280, 720)]
    for width, height in [*sizes, (768, 256), (512, 512)]:
        for lengths in ((37,), (512,), (64, 200), (5, 5)):
            picture(shallow, width, height, len(lengths), **prompt(shallow, *lengths))
    assert variants() == before
    assert graphs_of(handle).hits > 0
    handle.restore()


def test_two_pipelines_in_one_process(kind: GpuKind, shallow: Workload) -> None:
    other = kind.make(**kind.one)
    pictures = [told(each, EAGER, lambda _, each=each: [picture(each)])[0][0] for each in (shallow, other)]
    handles = [fusedit.accelerate(each.pipe) for each in (shallow, other)]
    inner: Drawn = []

    def draw_other(_pipe: Any, _i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        inner.append(picture(other))
        return kwargs

    for _ in range(2):
        assert torch.equal(picture(shallow, callback_on_step_end=draw_other), pictures[0])
    assert all(torch.equal(item, pictures[1]) for item in inner)
    assert all(graphs_of(handle).hits > 0 for handle in handles)
    handles[1].restore()
    assert torch.equal(picture(shallow), pictures[0])
    handles[0].restore()


def test_model_offload_uses_no_graphs_and_says_so(kind: GpuKind) -> None:
    workload = kind.make(**kind.one)
    handle = fusedit.accelerate(workload.pipe)
    resident = picture(workload)
    before = graphs_of(handle)
    assert before.entries == 1
    workload.pipe.enable_model_cpu_offload()
    offloaded = picture(workload)
    with handle.paused():
        stock = picture(workload)
    after = graphs_of(handle)
    assert relative(offloaded, resident) <= 2 * relative(resident, stock) + 1e-3
    assert after.hits == before.hits
    assert after.reasons["weights move between calls (offload)"] == 6
    assert after.entries == 0, "graphs that can never be used again still take memory"
    workload.pipe.remove_all_hooks()
    workload.pipe.to("cuda")
    assert torch.equal(picture(workload), resident)
    assert graphs_of(handle).hits > before.hits
    handle.restore()


def test_restoring_gives_back_the_memory_of_graphs_and_tables(shallow: Workload) -> None:
    left = []
    for _ in range(4):  # the first leaves small tables and the libraries' workspaces behind
        _, report = told(shallow, "exact", lambda _: [picture(shallow)])
        assert cached(report, "graphs").entries == 1
        left.append(freed())
    assert left[1:] == left[1:2] * 3


def test_capturing_over_and_over_takes_no_more_memory(shallow: Workload) -> None:
    """Six sizes by turns, of which four are kept: each picture drops a graph and captures another."""
    handle = fusedit.accelerate(shallow.pipe)
    taken = []
    for _ in range(5):
        before = graphs_of(handle).hits
        for width in (256, 272, 288, 304, 320, 336):
            picture(shallow, width=width, num_inference_steps=4)
        assert graphs_of(handle).hits > before
        taken.append(freed())
    handle.restore()
    assert taken[2:] == taken[2:3] * 3


@torch.no_grad()
def test_the_last_step_of_a_replayed_run_keeps_the_rule(shallow: Workload) -> None:
    handle = fusedit.accelerate(shallow.pipe)
    with Seen(shallow) as seen:
        picture(shallow)
    assert graphs_of(handle).hits > 0
    assert flat(seen.output).isfinite().all()
    ours, stock = errors_of(seen.output, *stock_and_exact(shallow.pipe.transformer, handle, seen.args, seen.kwargs))
    handle.restore()
    assert ours <= 1.05 * stock
