"""What every op promises around its arithmetic: registration, tracing, errors, costs, discovery, absence of triton."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedit.ops
from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _check, _elementwise, _rows
from fusedit.ops._cases import place
from fusedit.ops._op import EXACTNESS, Op
from fusedit.ops._verify import Error, error

REGISTRY = ops.registry()
NAMES = sorted(REGISTRY)
FOLDER = Path(fusedit.ops.__file__).parent


def first_case(name: str, which: str = "small", dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    case = next(case for case in REGISTRY[name].cases if case.name == which)
    return case.build(dtype)


def as_list(value: Any) -> list[torch.Tensor]:
    return [value] if torch.is_tensor(value) else list(value)


# -- discovery -----------------------------------------------------------------------------------------------------


def test_registry_is_the_folder() -> None:
    assert sorted(f.stem for f in FOLDER.glob("[a-z]*.py")) == NAMES
    assert len(NAMES) >= 33


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_described(name: str) -> None:
    op = REGISTRY[name]
    assert getattr(ops, name) is op
    assert op.name == name
    assert op.exactness in EXACTNESS
    assert op.summary.endswith(".")
    assert op.__doc__
    assert op.summary in repr(op)
    assert len({case.name for case in op.cases}) == len(op.cases)
    tags = {tag for case in op.cases for tag in case.tags}
    assert {"small", "real", "strided", "empty"} <= tags
    text = (FOLDER / f"{name}.py").read_text()
    order = [text.index(mark) for mark in ('"""', "def reference(", "def cost(", "CASES = (", f"def {name}(")]
    assert order == sorted(order)
    assert text.count("\n") <= 400


def test_a_module_import_leaves_the_op_in_place() -> None:
    module = importlib.import_module("fusedit.ops.gated_residual")
    assert module.gated_residual is ops.gated_residual
    assert isinstance(ops.gated_residual, Op)


def test_unknown_op_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no op 'layernorm'"):
        _ = ops.layernorm


@pytest.mark.parametrize(
    "body", ["x = 1\n", "from fusedit.ops.swiglu import swiglu as broken\n", "raise OSError('no')\n"]
)
def test_a_broken_file_raises_at_discovery(run_python: Callable[..., str], tmp_path: Path, body: str) -> None:
    (tmp_path / "broken.py").write_text(body)
    code = f"""
import fusedit.ops as ops
ops.__path__.append({str(tmp_path)!r})
try:
    ops.registry()
except (ImportError, OSError) as error:
    print(type(error).__name__, error)
"""
    said = run_python(code)
    assert "broken.py must define exactly one op" in said or said.startswith("OSError no")


# -- without triton ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ImportError('nothing here')", "not installed (nothing here)"),
        ("raise OSError('bad ABI')", "cannot be imported (OSError: bad ABI)"),
        ("__version__ = '3.1.0'", "cannot be imported" + "|" + "not installed"),
    ],
)
def test_without_triton_every_op_is_plain_and_says_why(
    run_python: Callable[..., str], tmp_path: Path, body: str, reason: str
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "triton.py").write_text(body + "\n")
    code = """
import torch
from fusedit import ops
ok, reason = ops.triton_status()
assert not ok
print(reason)
for name, op in ops.registry().items():
    case = op.cases[0]
    args, kwargs = case.build(torch.float32)
    assert op.backend(*args, **kwargs).name == "plain", name
    op(*args, **kwargs)
    assert op.builds() == ()
"""
    said = run_python(code, tmp_path / "fake")
    assert any(part in said for part in reason.split("|"))


