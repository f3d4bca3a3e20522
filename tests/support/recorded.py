"""CUDA graphs without a GPU: what a step does to tensors is recorded and done again by a replay, Python left out.

Like a real graph, a recording holds what the step read from Python (scales, lengths, which layers ran) and the places
of all tensors; capturing computes nothing; reading a value from a tensor is an error.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fusedit.runtime import graphs, pace
from fusedit.runtime.counters import Counters

GPU_BOUND = "the GPU is the limit, not the host"
UNCAPTURABLE = "operation not permitted when stream is capturing"


class _Call(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    results: list[torch.Tensor]
    """New tensors that the call computed; empty where it wrote to what was there."""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _fixed(value: Any) -> Any:
    """Tensors as views of the memory they lie in now, whatever becomes of the parameter."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(value)}


class _Recorder(TorchDispatchMode):
    """Notes every operation inside the block that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept_args, kept_kwargs = _fixed(args), _fixed(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(UNCAPTURABLE)
        out = func(*args, **(kwargs or {}))
        made = _fixed(_tensors(out))
        if func._schema.is_mutable:
            self.calls.append(_Call(func, kept_args, kept_kwargs, []))
        elif made and not _storages(made) & _storages((args, kwargs)):  # else it gave views
            self.calls.append(_Call(func, kept_args, kept_kwargs, made))
        return out


class _Event:
    """Stands in for torch.cuda.Event."""

    recordings: Recordings

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing

    def record(self, _stream: Any = None) -> None:
        self.at = self.recordings.clock.last
        if not self.timing:
            self.recordings.last = self

    def synchronize(self) -> None:
        assert self.timing

    def query(self) -> bool:
        """The step before is done on the GPU when the host comes with the next."""
        return self.recordings.host_bound or self.recordings.waits

    def elapsed_time(self, end: Any) -> float:
        """A GPU is never done before the host has told it what to do, here a thousandth after that."""
        return 1001.0 * (end.at - self.at) if self.recordings.host_bound else 1e9


class _Clock(threading.local):
    """Stands in for the module `time`: what a thread read last."""

    last = 0.0

    def perf_counter(self) -> float:
        self.last = time.perf_counter()
        return self.last


class _Stream:
    """Stands in for the current stream."""

    recordings: Recordings

    def wait_event(self, event: Any) -> None:
        self.recordings.waited = event

    def synchronize(self) -> None: ...


class _NewStream(_Stream):
    """Stands in for torch.cuda.Stream."""

    def __init__(self) -> None:
        self.recordings.streams += 1


class _Nothing(nullcontext[None]):
    """Stands in for torch.cuda.device and torch.cuda.stream."""


class Recordings:
    """What the stand-in for CUDA did, and how it shall behave.

    Attributes:
        log: "eager", "timed" or "captured" for each run of a denoising step's Python code, in order.
        host_bound: whether the host is slower than the GPU.
        waits: whether the caller waits for the GPU after each step.
        failures: raised by the next captures, after the step ran.
        broken: a capture that failed cannot be ended either, as after a synchronisation inside a real one.
        packed: what was packed inside a capture, which no capture may do.
        overlaps: replays that did not wait for the end of the last one, though their graphs share memory.
        streams: made for capturing.
        most_open: captures at the same time, at the most.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.host_bound, self.waits = True, False
        self.failures: list[BaseException] = []
        self.broken = False
        self.packed: list[dict[str, int]] = []
        self.overlaps = self.streams = self.open = self.most_open = 0
        self.how = "eager"
        self.clock = _Clock()
        self.last: Any = None
        self.waited: Any = None

    def timed(self, *args: Any) -> tuple[torch.Tensor, bool]:
        self.how = "timed"
        try:
            return _TIMED(*args)
        finally:
            self.how = "eager"

    def graph(self, graph: Any, inputs: pace.Tensors, output: torch.Tensor, counted: Counters) -> graphs._Graph:
        packed = {what: count for what, count in counted.events.items() if "packed" in what}
        if packed:
            self.packed.append(packed)
        return _GRAPH(graph, inputs, output, counted)

    def run(
        self, steps: graphs.StepGraphs, key: Any, module: Any, inputs: Any, body: pace.Body, *rest: Any
    ) -> torch.Tensor:
        def noted(tensors: pace.Tensors) -> torch.Tensor:
            denoises = steps.name == "graphs"  # and is no VAE, whose calls are recorded but not told
            if denoises:
                self.log.append(self.how)
            output = body(tensors)
            if denoises and self.how == "captured" and self.failures:
                raise self.failures.pop(0)
            return output

        return _RUN(steps, key, module, inputs, noted if steps.enabled else body, *rest)


class _RecordedGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    recordings: Recordings

    def __init__(self) -> None:
        self.recorder = _Recorder()
        self.capturing = self.ended = False

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert pool is not None
        assert capture_error_mode == "thread_local"
        self.recordings.how = "captured"
        self.capturing = True
        self.recordings.open += 1
        self.recordings.most_open = max(self.recordings.most_open, self.recordings.open)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        if not self.capturing:
            raise RuntimeError("capture_end without capture_begin")
        self.capturing = False
        self.recorder.__exit__(None, None, None)
        self.recordings.open -= 1
        self.recordings.how = "eager"
        if self.recordings.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.ended = True
        for result in (result for call in self.recorder.calls for result in call.results):
            if result.is_floating_point():
                result.fill_(float("nan"))  # while a real graph is captured, nothing is computed

    def replay(self) -> None:
        assert self.ended
        last = self.recordings.last
        self.recordings.overlaps += last is not None and self.recordings.waited is not last
        with torch.inference_mode():  # a real graph writes where it likes
            self._replay()

    def _replay(self) -> None:
        for function, args, kwargs, results in self.recorder.calls:
            out = function(*args, **kwargs)
            if results and "empty" not in str(function):
                for kept, made in zip(results, _tensors(out), strict=True):
                    kept.copy_(made)


_RUN, _GRAPH, _TIMED = graphs.StepGraphs.run, graphs._Graph, pace.Pace.timed
_IS_CUDA: Any = torch._C.TensorBase.is_cuda


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Tensors lie on a GPU as far as StepGraphs can see."""
    return sys._getframe(1).f_globals["__name__"] == graphs.__name__ or bool(_IS_CUDA.__get__(tensor))


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """From now on steps on the CPU are captured, as recordings, by the rules for CUDA graphs."""
    made = Recordings()

    def run(steps: graphs.StepGraphs, *args: Any) -> torch.Tensor:
        return made.run(steps, *args)

    def timed(pace: pace.Pace, *args: Any) -> tuple[torch.Tensor, bool]:
        return made.timed(pace, *args)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(_is_cuda))
    monkeypatch.setattr(pace.Pace, "timed", timed)
    monkeypatch.setattr(pace, "time", made.clock)
    monkeypatch.setattr(graphs, "_Graph", made.graph)
    monkeypatch.setattr(graphs.StepGraphs, "run", run)
    stand_ins = {"CUDAGraph": _RecordedGraph, "Stream": _NewStream, "Event": _Event, "current_stream": _Stream}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, type(name, (stand_in,), {"recordings": made}))
    monkeypatch.setattr(torch.cuda, "device", _Nothing)
    monkeypatch.setattr(torch.cuda, "stream", _Nothing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return made
