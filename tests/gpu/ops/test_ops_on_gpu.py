"""Every op on a GPU: all cases in three dtypes, lengths that compile nothing, memory, streams, graphs, attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops._cases import Case
from fusedit.ops._op import Op
from fusedit.ops._verify import error, same, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]
LIBRARY = {
    *("attention", "attention_fp8", "conv2d", "conv2d_group_norm_silu", "linear_gelu", "linear_swiglu"),
    "linear_low_rank",
    *("scaled_linear", "scaled_linear_gelu", "scaled_linear_swiglu", "upsample_conv2d"),
}
KERNELS = sorted(set(ops.registry()) - LIBRARY)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch allows it to convolutions of float32
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


def all_cases() -> Iterator[object]:
    for op in ops.registry().values():
        for case in op.cases:
            yield pytest.param(op, case, id=f"{op.name}-{case.name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("op", "case"), list(all_cases()))
def test_agrees_with_fp64(op: Op[..., object], case: Case, dtype: torch.dtype) -> None:
    op.ran.clear()
    assert verify(op, case, dtype, "cuda") == []
    if "empty" in case.tags:
        assert not op.ran
    elif op.name not in LIBRARY:
        args, kwargs = case.build(dtype, "cuda")
        assert set(op.ran) == {"plain" if "e4m3 needs" in op.backend(*args, **kwargs).reason else "triton"}


def small(name: str, dtype: torch.dtype = torch.bfloat16, which: str = "small") -> tuple[Any, dict[str, Any]]:
    return next(c for c in ops.registry()[name].cases if c.name == which).build(dtype, "cuda")


def lengthened(name: str, length: int) -> tuple[Any, dict[str, Any]]:
    """The `small` arguments with another number of tokens, or pixels, or a weight's outputs."""
    args, kwargs = small(name)
    if name == "winograd_weight":
        return (torch.randn(length, *args[0].shape[1:], dtype=args[0].dtype, device="cuda"),), kwargs
    if name == "unpack_tiles":
        shape = (args[0].shape[0], -(-length // 8), 1, *args[0].shape[3:])
        return (torch.randn(shape, dtype=args[0].dtype, device="cuda"), args[1], length, 7), kwargs
    if args[0].ndim == 4:  # a picture
        longer = [a for a in args if getattr(a, "ndim", 0) == 4 and a.shape[2:] == args[0].shape[2:]]
        made = [torch.randn(a.shape[0], a.shape[1], length, 7, dtype=a.dtype, device="cuda") for a in longer]
        if name not in ("nchw_to_nhwc", "pack_tiles"):
            made = [t.contiguous(memory_format=torch.channels_last) for t in made]
        ready = iter(made)
        made = [next(ready) if any(a is b for b in longer) else a for a in args]
        if name == "winograd_conv2d":  # the rest by name: callers slice what has three dimensions, as u[P, K, C] has
            made, kwargs = made[:1], {**dict(zip(("u", "bias", "residual"), made[1:], strict=True)), **kwargs}
        return tuple(made), kwargs
    tokens = 1 if name in ("row_bounds", "scale_rows") else 2  # a scalar a token there
    made = [
        torch.rand(a.shape[0], length, *a.shape[2:], device="cuda").to(a.dtype) if getattr(a, "ndim", 0) > tokens else a
        for a in args
    ]
    return tuple(made), kwargs


@pytest.mark.parametrize("name", KERNELS)
def test_a_new_length_compiles_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    op = ops.registry()[name]
    for length in (64, 33):  # both variants, should an odd length be an unaligned one
        args, kwargs = lengthened(name, length)
        op(*args, **kwargs)
    compiled: list[str] = []

    def note(*_: Any, **info: Any) -> None:
        compiled.append(str(info.get("repr", info)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for length in (1, 2, 16, 17, 31, 100, 127, 128, 500, 1000, 1024, 4099):
        args, kwargs = lengthened(name, length)
        op(*args, **kwargs)
        if length > 2:
            several = (2, 3) if name in ("row_bounds", "scale_rows") else (3, 5)
            sliced = [a[:, 1:] if getattr(a, "ndim", 0) in several else a for a in args]
            op(*sliced, **kwargs)
    assert compiled == []


@pytest.mark.parametrize(("name", "which"), [("linear_gelu", "flux-single"), ("linear_swiglu", "z-image")])
def test_hopper_products_of_any_length(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel serves the model's size; lengths whose last wave is short go to the library; nothing compiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")
    import triton

    op = ops.registry()[name]
    case = next(c for c in op.cases if c.name == which)
    (x, *rest), _ = case.build(torch.bfloat16, "cuda")
    assert op.backend(x, *rest) == ("triton", "")
    op(x[:, :1], *rest)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *_, **info: compiled.append(str(info)))
    op.ran.clear()
    truth = op(x, *rest)
    for first, last in ((0, 1), (3, 131), (64, 1600), (7, 2823), (5, 2309), (1, 4000)):
        part = op(x[:, first:last], *rest)
        assert error(part, truth[:, first:last].double()).relative_l2 < 0.006  # both rounded to bf16
    assert compiled == []
    assert set(op.ran) == {"triton", "separate"}


def picture(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


@pytest.mark.usefixtures("hopper")
def test_a_convolution_beside_a_residual_is_ours() -> None:
    conv = ops.conv2d_group_norm_silu
    for case in (c for c in conv.cases if "real" in c.tags):
        args, kwargs = case.build(torch.bfloat16, "cuda")
        assert conv.backend(*args, **kwargs) == ("hopper", ""), case.name
        residual = args[6]
        assert ops.conv2d.backend(*args[:2], None, residual) == ops.conv2d.backend(*args[:2]) == ("hopper", "")
        assert ops.conv2d.backend(*args[:2], None, residual, "none", "library") == ("library", "")
        assert ops.conv2d.backend(*args[:2], None, None, "silu", "own") == ("hopper", "")
    x, weight, residual = picture(1, 128, 64, 72), picture(128, 128, 3, 3), picture(1, 128, 64, 72)
    assert "of the chip busy" in ops.conv2d.backend(x, weight, None, residual).reason
    assert ops.conv2d.backend(x, weight, None, residual, "silu", "own").name == "direct"
    assert ops.conv2d.backend(x.float(), weight.float()).name == "library"
    with pytest.raises(OpError, match=r"'own' cannot serve x float32.*products of float32 are the library's"):
        ops.conv2d(x.float(), weight.float(), algorithm="own")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape", [(1, 64, 128, 1, 1), (3, 128, 256, 7, 150), (1, 192, 128, 2, 129), (2, 64, 384, 33, 47)], ids=str
)
def test_our_convolution_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tiles that end inside, several pictures, every epilogue; twenty launches give the same bits."""
    N, C, K, H, W = shape
    x, weight, residual = (picture(*s, dtype=dtype) for s in ((N, C, H, W), (K, C, 3, 3), (N, K, H, W)))
    weight *= (9 * C) ** -0.5
    for bias in (None, torch.randn(K, device="cuda")):
        for other, act in ((residual, "none"), (None, "none"), (None, "silu"), (None, "relu")):
            made = ops.conv2d(x, weight, bias, other, act, "own")
            truth = ops.conv2d.reference(*(None if t is None else t.double() for t in (x, weight, bias, other)), act)
            assert error(made, truth).relative_l2 < (0.0025 if dtype is torch.bfloat16 else 0.0004)
            buffer = torch.full((N, K + 8, H + 1, W + 1), float("nan"), dtype=dtype, device="cuda")
            buffer = buffer.contiguous(memory_format=torch.channels_last)
            inside = buffer[:, :K, :H, :W]
            for _ in range(20):
                ops.conv2d(x, weight, bias, other, act, "own", out=inside)
                assert torch.equal(inside, made)
            inside.fill_(float("nan"))
            assert buffer.isnan().all()
    assert ops.conv2d.ran["hopper"]


@pytest.mark.usefixtures("hopper")
def test_our_convolution_compiles_nothing_for_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    def run(N: int, C: int, H: int, W: int) -> None:
        x, weight, residual = picture(N, C, H, W), picture(C, C, 3, 3), picture(N, C, H, W)
        ops.conv2d(x, weight, None, residual, "none", "own")

    run(1, 128, 64, 128)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *_, **info: compiled.append(str(info)))
    for N, C, H, W in ((1, 128, 1, 1), (2, 256, 33, 100), (16, 512, 16, 16), (1, 128, 1000, 1000)):
        run(N, C, H, W)
    assert compiled == []


@pytest.mark.parametrize("name", KERNELS)
def test_memory_is_that_of_the_results(name: str) -> None:
    op = ops.registry()[name]
    case = next(c for c in op.cases if "real" in c.tags)
    args, kwargs = case.build(torch.bfloat16, "cuda")
    results = op(*args, **kwargs)
    size = sum(t.nbytes for t in ([results] if torch.is_tensor(results) else results))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    op(*args, **kwargs, out=results)
    extra = torch.cuda.max_memory_allocated() - before
    # Statistics of a norm; where it goes straight into a convolution, the sum with a residual and 27 products a pixel.
    allowed = {"group_norm_silu": 0.03 * size, "residual_group_norm_silu": 0.03 * size}
    allowed["group_norm_silu_conv2d"] = 1.03 * args[0].nbytes + 27 * 4 * args[0][0, 0].numel()
    assert extra <= allowed.get(name, 0)


@pytest.mark.parametrize("name", sorted(ops.registry()))
def test_runs_in_a_cuda_graph(name: str) -> None:
    op = ops.registry()[name]
    args, kwargs = small(name)
    eager = op(*args, **kwargs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*args, **kwargs)
    for t in [captured] if torch.is_tensor(captured) else captured:
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    pairs = [(captured, eager)] if torch.is_tensor(captured) else zip(captured, eager, strict=True)
    assert all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", sorted(ops.registry()))
def test_twice_gives_the_same_bits(name: str) -> None:
    case = next(c for c in ops.registry()[name].cases if "real" in c.tags)
    args, kwargs = case.build(torch.bfloat16, "cuda")
    first, second = (ops.registry()[name](*args, **kwargs) for _ in range(2))
    pairs = [(first, second)] if torch.is_tensor(first) else zip(first, second, strict=True)
    assert all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", sorted(ops.registry()))
def test_torch_compile_runs_the_kernel(name: str) -> None:
    with warnings.catch_warnings():  # inductor's own import asks for what torch calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._inductor.compile_fx")
    op = ops.registry()[name]
    args, kwargs = small(name)
    expected = op(*args, **kwargs)
    op.ran.clear()
    torch._dynamo.reset()
    made = torch.compile(lambda *a: op(*a, **kwargs), backend="aot_eager", fullgraph=True)(*args)
    pairs = [(made, expected)] if torch.is_tensor(made) else list(zip(made, expected, strict=True))
    assert all(same(a, b) for a, b in pairs)
    assert "plain" not in op.ran
    assert op.ran


def test_offsets_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    S, C = 4608, 3072
    B = 2**31 // (S * C) + 2
    x = torch.randn(B, S, C, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(B, C, device="cuda", dtype=torch.bfloat16)
    last = x[-1:].clone()
    ops.gated_residual(x, x, gate, out=x)
    assert error(x[-1:], ops.gated_residual.reference(last.double(), last.double(), gate[-1:].double())).largest < 0.01
    flat = x.view(-1)
    before = flat[-4096:].clone()
    ops.gelu_tanh(flat, out=flat)
    assert error(flat[-4096:], ops.gelu_tanh.reference(before.double())).largest < 0.01


def test_cpu_and_gpu_tensors_do_not_mix() -> None:
    x, v = torch.randn(1, 4, 64, device="cuda"), torch.randn(1, 64)
    with pytest.raises(OpError, match=r"gate must be .* on cuda:0, not float32\[1, 64\] on cpu"):
        ops.gated_residual(x, x, v)


# -- attention -----------------------------------------------------------------------------------------------------


def qkv(dtype: torch.dtype = torch.bfloat16, S: int = 512, D: int = 128) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, S, 3, 4, D, dtype=dtype, device="cuda").unbind(2)


def test_attention_takes_the_fastest_library() -> None:
    capability = torch.cuda.get_device_capability()
    backend = ops.attention.backend(*qkv())
    if capability >= (9, 0):
        assert backend == ("cudnn", "")
    elif capability >= (8, 0):
        assert backend.name == "flash"
        assert "cudnn: slower than flash" in backend.reason
    assert ops.attention.backend(*qkv(torch.float32)).name == "efficient"
    assert ops.attention.backend(*qkv(D=512)) == ("products", "")
    assert ops.attention.backend(*qkv(torch.float32, D=512)).name == "efficient"
    mask = torch.ones(2, 512, dtype=torch.bool, device="cuda")
    masked = ops.attention.backend(*qkv(), mask)
    assert masked.name in ("cudnn", "efficient")
    assert masked.name == "cudnn" or "flash: takes no mask" in masked.reason


def test_attention_result_is_dense() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for D in (64, 128, 512):
            o = ops.attention(*qkv(dtype, D=D))
            assert o.is_contiguous()
            assert o.flatten(2).data_ptr() == o.data_ptr()


def test_attention_honours_switched_off_backends() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.MATH]):
        backend = ops.attention.backend(*qkv())
        assert backend.name == "math"
        assert "flash: switched off in torch.backends.cuda" in backend.reason
        made = ops.attention(*qkv())
    assert made.isfinite().all()


def test_attention_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = __import__("importlib").import_module("fusedit.ops.attention")

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no engine for this graph\nlong trace")

    monkeypatch.setitem(module._LIBRARIES, "cudnn", broken)
    monkeypatch.setitem(module._LIBRARIES, "flash", broken)
    monkeypatch.setattr(module, "_failed", {})
    args = qkv(S=96)
    made = ops.attention(*args)
    assert error(made, ops.attention.reference(*(t.double() for t in args))).largest < 0.02
    backend = ops.attention.backend(*args)
    assert backend.name == "efficient"
    assert "flash: failed for these sizes (no engine for this graph)" in backend.reason


def test_attention_reports_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = __import__("importlib").import_module("fusedit.ops.attention")

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name in module._LIBRARIES:
        monkeypatch.setitem(module._LIBRARIES, name, full)
    with pytest.raises(torch.OutOfMemoryError):
        ops.attention(*qkv(S=64))
    assert not any(key[3] == (2, 64, 4, 128) for key in module._failed)


@pytest.mark.parametrize("T", [1, 7, 8, 63, 224, 257])
def test_attention_masks_of_any_length(T: int) -> None:
    q, _, _ = qkv(S=96)
    _, k, v = qkv(S=T)
    mask = torch.rand(2, T, device="cuda") < 0.5
    mask[:, 0] = True
    mask[1] = False
    args: list[Any] = [t.double() for t in (q, k, v)]
    made = ops.attention(q, k, v, mask)
    assert error(made, ops.attention.reference(*args, mask)).largest < 0.02
    assert (made[1] == 0).all()


def test_the_other_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run: Callable[..., Any] = ops.gated_residual
    x, v = torch.randn(1, 4, 64, device="cuda:1"), torch.randn(1, 64, device="cuda:1")
    assert error(run(x, x, v), ops.gated_residual.reference(x.double(), x.double(), v.double())).largest < 1e-6
