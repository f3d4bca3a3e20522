"""When a step is captured and replayed, and when never; with recordings in place of CUDA graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.recorded import GPU_BOUND, UNCAPTURABLE, Recordings
from torch import nn

from fusedit.models.autoencoder_kl import AutoencoderKL
from fusedit.models.flux import Flux
from fusedit.plan import Plan
from fusedit.runtime import graphs, look
from fusedit.runtime.counters import Counters
from fusedit.runtime.graphs import CAPACITY, StepGraphs


def state_of(module: nn.Module) -> Any:
    """What a graph takes for granted."""
    places, settings, _ = look._seen(module)
    return places, settings, graphs._backends()


AGAIN = "a shape is captured when it comes again"


class Steps:
    """A step over one linear layer and a number that is no tensor."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(4, 3)
        self.counters = Counters()
        self.graphs = StepGraphs(self.counters, **options)
        self.factor = 2.0

    def body(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.counters.ran("site")
        self.counters.fell_back("other", "why")
        x, y = tensors
        return self.module(x).mul_(self.factor) + y

    def expected(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.factor + y

    @torch.no_grad()
    def __call__(self, rows: int = 2, key: Any = None, refused: str = "", seed: int = 1) -> torch.Tensor:
        """Runs a step of random inputs and checks its result."""
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(rows, 4, generator=generator), torch.randn(3, generator=generator)
        kept = x.clone(), y.clone()
        out = self.graphs.run(key or self.factor, self.module, (x, y), self.body, refused)
        assert torch.equal(out, self.expected(x, y))
        assert torch.equal(x, kept[0]), "an input was changed"
        assert torch.equal(y, kept[1]), "an input was changed"
        return out


def test_a_shape_runs_eagerly_then_timed_then_captured(recordings: Recordings) -> None:
    steps = Steps()
    for _ in range(5):
        steps()
    assert recordings.log == ["eager", "timed", "captured"]
    report = steps.graphs.report()
    assert (report.hits, report.misses, report.entries, report.capacity) == (3, 2, 1, CAPACITY)
    assert report.reasons == {AGAIN: 2}


def test_a_step_that_the_gpu_limits_is_never_captured(recordings: Recordings) -> None:
    recordings.host_bound = False
    steps = Steps()
    for _ in range(5):
        steps()
    assert recordings.log == ["eager", "timed", *["eager"] * 3]
    assert steps.graphs.report().reasons == {AGAIN: 1, GPU_BOUND: 4}
    recordings.waits = True
    for _ in range(5):
        steps()
    assert recordings.log[-5:] == ["eager"] * 5, "a caller that waits makes no slow host"
    recordings.host_bound = True
    for _ in range(3):
        steps(rows=5)
    assert recordings.log[-3:] == ["eager", "timed", "captured"], "another shape is judged by itself"


def test_a_host_that_becomes_the_limit_later_is_noticed(recordings: Recordings) -> None:
    recordings.host_bound = False
    steps = Steps()
    for _ in range(4):
        steps()
    for host_bound in (True, True, False, True, True):  # in the step before
        recordings.host_bound = host_bound
        steps()
    assert recordings.log[2:] == ["eager"] * 7, "one or two in a row may have been interrupted"
    steps()
    steps()
    assert recordings.log[-1] == "captured"
    assert recordings.log.count("captured") == 1
    report = steps.graphs.report()
    assert (report.hits, report.entries) == (2, 1)


def test_nothing_is_known_of_the_pace_of_a_step_that_failed(recordings: Recordings) -> None:
    recordings.host_bound = False
    steps = Steps()
    for _ in range(3):
        steps()
    recordings.host_bound = True
    good, steps.body = steps.body, lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            steps()
    assert "captured" not in recordings.log
    steps.body = good  # type: ignore[method-assign]
    steps()
    assert recordings.log[-1] == "eager"


@pytest.mark.parametrize("model", [AutoencoderKL, Flux], ids=["vae", "flux"])
def test_every_model_can_have_graphs(model: Any, recordings: Recordings) -> None:
    """A GPU is done after the host at the earliest, which no model may wait for in vain."""
    made = model(model.tiny(), Plan(), Counters()).graphs
    for host_bound, expected in ((True, ["eager", "timed", "captured"]), (False, ["eager", "timed", "eager"])):
        recordings.log.clear()
        recordings.host_bound = host_bound
        steps = Steps(host_share=made.host_share)
        for _ in range(3):
            steps()
        assert recordings.log == expected


def test_every_shape_and_every_key_has_a_graph_of_its_own(recordings: Recordings) -> None:
    steps = Steps()
    for _ in range(2):
        for _ in range(3):
            steps()
            steps(rows=5)
            steps.factor = 3.0
            steps()
            steps.factor = 2.0
    assert recordings.log.count("captured") == 3
    assert steps.graphs.report().entries == 3
    assert steps.graphs.report().hits == 3 + 3 * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double().float().t().contiguous().t(),
        lambda x: x[:1].expand(2, 4),
        lambda x: torch.stack([x, x])[:, :, :][0],
        lambda x: torch.randn(2, 8)[:, ::2].copy_(x),
    ],
    ids=["transposed", "expanded", "same", "strided"],
)
def test_inputs_of_any_strides_are_replayed_right(change: Callable[..., Any], recordings: Recordings) -> None:
    steps = Steps()
    x, y = torch.randn(2, 4), torch.randn(3)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(steps.graphs.run(0, steps.module, (x, y), steps.body), steps.expected(x, y))
        other = change(x)
        for _ in range(4):
            made = steps.graphs.run(0, steps.module, (other, y), steps.body)
            assert torch.equal(made, steps.expected(other, y))
    assert recordings.log.count("captured") == (1 if other.stride() == x.stride() else 2)


