"""StepGraphs: CUDA graphs of a whole denoising step, for sizes where the host is slower than the GPU.

A graph holds addresses: of its own inputs, into which every call's tensors are copied, and of the weights. So a graph
is replayed only for the very shapes, settings and weight addresses it was captured with (`look.py`); anything else
runs eagerly. Its output is copied out before anyone sees it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import nn

from fusedit.report import CacheReport
from fusedit.runtime.collection import no_collection
from fusedit.runtime.counters import Counters
from fusedit.runtime.look import Looks
from fusedit.runtime.pace import Body, Pace, Tensors

CAPACITY: Final = 4
HOST_SHARE: Final = 0.8
"""A step is host-bound where launching it takes more than this share of its time on the GPU. That time ends behind the
launching, so 1 is never reached, however slow the host is."""
HOST_SHARE_OF_ONE_CALL: Final = 0.95
"""The same for what runs once a picture, and whose graph would hold much memory: the GPU waits nearly all the time."""

_GPU_BOUND: Final = "the GPU is the limit, not the host"


def _backends() -> Hashable:
    """The switches of torch by which its libraries would compute otherwise."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return (
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        tuple(torch._C._get_sdp_priority_order()),
        cuda.preferred_blas_library(),
        cuda.matmul.fp32_precision,  # allow_tf32 cannot be read once this was set
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


@dataclass
class _Shape:
    """One combination of shapes and settings: how often it ran eagerly, and what was found."""

    calls: int = 0
    reason: str = ""  # why it is not captured, once that is known
    graph: _Graph | None = None
    pace: Pace | None = None  # once it was timed


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    output: torch.Tensor
    counted: Counters

    def replay(self, inputs: Tensors) -> torch.Tensor:
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        self.graph.replay()
        return self.output.clone()


