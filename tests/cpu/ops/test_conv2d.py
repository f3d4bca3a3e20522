"""ops.conv2d and its kernel for Hopper as far as a CPU shows them: who serves, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _conv_hopper, _gluon, _rows
from fusedit.ops._verify import error


def arguments(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 64, 5, 6, dtype=dtype), torch.randn(128, 64, 3, 3, dtype=dtype) / 24


def test_an_unknown_algorithm() -> None:
    for call in (ops.conv2d, ops.conv2d.plain, ops.conv2d.backend):
        with pytest.raises(OpError, match="algorithm must be one of fastest, library, own, not str 'winograd'"):
            call(*arguments(), algorithm="winograd")
    with pytest.raises(OpError, match=r"conv2d: .*, own, not int 3"):
        ops.conv2d(*arguments(), algorithm=3)  # type: ignore[arg-type]


def test_none_of_ours_serves_on_a_cpu() -> None:
    x, weight = arguments()
    with pytest.raises(
        OpError, match=r"conv2d: algorithm 'own' cannot serve x float32\[1, 64, 5, 6\].* device type cpu"
    ):
        ops.conv2d.backend(x, weight, algorithm="own")
    with pytest.raises(OpError, match="'own' cannot serve"):
        ops.conv2d(x, weight, algorithm="own")
    assert torch.equal(ops.conv2d(x, weight, algorithm="library"), ops.conv2d(x, weight))
    assert ops.conv2d.backend(x, weight, algorithm="library").name == "plain"


def test_what_the_interpreter_is_given(run_python: Callable[..., str]) -> None:
    code = """
import torch
from fusedit import ops
for dtype in (torch.float32, torch.bfloat16):
    x, w = torch.ones(1, 64, 5, 6, dtype=dtype), torch.ones(128, 64, 3, 3, dtype=dtype)
    for algorithm in ("fastest", "library", "own"):
        try:
            print(algorithm, *ops.conv2d.backend(x, w, algorithm=algorithm), sep="|")
        except Exception as error:
            print(algorithm, error, sep="|")
"""
    said = run_python(code, TRITON_INTERPRET="1").splitlines()
    why = "triton's interpreter cannot multiply bfloat16"
    assert said[:3] == ["fastest|direct|", "library|library|", "own|direct|"]
    assert said[3:5] == [f"fastest|plain|{why}", f"library|plain|{why}"]
    assert said[5].startswith("own|conv2d: algorithm 'own' cannot serve x bfloat16[1, 64, 5, 6]")
    assert said[5].endswith(why)


def test_without_gluon_everything_else_is_there(run_python: Callable[..., str]) -> None:
    code = """
import sys
sys.modules["triton.experimental.gluon"] = None
import torch
from fusedit import ops
from fusedit.ops import _conv_hopper, _gluon
print(_gluon.reason)
print([build.name for build in ops.conv2d.builds()])
print(_conv_hopper.reason(torch.ones(1, 64, 2, 2), 128, 3, "none", None) == _gluon.reason)
"""
    pytest.importorskip("triton")
    reason, names, same = run_python(code).splitlines()
    assert "has another Gluon (ModuleNotFoundError" in reason
    assert "wide-bf16" in names
    assert "hopper" not in names
    assert same == "True"


class OnHopper:
    """Stands for a tensor on a GPU that the kernel is written for."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._x, name)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if _gluon.reason:
        pytest.skip(_gluon.reason)
    monkeypatch.setattr(_conv_hopper._triton, "capability", lambda _: (9, 0))
    monkeypatch.setattr(_rows, "multiprocessors", lambda _: 132)


def picture(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return OnHopper(torch.empty(shape, dtype=dtype, memory_format=torch.channels_last))


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_takes() -> None:
    x = picture(1, 64, 4, 6)
    y = torch.empty(1, 128, 4, 6, dtype=torch.bfloat16, memory_format=torch.channels_last)
    assert _conv_hopper.reason(x, 128, 3, "none", y, y) == ""
    assert _conv_hopper.reason(x, 128, 3, "silu", None) == ""
    refused = {
        "takes half precision, not float32": (picture(1, 64, 4, 6, dtype=torch.float32), 128, 3, "none", None),
        "takes 3 x 3 taps, not 1 x 1": (x, 128, 1, "none", None),
        "takes multiples of 64 channels and 128 outputs, not 96 and 128": (picture(1, 96, 4, 6), 128, 3, "none", None),
        "takes multiples of 64 channels and 128 outputs, not 64 and 192": (x, 192, 3, "none", None),
        "a residual behind an activation": (x, 128, 3, "relu", y),
        "channels do not lie side by side": (x, 128, 3, "none", y.contiguous()),
        "nothing to do": (picture(0, 64, 4, 6), 128, 3, "none", None),
        "several places are one pixel": (OnHopper(y[:, :64, :1].expand(1, 64, 4, 6)), 128, 3, "none", None),
        "needs pixels on 16 bytes": (x, 128, 3, "none", torch.empty(1, 4, 6, 129).bfloat16()[..., 1:].movedim(-1, 1)),
    }
    for reason, call in refused.items():
        assert _conv_hopper.reason(*call) == reason
    assert _conv_hopper.reason(torch.empty(1, 64, 4, 6), 128, 3, "none", None) == "written for compute capability 9.0"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "K", "busy"),
    [
        ((1, 512, 128, 128), 512, True),  # 256 tiles in two waves of 132
        ((1, 128, 1024, 1024), 128, True),
        ((1, 512, 64, 64), 512, False),  # rows half as long as a tile
        ((4, 512, 64, 128), 512, True),
        ((1, 512, 64, 128), 512, True),  # 128 tiles
        ((1, 512, 72, 128), 512, False),  # 144
    ],
)
def test_tiles_have_to_fill_the_chip(shape: tuple[int, ...], K: int, busy: bool) -> None:
    said = _conv_hopper.idle(picture(*shape), K)
    assert (said == "") is busy
    assert busy or "of the chip busy" in said


def test_statistics_need_whole_tiles() -> None:
    assert _conv_hopper.measures(2, 128)
    assert not _conv_hopper.measures(3, 128)
    assert not _conv_hopper.measures(2, 120)


@torch.no_grad()
@pytest.mark.parametrize("residual", [True, False])
def test_a_norm_in_the_place_of_its_sum(residual: bool) -> None:
    x, weight = arguments()
    other = torch.randn(1, 128, 5, 6) if residual else None
    args = (x, weight, torch.rand(128), torch.rand(128), 32, torch.rand(128), other)
    truth = ops.conv2d_group_norm_silu.reference(*args)[1]
    t = torch.empty(1, 128, 5, 6)
    for call in (ops.conv2d_group_norm_silu, ops.conv2d_group_norm_silu.plain):
        made = call(*args, out=(t.fill_(float("nan")), t))  # type: ignore[operator]
        assert made[0] is made[1] is t
        assert error(t, truth.double()).relative_l2 < 1e-6
    overlapping = torch.empty(257, 5, 6)
    with pytest.raises(OpError, match=r"out\[1\] overlaps another output"):
        ops.conv2d_group_norm_silu(*args, out=(overlapping[None, :128], overlapping[None, 1:129]))
    norm = (args[2], args[3], 32)
    with pytest.raises(OpError, match=r"out\[1\] overlaps another output"):
        ops.residual_group_norm_silu(t, t.clone(), *norm, out=(overlapping[None, :128], overlapping[None, :128]))