def test_each_replay_takes_its_own_inputs_and_gives_an_output_of_its_own(recordings: Recordings) -> None:
    """CG-01: what was handed out earlier never changes."""
    steps = Steps()
    for _ in range(3):
        steps()
    outs = [steps(seed=seed) for seed in range(5)]
    kept = [out.clone() for out in outs]
    for seed in range(5, 10):
        steps(seed=seed)
    assert recordings.log.count("captured") == 1
    assert all(torch.equal(a, b) for a, b in zip(outs, kept, strict=True))
    assert len({out.data_ptr() for out in outs}) == len(outs)
    outs[0].zero_()  # what is done to an output reaches no other run
    steps(seed=0)


def test_a_replay_waits_for_the_one_before_of_whatever_shape(recordings: Recordings) -> None:
    """Graphs of one pool share memory for what a step needs on the way; the calls may be made on different streams."""
    steps = Steps()
    for rows in (2, 5):
        for _ in range(3):
            steps(rows=rows)
    for rows in (2, 2, 5, 2, 5, 5):
        steps(rows=rows)
    assert recordings.log.count("captured") == 2
    assert recordings.overlaps == 0


def test_counters_are_the_same_as_without_graphs(recordings: Recordings) -> None:
    eager, replayed = Steps(enabled=False), Steps()
    for steps in (eager, replayed):
        for rows in (2, 2, 5, 2, 5, 2, 5, 2, 5):
            steps(rows=rows)
    assert recordings.log.count("captured") == 2
    assert replayed.graphs.report().hits == 5
    assert replayed.counters.fused == eager.counters.fused == {"site": 9}
    assert replayed.counters.stock == eager.counters.stock == {"other": {"why": 9}}


def test_the_least_recently_used_graphs_go_beyond_capacity(recordings: Recordings) -> None:
    steps = Steps()
    for rows in range(1, CAPACITY + 1):
        for _ in range(3):
            steps(rows=rows)
    steps(rows=1)
    for _ in range(3):
        steps(rows=20)
    assert steps.graphs.report().entries == CAPACITY
    before = list(recordings.log)
    for rows in (1, 3, CAPACITY, 20):
        steps(rows=rows)
    assert recordings.log == before, "these were kept"
    steps(rows=2)
    assert recordings.log == [*before, "captured"], "this one was dropped, and is known to be worth it"
    assert steps.graphs.report().entries == CAPACITY