class StepGraphs:
    """The graphs of one fused model.

    Args:
        counters: the model's; a replay adds what a captured step counted.
        enabled: False runs everything eagerly.
        name: what the report calls them.
        host_share: in the place of HOST_SHARE.
    """

    def __init__(
        self, counters: Counters, *, enabled: bool = True, name: str = "graphs", host_share: float | None = None
    ) -> None:
        self.counters, self.enabled, self.name, self.host_share = counters, enabled, name, host_share
        self.replays = self.eager = 0
        self.reasons: Counter[str] = Counter()
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._looks = Looks()
        self._state: Hashable = None
        self._pool: Any = None
        self._finished: Any = None
        self._bytes = 0

    def run(
        self,
        key: Hashable,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        body: Body,
        refused: str = "",
        state: int | None = None,
    ) -> torch.Tensor:
        """`body(inputs)`: as a replay where a graph fits, eagerly otherwise. Inputs are never changed.

        Args:
            key: everything besides `inputs` and `module` that `body` depends on.
            module: whose weights `body` reads.
            inputs: every tensor that may differ from call to call.
            body: reads `inputs`, returns a new tensor.
            refused: why this call may not use a graph, if so.
            state: of a `Look` at the module in this call; None: it is looked at here.
        """
        given = tuple(inputs)
        if not self.enabled or not given[0].is_cuda:
            self.clear()
            return body(given)
        if refused:
            self._drop()  # weights that move leave no graph that could be used again
        with torch.cuda.device(given[0].device):
            return self._run(key, module, given, body, refused or _capturing(), state)

    def _run(
        self, key: Hashable, module: nn.Module, given: Tensors, body: Body, reason: str, state: int | None
    ) -> torch.Tensor:
        full = (key, tuple((t.shape, t.stride(), t.dtype, t.device) for t in given))
        shape = _Shape(reason=reason) if reason else self._shapes.setdefault(full, _Shape())
        if shape.reason == _GPU_BOUND and shape.pace is not None and shape.pace.behind():
            shape.reason = ""
        if not shape.reason:
            self._shapes.move_to_end(full)
            self._check_state(module, state)
            if shape.graph is None and shape.calls >= 2:
                self._capture(shape, given, body)
            if shape.graph is not None:
                self.replays += 1
                self.counters.add(shape.graph.counted)
                return self._replay(shape.graph, given)
        shape.calls += 1
        if shape.calls == 2 and not shape.reason:
            shape.pace = Pace(HOST_SHARE if self.host_share is None else self.host_share)
            output, host_bound = shape.pace.timed(body, given)
            shape.reason = "" if host_bound else _GPU_BOUND
        elif shape.pace is not None:
            output = shape.pace.run(body, given)
        else:
            output = body(given)
        self.eager += 1
        self.reasons[shape.reason or "a shape is captured when it comes again"] += 1
        self._forget()
        return output

    def _replay(self, graph: _Graph, given: Tensors) -> torch.Tensor:
        stream = torch.cuda.current_stream()
        if self._finished is not None:
            stream.wait_event(self._finished)  # graphs share memory, and the last one may have run on another stream
        output = graph.replay(given)
        event: Any = torch.cuda.Event
        self._finished = event()
        self._finished.record(stream)
        return output

    def _check_state(self, module: nn.Module, seen: int | None) -> None:
        """Drop the graphs where the weights lie elsewhere now: their addresses may belong to somebody else."""
        state = (self._looks(module).state if seen is None else seen, _backends())
        if state != self._state:
            self._drop()
            self._state = state

    def clear(self) -> None:
        """Forget everything: graphs, their memory, and what was found about shapes."""
        if self._shapes:
            self._drop()
            self._shapes.clear()

    def report(self) -> CacheReport:
        kept = sum(shape.graph is not None for shape in self._shapes.values())
        return CacheReport(self.name, self.replays, self.eager, kept, CAPACITY, self._bytes, dict(self.reasons))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _capture(self, shape: _Shape, given: Tensors, body: Body) -> None:
        reserved = torch.cuda.memory_reserved()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = _capture_stream(given[0].device)
        full = False
        try:
            with self.counters.apart() as counted:
                shape.graph = _captured(given, body, self._pool, stream, counted)
        except torch.OutOfMemoryError:
            full = True
        except Exception as error:  # whatever it is, this step ran eagerly before and does so again
            shape.reason = f"could not be captured ({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
            self._pool = None  # the allocator may take it for one that is still being captured into
        if full:  # here and not above, where the error still holds what was allocated
            # Without graphs a picture needs no more than before: give back what they hold and go on.
            self._drop("out of memory while capturing; all graphs dropped")
            torch.cuda.empty_cache()
        else:
            self._bytes += max(0, torch.cuda.memory_reserved() - reserved)
        self._forget()

    def _drop(self, reason: str = "") -> None:
        """Give up the graphs and the memory they share; with a reason, never capture these shapes again."""
        for shape in self._shapes.values():
            shape.graph, shape.calls = None, 0
            shape.reason = shape.reason or reason
        self._pool = None
        self._bytes = 0

    def _forget(self) -> None:
        """The least recently used graphs beyond CAPACITY; and shapes, of which a hundred are remembered."""
        graphs = [key for key, shape in self._shapes.items() if shape.graph is not None]
        for key in graphs[: max(0, len(graphs) - CAPACITY)]:
            self._shapes[key].graph = None
        while len(self._shapes) > 100:
            self._shapes.popitem(last=False)


def _capturing() -> str:
    return "the caller is capturing a graph" if torch.cuda.is_current_stream_capturing() else ""


_ONE_CAPTURE: Final = Lock()  # at a time in a process: torch allows no two


def _captured(given: Tensors, body: Body, pool: Any, stream: Any, counted: Counters) -> _Graph:
    graph = torch.cuda.CUDAGraph()
    # Not in inference mode: what is made in it could not be written outside of it, by a later replay.
    # No collection either: it might destroy CUDA objects, which invalidates a capture.
    with _ONE_CAPTURE, torch.inference_mode(False), torch.no_grad(), no_collection():
        inputs = tuple(t.clone() for t in given)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            with _other_random_state(given[0].device):
                # Other threads may go on working with the GPU meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = body(inputs)
                graph.capture_end()
            except BaseException:
                _abandon(graph, pool)
                raise
    return _Graph(graph, inputs, output, counted)


@cache
def _capture_stream(_device: torch.device) -> Any:
    """One for the whole process: libraries keep a workspace for each stream that they have seen (33 MiB for cuBLAS)."""
    new_stream: Any = torch.cuda.Stream
    return new_stream()


@contextmanager
def _other_random_state(device: torch.device) -> Iterator[None]:
    """Inside, torch's default generator of this device has a copy of its state.

    A capture takes hold of the state that it finds when it begins: nobody else could draw until it ends, and nobody at
    all after one that cannot be ended. A step draws no random numbers, so the copy is all it needs.
    """
    if device.type != "cuda":
        yield
        return
    generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(state.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that went wrong. Where that fails too, tell the allocator, which would go on taking each later
    `empty_cache()` for one inside a capture."""
    with suppress(Exception):
        graph.capture_end()
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
