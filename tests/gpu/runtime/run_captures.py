"""Run by the tests in a process of its own, which a capture that fails may leave unusable: one scenario, by its name.

Whatever happens to a capture, the picture is that of eager steps, and everything else in the process goes on working.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from support.gpu_runs import EAGER, graphs_of, picture, told

import fusedit
from benchmarks.workloads import Workload, z_image_turbo
from fusedit.models import z_image
from fusedit.runtime import graphs

OTHER = 320
multiply = z_image.linear


def healthy() -> None:
    """Random numbers, freeing memory and capturing go on working in this process."""
    torch.cuda.synchronize()
    assert torch.randn(4, device="cuda").isfinite().all()
    torch.cuda.empty_cache()
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)


def reasons(handle: fusedit.Handle) -> list[str]:
    return [reason for reason in graphs_of(handle).reasons if "captured (" in reason or "memory" in reason]


def uncapturable(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor], sync: Any) -> None:
    def linear(layer: Any, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sync(x)
        return multiply(layer, x, out)

    vars(z_image)["linear"] = linear
    assert torch.equal(picture(workload), expected[0])
    assert torch.equal(picture(workload), expected[0])
    assert graphs_of(handle).hits == graphs_of(handle).entries == 0
    assert reasons(handle), graphs_of(handle)
    healthy()
    vars(z_image)["linear"] = multiply
    for _ in range(2):
        assert torch.equal(picture(workload, width=OTHER), expected[1])
    assert graphs_of(handle).entries == 1, graphs_of(handle)


def synchronises(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    uncapturable(workload, handle, expected, lambda _: torch.cuda.synchronize())


def reads_a_value(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    uncapturable(workload, handle, expected, lambda x: x.sum().item())


def fails_beside_a_graph(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    """A graph that was captured before another shape's capture fails is still replayed."""
    assert torch.equal(picture(workload, width=OTHER), expected[1])
    before = graphs_of(handle)
    assert before.entries == 1

    def linear(layer: Any, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        torch.cuda.synchronize()
        return multiply(layer, x, out)

    vars(z_image)["linear"] = linear
    assert torch.equal(picture(workload), expected[0])
    assert reasons(handle), graphs_of(handle)
    assert torch.equal(picture(workload, width=OTHER), expected[1])
    assert graphs_of(handle).hits == before.hits + 6
    healthy()


def out_of_memory(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    """The process may take no more memory while it captures than it has; the pool of the first graph is too small."""
    assert torch.equal(picture(workload), expected[0])
    assert graphs_of(handle).entries == 1
    capture = graphs._captured

    def tight(*args: Any) -> Any:
        torch.cuda.empty_cache()
        taken, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(taken / total)
        try:
            return capture(*args)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    vars(graphs)["_captured"] = tight
    assert torch.equal(picture(workload, 1024, 1024), expected[2])
    assert any("out of memory while capturing" in reason for reason in reasons(handle)), graphs_of(handle)
    assert graphs_of(handle).entries == 0
    healthy()
    vars(graphs)["_captured"] = capture
    for _ in range(2):
        assert torch.equal(picture(workload, 1024, 1024), expected[2])
        assert torch.equal(picture(workload, width=OTHER), expected[1])


CAPTIONS: list[torch.Tensor] = []


def without_random_numbers(workload: Workload, width: int) -> torch.Tensor:
    """What `picture` draws, without making its prompt on the GPU."""
    drawn: torch.Tensor = workload.pipe(
        prompt_embeds=[caption.clone() for caption in CAPTIONS],
        width=width,
        height=256,
        guidance_scale=0.0,
        num_inference_steps=6,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    return drawn


def in_thread(run: Callable[[], Any]) -> Any:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(run()))
    thread.start()
    thread.join()
    assert made, "the thread failed"
    return made[0]


def another_thread(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    """The step ran eagerly in one thread and is captured in the next, which has used no library yet."""
    picture(workload, num_inference_steps=3)
    assert graphs_of(handle).entries == 0
    assert torch.equal(in_thread(lambda: picture(workload)), expected[0])
    assert torch.equal(picture(workload), expected[0])
    healthy()


def two_pipelines_in_two_threads(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    other = z_image_turbo(n_layers=1)
    with torch.no_grad():
        other.pipe.transformer.layers[0].attention.to_k.weight.mul_(2)
    second = told(other, EAGER, lambda _: [picture(other), picture(other, width=OTHER)])[0]
    other_handle = fusedit.accelerate(other.pipe)
    start = threading.Barrier(2, timeout=60)
    wrong: list[str] = []

    def work(each: Workload, right: list[torch.Tensor]) -> bool:
        start.wait()
        drawn = [without_random_numbers(each, (256, OTHER)[turn % 2]) for turn in range(6)]
        wrong.extend(f"picture {turn}" for turn in range(6) if not torch.equal(drawn[turn], right[turn % 2]))
        return True

    done: list[bool] = []
    threads = [
        threading.Thread(target=lambda each=each, right=right: done.append(work(each, right)))
        for each, right in ((workload, expected), (other, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2, "a thread failed"
    assert wrong == []
    healthy()
    assert torch.equal(picture(workload), expected[0])
    assert torch.equal(picture(other), second[0])
    print(graphs_of(handle), graphs_of(other_handle))


def beside(
    workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor], work: Callable[[torch.Tensor], Any]
) -> None:
    """Another thread keeps on working with the GPU."""
    stop, failed = threading.Event(), []
    x = torch.randn(512, 512, device="cuda")

    def loop() -> None:
        x.sum()  # the thread's CUDA context, without which torch warns
        try:
            while not stop.is_set():
                work(x)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        drawn = [without_random_numbers(workload, width) for width in (256, OTHER, 256, OTHER, 384, 448)]
    finally:
        stop.set()
        thread.join()
    assert failed == [], failed
    assert all(torch.equal(drawn[i], expected[i % 2]) for i in range(4))
    healthy()
    print(graphs_of(handle))


def a_thread_that_computes(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    beside(workload, handle, expected, lambda x: (x @ x).sum())


def a_thread_that_synchronises(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    """For its own work: CUDA lets nobody wait for the whole device while anything is captured."""

    def work(x: torch.Tensor) -> None:
        (x @ x).sum().item()
        torch.cuda.current_stream().synchronize()

    beside(workload, handle, expected, work)


def a_thread_that_draws_random_numbers(
    workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]
) -> None:
    """With a generator of its own: torch lets nobody use the default one while a capture begins."""
    own = torch.Generator("cuda").manual_seed(0)
    beside(workload, handle, expected, lambda _: torch.randn(64, device="cuda", generator=own))


def the_caller_captures(workload: Workload, handle: fusedit.Handle, expected: list[torch.Tensor]) -> None:
    """A graph of one's own around a direct call of the transformer, after a warm-up."""
    calls: list[Any] = []

    def keep(_model: Any, args: Any, kwargs: Any) -> None:
        calls[:] = [(args, kwargs)]

    model = workload.pipe.transformer
    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    assert torch.equal(picture(workload), expected[0])
    hook.remove()
    (args, kwargs) = calls[0]
    with torch.no_grad():
        for _ in range(5):
            outside = model(*args, **kwargs)[0][0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(*args, **kwargs)[0][0]
        captured.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
            assert torch.equal(captured, outside)
    assert graphs_of(handle).reasons["the caller is capturing a graph"] == 1
    assert torch.equal(picture(workload), expected[0])
    graph.replay()
    assert torch.equal(captured, outside)
    healthy()


SCENARIOS: dict[str, Callable[[Workload, fusedit.Handle, list[torch.Tensor]], None]] = {
    scenario.__name__: scenario
    for scenario in (
        synchronises,
        reads_a_value,
        fails_beside_a_graph,
        out_of_memory,
        another_thread,
        two_pipelines_in_two_threads,
        a_thread_that_computes,
        a_thread_that_synchronises,
        a_thread_that_draws_random_numbers,
        the_caller_captures,
    )
}


def main(name: str) -> None:
    warnings.simplefilter("error")
    vars(graphs)["HOST_SHARE"] = 0.0
    workload = z_image_turbo(n_layers=1)
    torch.manual_seed(0)
    CAPTIONS[:] = workload.arguments(256, 256, 1)["prompt_embeds"]  # those that `picture` draws with
    sizes = ((256, 256), (OTHER, 256), (1024, 1024))
    expected, _ = told(workload, EAGER, lambda _: [picture(workload, *size) for size in sizes])
    SCENARIOS[name](workload, fusedit.accelerate(workload.pipe), expected)
    print(f"{name}: right")


if __name__ == "__main__":
    main(sys.argv[1])