def test_captures_are_made_one_at_a_time(recordings: Recordings) -> None:
    """In a process, since torch allows no two; here of two models in two threads that try to meet inside."""
    both = threading.Barrier(2)

    def prepared() -> Steps:
        steps = Steps()
        steps()
        steps()
        body = steps.body

        def slow(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return body(tensors)

        vars(steps)["body"] = slow
        return steps

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(steps) for steps in (prepared(), prepared())]:
            future.result()
    assert recordings.log.count("captured") == 2
    assert recordings.most_open == 1
    assert gc.isenabled()


def test_all_captures_use_one_stream(recordings: Recordings) -> None:
    """cuBLAS keeps a workspace (32 MiB on Hopper) for every stream it ever ran on, in the pool of the first capture."""
    steps = Steps()
    for rows in range(1, 9):
        for _ in range(3):
            steps(rows=rows)
    assert recordings.log.count("captured") == 8
    assert recordings.streams <= 1


def test_a_hundred_shapes_are_remembered(recordings: Recordings) -> None:
    steps = Steps()
    for rows in range(1, 300):
        steps(rows=rows)
    assert len(steps.graphs._shapes) <= 100
    steps(rows=299)
    assert recordings.log[-1] == "timed"
    steps(rows=1)
    assert recordings.log[-1] == "eager"


# -- What makes a graph stale --------------------------------------------------------------------------------------


def test_weights_that_change_in_place_keep_their_graph(recordings: Recordings) -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    state = state_of(steps.module)
    with torch.no_grad():
        steps.module.weight.mul_(2)
        steps.module.bias.data.add_(1)
        steps.module.load_state_dict({name: value + 1 for name, value in steps.module.state_dict().items()})
    steps()
    assert state_of(steps.module) == state
    assert recordings.log == ["eager", "timed", "captured"]


def move(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn(3, 4))


