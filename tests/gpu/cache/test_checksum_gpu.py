"""checksums() on a GPU: the CPU's numbers at real sizes, one kernel, no copy, nothing compiled for a second encoder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedit.cache.checksum import TILE, checksums, plain

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def random_weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random bits on the GPU, NaN and infinities among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator("cuda").manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator).view(dtype).view(shape)


def encoder_weights() -> list[torch.Tensor]:
    """Weights as in T5-XXL, CLIP and Qwen3-4B, of each kind one or two."""
    return [
        random_weight(32128, 4096),
        random_weight(10240, 4096),
        random_weight(4096, 10240),
        random_weight(32, 64),
        random_weight(4096),
        random_weight(49408, 768),
        random_weight(77, 768),
        torch.arange(77, device="cuda")[None],
        random_weight(151936, 2560),
        random_weight(9728, 2560),
        random_weight(1024, 2560),
        random_weight(2560),
        random_weight(128),
        random_weight(64, dtype=torch.float32),
    ]


def test_real_sizes() -> None:
    on_gpu = encoder_weights()
    on_cpu = [t.cpu() for t in on_gpu]
    expected = checksums(on_cpu)
    assert checksums(on_gpu) == expected
    assert checksums(on_gpu) == expected, "a second time, with the tables that were kept"
    assert checksums(on_gpu[::-1]) == expected[::-1]
    back = [t.cuda() for t in on_cpu]
    assert {t.data_ptr() for t in back}.isdisjoint(t.data_ptr() for t in on_gpu)
    assert checksums(back) == expected, "moved away and back"
    assert tuple(plain(on_gpu).tolist()) == expected, "plain torch on the GPU"


def test_odd_sizes_addresses_dtypes_and_strides() -> None:
    data = random_weight(5 * TILE + 100, dtype=torch.uint8)
    matrix = random_weight(700, 300, dtype=torch.float32)
    tensors = [data[at : at + size] for at in (*range(17), 32) for size in (0, 1, 7, 8, 2047, TILE, 4 * TILE + 13)]
    tensors += [matrix.t(), matrix[::3, 1::2], matrix[5:], matrix[5:, 1:], matrix[3, 3]]
    tensors += [matrix.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.bool)]
    tensors += [torch.nn.Parameter(matrix), torch.empty(0, 3, device="cuda")]
    assert checksums(tensors) == checksums([t.cpu() for t in tensors])
    assert checksums(tensors[:0]) == ()
    assert checksums(tensors[-1:] * 3) == (0, 0, 0)


def test_many_tensors() -> None:
    tensors = [random_weight(size % 5000 + 1, dtype=torch.float16) for size in range(0, 300_000, 101)]
    assert checksums(tensors) == checksums([t.cpu() for t in tensors])


def test_changed_bits_and_exchanged_words_show() -> None:
    data = random_weight(300 * TILE + 5, dtype=torch.uint8)
    seen = {checksums([data])}
    places = [0, 7, TILE - 1, TILE, 100 * TILE + 12345, 300 * TILE - 1, *range(300 * TILE, data.numel())]
    for place in places:
        data[place] ^= 128
        seen.add(checksums([data]))
        data[place] ^= 128
    words = data[: 300 * TILE].view(torch.int64)
    distances = (1, 256, 4096, 4092, 5 * 4092, 100 * 4096)
    for distance in distances:
        pair = torch.tensor([9, 9 + distance], device="cuda")
        words[pair] = words[pair.flip(0)]
        seen.add(checksums([data]))
        words[pair] = words[pair.flip(0)]
    assert len(seen) == 1 + len(places) + len(distances)


def test_bytes_beyond_32_bits() -> None:
    size = 2**32 + 3 * TILE + 11
    if torch.cuda.mem_get_info()[0] < size + 2**30:
        pytest.skip("needs 5.3 GB of free GPU memory")
    data = torch.zeros(size, dtype=torch.uint8, device="cuda")
    data[2**32 - 5 :].copy_(random_weight(3 * TILE + 16, dtype=torch.uint8))
    first = checksums([data])
    assert first == checksums([data.cpu()])
    data[-1] ^= 1
    assert checksums([data]) != first


COUNT = """
import torch
from benchmarks import kernels
from fusedit.cache.checksum import checksums

tensors = [torch.ones(size, device="cuda") for size in (3, 10**6, 10**7 + 1)]
checksums(tensors)
kernels.prepare()
print(kernels.of(lambda: checksums(tensors)))
"""


def test_two_launches() -> None:
    """The sums are set to zero, and the kernel. In a process of its own, which the profiler may slow down."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert 1 <= float(done.stdout.splitlines()[-1]) <= 2


def test_no_copy_of_a_weight() -> None:
    tensors = [random_weight(32128, 4096), random_weight(10240, 4096)[1:]]
    checksums(tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checksums(tensors)
    assert torch.cuda.max_memory_allocated() - before <= 4096


def test_a_second_encoder_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    data = random_weight(4 * TILE, dtype=torch.uint8)
    checksums([data])
    compiled: list[str] = []

    def note(*_: object, **info: object) -> None:
        compiled.append(str(info.get("repr", info)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for tensors in ([data[1:]], [data[:5]], [data[:16], data[16:]], [data] * 17, [data.view(torch.float32), data[:0]]):
        checksums(tensors)
    assert compiled == []


def test_another_stream() -> None:
    """What a stream has written before is what its checksums see."""
    weight = random_weight(32128, 4096)
    expected = checksums([weight])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            changed = weight + 0
        changed.view(torch.int16).copy_(weight.view(torch.int16))
        assert checksums([changed]) == expected
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    weight = random_weight(1000, 333)
    assert checksums([weight.to("cuda:1")]) == checksums([weight])