def test_importing_the_package_loads_neither_triton_nor_an_op(run_python: Callable[..., str]) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import fusedit.ops
new = set(sys.modules) - before
print(sorted(m for m in new if m.startswith("triton") or m.startswith("fusedit.ops.")))
"""
    assert run_python(code).strip() == "[]"


def test_a_cpu_tensor_says_why_it_is_plain() -> None:
    args, kwargs = first_case("swiglu")
    backend = ops.swiglu.backend(*args, **kwargs)
    assert backend == ("plain", "no kernels for device type cpu") or not ops.triton_status()[0]
    before = ops.swiglu.ran["plain"]
    ops.swiglu(*args, **kwargs)
    assert ops.swiglu.ran["plain"] == before + 1


# -- torch.library and tracing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["small", "transposed"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, which: str) -> None:
    if which not in {case.name for case in REGISTRY[name].cases}:
        which = "small"
    args, kwargs = first_case(name, which)
    made = as_list(REGISTRY[name](*args, **kwargs))
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(t.dtype is not torch.float8_e4m3fn for t in (*args, *made) if isinstance(t, torch.Tensor)):
        checks.append("test_schema")  # multiplies what it compares, which e4m3 cannot be; `verify` compares too
    torch.library.opcheck(getattr(torch.ops.fusedit, name).default, args, kwargs, test_utils=checks)
    outs = [torch.empty_like(t) for t in made]
    names = [f"out_{index}" for index in range(len(outs))]
    mutating = getattr(torch.ops.fusedit, f"{name}_out").default
    torch.library.opcheck(mutating, args, {**kwargs, **dict(zip(names, outs, strict=True))}, test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_torch_compile_sees_one_node(name: str) -> None:
    op = REGISTRY[name]
    args, kwargs = first_case(name)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def fresh(*a: Any) -> Any:
        return op(*a, **kwargs)

    def into(out: Any, *a: Any) -> Any:
        return op(*a, **kwargs, out=out)

    expected = as_list(op(*args, **kwargs))
    torch._dynamo.reset()
    for y, r in zip(as_list(torch.compile(fresh, backend=keep, fullgraph=True)(*args)), expected, strict=True):
        assert torch.equal(y, r)
    outs = [place(torch.full_like(y, float("nan")), "sliced") for y in expected]
    out = outs[0] if len(outs) == 1 else tuple(outs)
    torch.compile(into, backend=keep, fullgraph=True)(out, *args)
    for y, r in zip(outs, expected, strict=True):
        torch.testing.assert_close(y, r)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert f"fusedit.{name}.default" in called
    assert f"fusedit.{name}_out.default" in called


def test_in_place_survives_functionalisation() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x * 1
        ops.gated_residual(x, y, gate, out=x)
        return x + 1

    args, _ = first_case("gated_residual")
    torch._dynamo.reset()
    made = torch.compile(step, backend="aot_eager", fullgraph=True)(*args)
    torch.testing.assert_close(made, step(*args))


def test_a_second_length_is_one_dynamic_graph() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(lambda x, s, h: ops.layer_norm_modulate(x, s, h), backend=counter, fullgraph=True)
    for length in (5, 7, 11, 13, 32):
        step(torch.randn(1, length, 32), torch.randn(1, 32), torch.randn(1, 32))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_have_the_right_shapes(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    args, kwargs = first_case(name)
    expected = as_list(REGISTRY[name](*args, **kwargs))
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        made = as_list(REGISTRY[name](*fakes, **kwargs))
    again = as_list(REGISTRY[name](*fakes, **kwargs))  # without the mode: the tensors are fake all the same
    assert all(isinstance(t, FakeTensor) for t in (*made, *again))
    assert [(t.shape, t.dtype, t.stride()) for t in made] == [(t.shape, t.dtype, t.stride()) for t in expected]


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    op = REGISTRY[name]
    args, kwargs = first_case(name)

    class Module(torch.nn.Module):
        def forward(self, *a: Any) -> Any:
            return op(*a, **kwargs)

    program = torch.export.export(Module(), args)
    assert f"fusedit.{name}.default" in program.graph_module.code.replace("torch.ops.", "")


# -- bad input -----------------------------------------------------------------------------------------------------

X, V = torch.randn(2, 3, 16), torch.randn(2, 16)
QKV, COS = torch.randn(2, 3, 3, 2, 8), torch.randn(1, 3, 4)
IMAGE, SQUARE = torch.randn(1, 8, 4, 4), torch.randn(16, 16)
TILES = torch.randn(1, 1, 1, 1, 8, 8, 32)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("layer_norm_modulate", (X[0], V, V), {}, r"x must be \[B, S, C\], not float32\[3, 16\] on cpu"),
    ("layer_norm_modulate", (X, V[:, :8], V), {}, r"scale must be \[B, C\] = \[2, 16\], .* not float32\[2, 8\] on cpu"),
    ("layer_norm_modulate", (X, V, V[:1]), {}, r"shift must be .* not float32\[1, 16\]"),
    ("layer_norm_modulate", (X.long(), V, V), {}, r"x must be float16, bfloat16 or float32, not int64"),
    ("layer_norm_modulate", (X, V.long(), V), {}, r"scale must be .* not int64"),
    ("layer_norm_modulate", (X, V.to("meta"), V), {}, r"scale must be .* on cpu, not float32\[2, 16\] on meta"),
    ("layer_norm_modulate", (None, V, V), {}, r"x must be a tensor, not NoneType None"),
    ("layer_norm_modulate", ([1.0], V, V), {}, r"x must be a tensor, not a list of 1"),
    ("layer_norm_modulate", (X, V, V), {"out": X[:1].clone()}, r"out must be float32\[2, 3, 16\] on cpu, not"),
    ("layer_norm_modulate", (X, V, V), {"out": X.half()}, r"out must be float32.* not float16"),
    ("layer_norm_modulate", (X, V, V), {"out": X[:, :1].expand(2, 3, 16)}, r"several indices for one element"),
    ("layer_norm_modulate", (X, V, V), {"out": torch._neg_view(X.clone())}, r"out is a negated view"),
    (
        "conv2d",
        (IMAGE, torch.ones(8, 4, 3, 3)),
        {},
        r"not x float32\[1, 8, 4, 4\] on cpu and weight float32\[8, 4, 3, 3\]",
    ),
    ("conv2d", (IMAGE.half(), torch.ones(8, 8, 3, 3)), {}, r"not x float16\[1, 8, 4, 4\] on cpu and weight float32"),
    ("upsample_conv2d", (IMAGE.to("meta"), torch.ones(8, 8, 3, 3)), {}, r"one dtype, device .* on meta and weight"),
    ("rms_norm_modulate", (X, V, V), {}, r"weight must be \[C\] = \[16\]"),
    ("gated_residual", (X, X[:, :2], V), {}, r"y must be float32\[2, 3, 16\] on cpu, not float32\[2, 2, 16\]"),
    ("gated_residual", (X, X.bfloat16(), V), {}, r"y must be float32.* not bfloat16"),
    ("gated_residual_layer_norm", (X, X, V, V, V), {"out": X.clone()}, r"out must be a tuple of 2 tensors"),
    ("gated_residual_layer_norm", (X, X, V, V, V), {"out": (X, X)}, r"out\[1\] overlaps another output"),
    ("rms_gated_residual", (X, X, V[0, :4], None), {}, r"y_weight must be \[C\] = \[16\]"),
    ("rms_gated_residual_rms_norm", (X, X, V[0], V, V, None), {}, r"next_weight must be \[C\]"),
    ("qk_norm_rope", (QKV[:, :, :2], None, None, COS, COS), {}, r"qkv must be \[B, S, 3, H, D\]"),
    ("qk_norm_rope", (QKV[..., :7], None, None, COS, COS), {}, r"head size D must be even and at most 256, not 7"),
    ("qk_norm_rope", (QKV, None, None, COS[:, :2], COS), {}, r"cos must be \[B or 1, S, D/2\] = \[1, 3, 4\]"),
    ("qk_norm_rope", (QKV, None, None, COS, COS.expand(2, 3, 4)), {}, r"must have one shape"),
    ("qk_norm_rope", (QKV, None, None, COS.bfloat16(), COS), {}, r"cos must be float32, not bfloat16"),
    ("qk_norm_rope", (QKV, V[0], None, COS, COS), {}, r"q_weight must be \[D\] = \[8\]"),
    (
        "qk_norm_rope",
        (QKV, None, None, COS, COS),
        {"out": (QKV[:, :, 1], QKV[:, :, 0])},
        r"lies on an input .* it is made of",
    ),
    ("gelu_tanh", (torch.tensor(1.0),), {}, r"x must have at least one dimension"),
    ("swiglu", (X, X[..., :8]), {}, r"b must be float32\[2, 3, 16\]"),
    ("group_norm_silu", (IMAGE, V[0, :8], V[0, :8], 3), {}, r"groups must divide the 8 channels, not 3"),
    ("group_norm_silu", (IMAGE[0], V[0, :8], V[0, :8], 2), {}, r"x must be \[N, C, H, W\]"),
    ("strided_copy", (torch.tensor(1.0),), {}, r"x must have at least one dimension"),
    ("nchw_to_nhwc", (IMAGE[0],), {}, r"x must be \[N, C, H, W\], not float32\[8, 4, 4\] on cpu"),
    ("nhwc_to_nchw", (IMAGE.long(),), {}, r"x must be float16, bfloat16 or float32, not int64\[1, 8, 4, 4\]"),
    (
        "nhwc_to_nchw",
        (IMAGE,),
        {"out": IMAGE[:, :4]},
        r"out must be float32\[1, 8, 4, 4\] on cpu, not float32\[1, 4, 4",
    ),
    ("pack_tiles", (IMAGE, 16), {}, r"channels must be 32 or 64, not int 16"),
    (
        "unpack_tiles",
        (TILES, 33, 8, 8),
        {},
        r"t must be \[1, 1, 1, 2, 8, 8, 32\] for C, H, W = 33, 8, 8, not float32\[",
    ),
    ("unpack_tiles", (TILES[..., :16], 16, 8, 8), {}, r"t must have tiles of 32 or 64 channels, not float32\["),
    ("linear_gelu", (X, SQUARE, SQUARE[0], 17), {}, r"start must be an integer from 0 to 16, .* not 17"),
    ("linear_gelu", (X, SQUARE, SQUARE[0], 1.0), {}, r"start must be an integer from 0 to 16, .* not float 1.0"),
    ("linear_gelu", (X, V[:, :8], V[:, 0]), {}, r"weight must be float32\[2, 16\]"),
    ("linear_gelu", (X, V, V[0]), {}, r"bias must be float32\[2\]"),
    ("linear_gelu", (V, SQUARE, SQUARE[0]), {"out": V}, r"out .* lies on x .* no input of this call"),
    ("linear_swiglu", (X, SQUARE[:3]), {}, r"weight must have an even number of rows"),
    ("linear_swiglu", (X, SQUARE[:, :8]), {}, r"weight must be float32\[16, 16\]"),
    ("grouped_linear", (V, [], []), {}, r"as many weights as biases and at least one, not 0 and 0"),
    ("grouped_linear", (V, [V, V[:, :8]], [V[:, 0]] * 2), {}, r"biases\[0\] and its weight|must be contiguous|weights"),
    ("grouped_linear", (V, [V], [V[0]]), {}, r"biases\[0\] must be float32\[2\]"),
    ("grouped_linear", (V, [V], [V[:, 0].clone()], V), {}, r"key, keys and table are given together"),
    ("grouped_linear", (V, [V], [V[:, 0].clone()], V, V[None, :1], V), {}, r"keys must be float32\[1, 2, 16\]"),
    ("attention", (X[..., None], X[..., None][:1], X[..., None]), {}, r"k must be float32\[2, 3, 16, 1\]"),
    ("attention", (QKV[:, :, 0], QKV[:, :, 1], QKV[:, :2, 2]), {}, r"v must be"),
    ("attention", (QKV[:, :, 0], QKV[:, :, 1], QKV[:, :, 2], COS[0, :, :2]), {}, r"key_mask must be bool"),
    ("attention", (*QKV.unbind(2), torch.ones(2, 2) > 0), {}, r"key_mask must be \[B, T\] = \[2, 3\]"),
    ("attention", (*QKV.unbind(2), None, float("nan")), {}, r"scale must be finite or None"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "match"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_bad_input_is_named(name: str, args: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(OpError, match=match) as raised:
        REGISTRY[name](*args, **kwargs)
    assert str(raised.value).startswith(f"{name}: ")
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_an_output_that_lies_on_an_input_is_told_where_it_may_lie() -> None:
    x, weight, wider = torch.randn(1, 8, 4, 4), torch.randn(8, 8, 3, 3), torch.randn(1, 12, 4, 4)
    residual = x.clone()
    on_x = "conv2d: out float32[1, 8, 4, 4] on cpu lies on x float32[1, 8, 4, 4] on cpu, which is still read"
    for arguments, out, said in (
        ((x, weight), x, f"{on_x} while that is written; it may lie on no input of this call"),
        ((x, weight, None, x), x, f"{on_x} while that is written; it may lie on no input of this call"),
        ((x, weight, None, residual), x, f"{on_x} while that is written; it may lie exactly on residual, or apart"),
        ((x, weight, None, wider[:, 4:]), wider[:, :8], "conv2d: out float32[1, 8, 4, 4] on cpu partly overlaps resid"),
    ):
        kept = out.clone()
        for call in (ops.conv2d, ops.conv2d.plain):
            with pytest.raises(OpError) as raised:
                call(*arguments, out=out)
            assert str(raised.value).startswith(said)
        assert torch.equal(out, kept)
    assert ops.conv2d(x, weight, None, residual, out=residual) is residual


def test_an_output_partly_on_an_input_is_refused_and_nothing_is_written() -> None:
    buffer = torch.randn(2, 4, 16)
    before = buffer.clone()
    with pytest.raises(OpError, match=r"partly overlaps an input float32\[2, 3, 16\]"):
        ops.gated_residual(buffer[:, :3], X, V, out=buffer[:, 1:])
    rows = torch.randn(3, 16)
    with pytest.raises(OpError, match=r"partly overlaps an input float32\[1, 16\]"):
        ops.layer_norm_modulate(torch.randn(1, 2, 16), rows[1:2], None, out=rows[None, :2])
    assert torch.equal(buffer, before)


def test_gradients_are_refused_in_one_sentence() -> None:
    for name in NAMES:
        args, kwargs = first_case(name)
        wanting = [args[0].detach().requires_grad_(), *args[1:]]
        for call in (REGISTRY[name], getattr(torch.ops.fusedit, name)):
            with pytest.raises(OpError, match=rf"{name} has no gradient: call it under torch.no_grad\(\)"):
                call(*wanting, **kwargs)
        with torch.no_grad():
            assert not as_list(REGISTRY[name](*wanting, **kwargs))[0].requires_grad
    out = torch.empty(2, 3, 16, requires_grad=True)
    with pytest.raises(OpError, match="out requires a gradient"):
        ops.gated_residual(X, X, V, out=out)


# -- results -------------------------------------------------------------------------------------------------------


def test_attention_result_flattens_without_a_copy() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16)
    for args in (qkv.unbind(2), (qkv[:, :5, 0], qkv[:, :, 1], qkv[:, :, 2], torch.rand(2, 9) < 0.7)):
        o = ops.attention(*args)
        assert o.is_contiguous()
        assert o.flatten(2).data_ptr() == o.data_ptr()
    assert ops.attention.backend(*qkv.unbind(2)).name == "plain"


def test_attention_touches_no_global_state() -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    flags = torch.backends.cuda
    before = (flags.flash_sdp_enabled(), flags.cudnn_sdp_enabled(), flags.mem_efficient_sdp_enabled())
    ops.attention(*torch.randn(1, 4, 3, 2, 8).unbind(2))
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert before == (flags.flash_sdp_enabled(), flags.cudnn_sdp_enabled(), flags.mem_efficient_sdp_enabled())


def test_attention_without_keys_is_zero() -> None:
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 2, 8)
    assert torch.equal(ops.attention(q, k, k), torch.zeros_like(q))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_group_norm_keeps_the_layout_on_a_cpu(layout: torch.memory_format) -> None:
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=layout)
    assert ops.group_norm_silu(x, torch.ones(8), torch.zeros(8), 2).is_contiguous(memory_format=layout)


# -- costs ---------------------------------------------------------------------------------------------------------


def test_costs_at_the_sizes_of_the_models() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, v = meta(1, 4608, 3072), meta(1, 3072)
    size = 4608 * 3072 * 2
    assert ops.layer_norm_modulate.cost(x, v, v).bytes == 2 * size + 2 * 6144
    assert ops.gated_residual.cost(x, x, v) == (3 * size + 6144, 2 * 4608 * 3072)
    assert ops.gated_residual_layer_norm.cost(x, x, v, v, v).bytes == 4 * size + 3 * 6144
    assert ops.rms_norm_modulate.cost(x, v[0], None).bytes == 2 * size + 6144
    qkv, table = meta(1, 4608, 3, 24, 128), meta(1, 4608, 64, dtype=torch.float32)
    assert ops.qk_norm_rope.cost(qkv, None, None, table, table).bytes == 4 * size + 2 * 4608 * 64 * 4
    assert ops.gelu_tanh.cost(x).bytes == 2 * size
    assert ops.swiglu.cost(x, x).bytes == 3 * size
    q = meta(1, 4608, 24, 128)
    assert ops.attention.cost(q, q, q) == (4 * size, 4 * 4608 * 4608 * 24 * 128)
    image, w = meta(1, 128, 1024, 1024), meta(128)
    assert ops.group_norm_silu.cost(image, w, w, 32).bytes == 3 * 2 * 128 * 1024 * 1024 + 512


@pytest.mark.parametrize("name", NAMES)
def test_cost_takes_the_ops_own_arguments(name: str) -> None:
    for case in REGISTRY[name].cases:
        if "small" in case.tags and "empty" not in case.tags:
            args, kwargs = case.build(torch.float16)
            cost = REGISTRY[name].cost(*args, **kwargs)
            assert cost.bytes > 0
            assert cost.flops > 0 or REGISTRY[name].exactness == "bitwise"  # copies
    assert next(iter(inspect.signature(REGISTRY[name].reference).parameters)) in (
        *("x", "q", "qkv", "a", "t", "y", "weight", "length"),
    )


# -- parts ---------------------------------------------------------------------------------------------------------


def test_overlap_is_exact() -> None:
    torch.manual_seed(0)
    buffer = torch.arange(400)
    for _ in range(300):
        views = []
        for _ in range(2):
            sizes = [int(n) for n in torch.randint(1, 5, (3,))]
            strides = [int(n) for n in torch.randint(0, 20, (3,))]
            views.append(buffer.as_strided(sizes, strides, int(torch.randint(0, 150, ()))))
        truth = bool(torch.isin(views[0].reshape(-1), views[1].reshape(-1)).any())
        assert _check.overlap(*views) == truth
        assert not (_check.self_overlap(views[0]) is False and views[0].unique().numel() < views[0].numel())
    packed = torch.randn(4, 5, 32)
    assert not _check.overlap(packed[..., :16], packed[..., 16:])
    assert _check.overlap(packed[..., :17], packed[..., 16:])
    assert not _check.overlap(packed, torch.randn(4))
    assert _check.overlap(packed, packed.view(torch.int32))


def test_fold_gives_the_same_elements() -> None:
    x = torch.randn(2, 3, 4, 24)
    for views, shape in (
        ((x, x.clone()), (1, 1, 576)),
        ((x[..., :8], x[..., 8:16]), (1, 24, 8)),
        ((x[:, :2], x[:, 1:]), (1, 2, 192)),
        ((x[:, :2, :, :8], x[:, 1:, :, 8:16]), (2, 8, 8)),
        ((x[:, :2, :3, :8],), (1, 1, 96)),  # four strides: a copy
        ((x.transpose(-1, -2),), (1, 1, 576)),
        ((x[:, :1, :1, :1],), (1, 2, 1)),
    ):
        folded = _elementwise.fold(*views)
        for t, view in zip(folded, views, strict=True):
            assert t.shape == shape
            assert torch.equal(t.reshape(-1), view.reshape(-1))


def test_elementwise_tiles_depend_on_channels_alone() -> None:
    for channels, block in ((64, 64), (2048, 2048), (12288, 2048)):
        tiles = set()
        for length in (1, 2, 3, 16, 333, 4096):
            x = torch.empty(1, length + 1, channels, device="meta")
            for t in (x, x[:, 1:], x[..., : channels // 2]):
                (folded,) = _elementwise.fold(t)
                plan = _elementwise.plan(4, folded.shape, t.shape[-1], _rows._DEFAULT)
                tiles.add((plan.constexprs["BLOCK"], plan.constexprs["ROWS"]))
        assert tiles <= {
            (2048, 1),
            (block, 2048 // block),
            (min(2048, channels // 2), 2048 // min(2048, channels // 2)),
        }


def test_vector_asks_for_16_bytes_everywhere() -> None:
    x = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    assert _rows.vector(64, x, x) == 8
    assert _rows.vector(64, x.float()) == 4
    assert _rows.vector(60, x[..., :60]) == 1
    assert _rows.vector(64, x, torch.zeros(2, 65)[:, 1:]) == 1
    assert _rows.vector(64, x, torch.zeros(2, 68)[:, :64]) == 1  # 16-byte rows, but not a whole number of steps
    assert _rows.vector(64, x, torch.zeros(1, 65)[:, :64]) == 8  # one row: its stride is never used
    assert _rows.steps(x, 8) == (40, 8)
    assert _rows.steps(x[:1, :1], 8) == (0, 0)


def test_row_tiles() -> None:
    assert _rows.row_tile(3072) == (1, 4096, 4)
    assert _rows.row_tile(3840) == (1, 4096, 4)
    assert _rows.row_tile(256) == (8, 256, 4)
    assert _rows.row_tile(8192) == (1, 8192, 8)
    assert _rows.row_tile(32768) == (1, 32768, 32)
    assert _rows.limit(torch.empty(1, 2, 40000, device="meta")) == "rows of 40000 channels are wider than 32768"


def test_error_and_rule() -> None:
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]).double()) == pytest.approx((0.5, 2 / 17**0.5))
    assert not Error(float("nan"), 0.0).within(Error(1.0, 1.0))
    assert Error(2.0, 2.0).within(Error(1.0, 1.0))
    assert not Error(2.0, 2.1).within(Error(1.0, 1.0))