def assign(module: nn.Module) -> None:
    module.load_state_dict({name: value.clone() + 1 for name, value in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [move, replace, assign])
def test_weights_that_move_drop_every_graph_and_the_next_step_runs_eagerly(
    change: Callable[[nn.Module], None], recordings: Recordings
) -> None:
    """Eagerly, because it may pack weights anew: inside a graph that would be undone, or done again, by each replay."""
    steps = Steps()
    for rows in (2, 5):
        for _ in range(3):
            steps(rows=rows)
    state = state_of(steps.module)
    change(steps.module)
    assert state_of(steps.module) != state
    steps()
    assert recordings.log[-1] == "eager"
    assert steps.graphs.report().entries == 0
    for rows in (5, 2):
        for _ in range(3):
            steps(rows=rows)
    assert recordings.log.count("captured") == 4
    assert steps.graphs.report().entries == 2


@pytest.mark.parametrize(
    ("switches", "name", "value"),
    [
        (torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "enabled", False),
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ],
)
def test_a_switch_of_torch_is_another_state(switches: Any, name: str, value: object) -> None:
    module = nn.Linear(4, 3)
    before, former = state_of(module), getattr(switches, name)
    setattr(switches, name, value)
    try:
        assert state_of(module) != before
    finally:
        setattr(switches, name, former)
    assert state_of(module) == before


def test_another_size_at_the_same_address_is_another_state() -> None:
    """As when an adapter of a lower rank gets the memory of the one before."""
    memory = torch.randn(12)
    module = nn.Linear(4, 3, bias=False)
    module.weight.data = memory.view(3, 4)
    before = state_of(module)
    module.weight.data = memory[:8].view(2, 4)
    assert state_of(module) != before
    module.weight.data = memory.view(3, 4)
    assert state_of(module) == before


class Wrapped(nn.Module):
    """A layer with two adapters, as peft makes it."""

    def __init__(self, **options: Any) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"linear": nn.Linear(4, 4)})
        config = {"r": 2, "lora_alpha": 4, "target_modules": ["linear"], "init_lora_weights": False, **options}
        for name in ("a", "b"):
            inject_adapter_in_model(LoraConfig(**config), self.inner, adapter_name=name)
        self.layer.set_adapter(["a"])

    @property
    def layer(self) -> Any:
        return self.inner["linear"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda layer: layer.set_scale("a", 0.3),
    "scale for one call": lambda layer: layer.scale_layer(0.5),
    "active": lambda layer: layer.set_adapter(["b"]),
    "both active": lambda layer: layer.set_adapter(["a", "b"]),
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(adapter_names=["a"]),
    "deleted": lambda layer: layer.delete_adapter("b"),
    "moved": lambda layer: move(layer),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_every_setting_of_a_lora_is_part_of_the_state(name: str, recordings: Recordings) -> None:
    steps = StepGraphs(Counters())
    module, x = Wrapped(), torch.randn(2, 4)

    @torch.no_grad()
    def check() -> None:
        assert torch.equal(steps.run(0, module, (x,), lambda tensors: module(tensors[0])), module(x))

    for _ in range(4):
        check()
    assert recordings.log == ["eager", "timed", "captured"]
    state = state_of(module)
    CHANGES[name](module.layer)
    assert state_of(module) != state
    check()
    assert recordings.log[3] == "eager"
    for _ in range(3):
        check()


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_adapter_weights_that_change_in_place_are_no_other_state() -> None:
    module = Wrapped()
    state = state_of(module)
    with torch.no_grad():
        module.layer.lora_A["a"].weight.mul_(2)
    assert state_of(module) == state


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_dropout_of_an_adapter_is_part_of_the_state() -> None:
    """It acts in training mode alone, so the mode is a setting."""
    module = Wrapped(lora_dropout=0.5).eval()
    state = state_of(module)
    assert state_of(module.train()) != state
    assert state_of(module.eval()) == state


@pytest.mark.parametrize(
    ("switch", "read"),
    [
        (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
        (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
        (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    ],
    ids=["flash", "cudnn", "efficient", "deterministic"],
)
def test_library_switches_are_part_of_the_state(switch: Callable[[bool], None], read: Callable[[], bool]) -> None:
    module, was = nn.Linear(2, 2), read()
    state = state_of(module)
    try:
        switch(not was)
        assert state_of(module) != state
    finally:
        switch(was)
    assert state_of(module) == state


# -- Refusals and failures -----------------------------------------------------------------------------------------


def test_a_refused_call_runs_eagerly_with_its_reason(recordings: Recordings) -> None:
    steps = Steps()
    for _ in range(4):
        steps(refused="weights move")
    assert recordings.log == ["eager"] * 4
    assert steps.graphs.report().reasons == {"weights move": 4}
    for _ in range(4):
        steps()
    assert recordings.log[4:] == ["eager", "timed", "captured"], "a refusal says nothing about later calls"


def test_a_refused_call_lets_go_of_the_graphs(recordings: Recordings) -> None:
    """Under offload no graph can be used again, and the memory that they hold is wanted."""
    steps = Steps()
    for _ in range(3):
        steps()
    assert steps.graphs.report().entries == 1
    move(steps.module)
    steps(refused="weights move between calls (offload)")
    assert recordings.log[-1] == "eager"
    assert steps.graphs.report().entries == 0


def test_a_caller_that_captures_gets_the_step_itself(recordings: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    steps()
    assert recordings.log[-1] == "eager"
    assert steps.graphs.report().reasons["the caller is capturing a graph"] == 1


def test_switched_off_and_on_a_cpu_nothing_is_kept() -> None:
    off, cpu = Steps(enabled=False), Steps()
    for _ in range(4):
        off()
        cpu()
    for steps in (off, cpu):
        report = steps.graphs.report()
        assert (report.hits, report.misses, report.entries, report.reasons) == (0, 0, 0, {})
        assert steps.counters.fused == {"site": 4}


def test_what_is_kept_goes_when_the_module_moves_to_a_cpu(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    assert recordings.log[-1] == "captured"
    monkeypatch.undo()
    steps()
    assert steps.graphs.report().entries == 0
    assert not steps.graphs._shapes


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: operation not permitted\nlong trace"), ValueError(""), AttributeError("x")]
)
def test_a_capture_that_fails_is_not_tried_again_and_reported(
    error: Exception, broken: bool, recordings: Recordings
) -> None:
    recordings.failures, recordings.broken = [error], broken
    steps = Steps()
    for _ in range(5):
        steps()
    assert recordings.log == ["eager", "timed", "captured", "eager", "eager", "eager"]
    said = (str(error).splitlines() or [type(error).__name__])[0]
    assert steps.graphs.report().reasons == {AGAIN: 2, f"could not be captured ({said})": 3}
    assert steps.counters.fused == {"site": 5}, "what the failed capture counted is not counted"
    recordings.broken = False
    for _ in range(4):
        steps(rows=5)
    assert steps.graphs.report().entries == 1, "other shapes are captured"


def test_a_body_that_reads_a_tensor_is_not_captured(recordings: Recordings) -> None:
    steps = Steps()

    def body(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return tensors[0] * tensors[1].sum().item()

    x, y = torch.randn(2, 4), torch.randn(3)
    for _ in range(5):
        made = steps.graphs.run(0, steps.module, (x, y), body)
        assert torch.equal(made, x * y.sum().item())
    assert recordings.log.count("captured") == 1
    assert steps.graphs.report().reasons[f"could not be captured ({UNCAPTURABLE})"] == 3


@pytest.mark.parametrize("broken", [False, True])
def test_out_of_memory_while_capturing_drops_all_graphs(
    broken: bool, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(steps.graphs.report().entries))
    steps = Steps()
    for rows in (2, 5):
        for _ in range(3):
            steps(rows=rows)
    steps(rows=9)
    steps(rows=9)
    assert steps.graphs.report().entries == 2
    recordings.failures, recordings.broken = [torch.OutOfMemoryError("CUDA out of memory")], broken
    counted = steps.counters.fused["site"]
    steps(rows=9)
    assert recordings.log[-2:] == ["captured", "eager"]
    assert steps.counters.fused["site"] == counted + 1
    assert emptied == [0], "the graphs' memory goes back before the step runs"
    report = steps.graphs.report()
    assert report.entries == 0
    assert report.bytes == 0
    for _ in range(3):
        steps(rows=9)
    assert recordings.log[-3:] == ["eager"] * 3
    assert any("out of memory while capturing" in reason for reason in steps.graphs.report().reasons)


def test_an_interrupted_capture_is_passed_on_and_leaves_things_in_order(recordings: Recordings) -> None:
    steps = Steps()
    steps()
    steps()
    recordings.failures = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        steps()
    assert steps.counters.fused == {"site": 2}
    for _ in range(3):
        steps()
    assert steps.counters.fused == {"site": 5}


def test_a_body_that_fails_in_any_run_leaves_the_next_right(recordings: Recordings) -> None:
    steps = Steps()
    good = steps.body

    def bad(_tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        raise RuntimeError("interrupted")

    for _ in range(2):
        vars(steps)["body"] = bad
        with pytest.raises(RuntimeError, match="interrupted"):
            steps()
        vars(steps)["body"] = good
        steps()
    for _ in range(3):
        steps()
    assert recordings.log.count("captured") == 1
    assert steps.graphs.report().reasons["could not be captured (interrupted)"] == 4
    assert steps.graphs.report().entries == 0


@pytest.mark.parametrize("first", [True, False], ids=["captured in inference mode", "captured outside"])
def test_inference_mode_may_come_and_go(first: bool, recordings: Recordings) -> None:
    steps = Steps()
    for inference in (first, not first, first):
        for _ in range(4):
            if inference:
                with torch.inference_mode():
                    steps()
            else:
                steps()
    assert recordings.log.count("captured") >= 1


def test_inputs_made_in_inference_mode_may_be_used_outside(recordings: Recordings) -> None:
    steps = Steps()
    with torch.inference_mode():
        x, y = torch.randn(2, 4), torch.randn(3)
    for _ in range(4):
        with torch.no_grad():
            assert torch.equal(steps.graphs.run(0, steps.module, (x, y), steps.body), steps.expected(x, y))
    assert set(recordings.log) <= {"eager", "timed", "captured"}
    for _ in range(3):
        steps()  # with others


def test_clearing_lets_go_of_everything(recordings: Recordings) -> None:
    steps = Steps()
    for _ in range(4):
        steps()
    steps.graphs.clear()
    assert steps.graphs.report().entries == 0
    steps()
    assert recordings.log[-1] == "eager"
