"""What only the GPU can tell or do: its clock, its memory, a captured graph. Tests put stand-ins here."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

DEVICE = "cuda"


def present() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    torch.cuda.synchronize()


class Marks:
    """Points in time on the GPU's own clock: call it to set one."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def __call__(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def gaps(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the last."""
        synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]


def free() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def allocated() -> int:
    return torch.cuda.memory_allocated()


def reset_peaks() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()


def peaks() -> tuple[int, int]:
    """Most bytes allocated, and most bytes reserved, since the peaks were reset."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def idle_in_graphs() -> int:
    """Bytes that captured graphs hold for their replays: no tensor lies there, and nothing else may."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    private = (segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors on the GPU, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == DEVICE)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def waits(run: Callable[[], Any]) -> bool:
    """Whether `run`, which has run before, makes the host wait for the GPU: then it cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def capture(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as one CUDA graph; what it reads and what it returns keep their memory between replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # libraries choose and load their kernels here, outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(_kept: Any = (run, kept)) -> None:
        graph.replay()

    return replay
