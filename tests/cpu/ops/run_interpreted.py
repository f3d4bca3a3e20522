"""Run by the tests in a process of its own: every small case through the Triton interpreter, findings as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interpreter import patch_once

from fusedit import ops
from fusedit.ops import _hopper, _triton
from fusedit.ops._op import Backend
from fusedit.ops._verify import as_list, double, error, verify


def main() -> None:
    warnings.simplefilter("error")
    np.seterr(over="ignore")  # exp(-x) may overflow to infinity on purpose: 1 / (1 + inf) is the right 0
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    assert _triton.INTERPRETING
    patch_once()
    share, of = int(sys.argv[1]), int(sys.argv[2])
    jobs = [(op, case) for op in ops.registry().values() for case in op.cases if "small" in case.tags]
    # The interpreter multiplies no bfloat16.
    convolutions = ("conv2d", "conv2d_group_norm_silu", "group_norm_silu_conv2d", "winograd_conv2d")
    with_dot = (*convolutions, "grouped_linear", "linear_gelu", "linear_swiglu")
    found = {}
    for op, case in jobs[share::of]:
        # In half precision the sums of taps are rounded once more than stock's weights: on a few pixels now and then
        # more than twice its error. tests/gpu holds real sizes to the rule; the sums themselves are compared below.
        halves = (torch.float16,) if op.name != "upsample_conv2d" else ()
        for dtype in (torch.float32, *halves, *((torch.bfloat16,) if op.name in with_dot else ())):
            op.ran.clear()
            wrong = verify(op, case, dtype)
            found[f"{op.name}/{case.name}/{str(dtype)[6:]}"] = {"wrong": wrong, "ran": dict(op.ran)}
    for op in list(ops.registry().values())[share::of]:
        found[f"{op.name}/negated"] = negated(op)
    if share == 0:
        found["upsample_conv2d/folded"] = folded()
        found["group_norm_silu/large-mean"] = large_mean()
        for dtype in (torch.float32, torch.float16):
            for name in ("linear_gelu", "linear_swiglu"):
                found[f"{name}/persistent/{str(dtype)[6:]}"] = persistent(name, dtype)
                for out in OUTS:
                    found[f"{name}/out-{out}/{str(dtype)[6:]}"] = into(name, dtype, out)
    print(json.dumps(found))


def negated(op: Any) -> dict[str, bool]:
    """An op of views that have their sign in a flag, and of the same values without."""
    args, kwargs = next(case for case in op.cases if "small" in case.tags).build(torch.float32)

    def view(arg: Any) -> Any:
        if isinstance(arg, list):
            return [view(item) for item in arg]
        if not isinstance(arg, torch.Tensor) or arg.dtype is torch.float8_e4m3fn:  # which torch cannot negate
            return arg
        return torch._neg_view(-arg) if arg.is_floating_point() else arg

    views = [view(arg) for arg in args]
    pairs = zip(as_list(op(*views, **kwargs)), as_list(op(*args, **kwargs)), strict=True)
    return {"same": all(torch.equal(a, b) for a, b in pairs)}


def folded() -> dict[str, bool]:
    """Sums of taps by the kernel, bit for bit those of plain torch, for weights in both memory formats."""
    module = importlib.import_module("fusedit.ops.upsample_conv2d")
    weight = torch.randn(40, 35, 3, 3).half()
    last = weight.contiguous(memory_format=torch.channels_last)
    return {
        name: torch.equal(module.folded(w), module.transposed(w)) for name, w in (("dense", weight), ("last", last))
    }


def persistent(name: str, dtype: torch.dtype) -> dict[str, float | bool]:
    """The kernel of an op that takes it on Hopper alone: two items, a slice, tiles that end inside."""
    launch, op = importlib.import_module(f"fusedit.ops.{name}").launch, ops.registry()[name]
    x, weight = torch.randn(2, 330, 72).to(dtype)[:, 30:], (torch.randn(512, 72) / 8).to(dtype)
    rest = (torch.randn(512).to(dtype), 384) if name == "linear_gelu" else ()
    truth = op.reference(*map(double, (x, weight, *rest)))
    buffer = torch.full((2, 310, truth.shape[-1] + 8), float("nan"), dtype=dtype)
    y = buffer[:, 5:305, :-8]
    launch(x, weight, *rest, y)
    made = error(y, truth).relative_l2
    y.fill_(float("nan"))
    return {"error": made, "outside": bool(buffer.isnan().all())}


# Results that TMA cannot write to, by how they lie in a dense buffer of 41 x 2 N + 8 elements.
OUTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "gapped": lambda buffer, n: buffer[: 40 * 2 * n].view(40, 2 * n)[:, ::2],
    "unaligned": lambda buffer, n: buffer[1 : 1 + 40 * n].view(40, n),
    "odd-rows": lambda buffer, n: buffer.as_strided((40, n), (n + 3, 1), 8),
    "transposed": lambda buffer, n: buffer[: 40 * n].view(n, 40).t(),
}


def into(name: str, dtype: torch.dtype, out: str) -> dict[str, float | bool]:
    """The op itself with its Hopper kernel chosen, into a result that lies in an unusual way."""
    module, op = importlib.import_module(f"fusedit.ops.{name}"), ops.registry()[name]
    x, weight = torch.randn(40, 72).to(dtype), (torch.randn(512, 72) / 8).to(dtype)
    rest = (torch.randn(512).to(dtype), 384) if name == "linear_gelu" else ()
    truth = op.reference(*map(double, (x, weight, *rest)))
    buffer = torch.full((41 * 2 * truth.shape[-1] + 8,), float("nan"), dtype=dtype)
    y = OUTS[out](buffer, truth.shape[-1])
    chosen = mock.patch.object(module, "choose", return_value=Backend("triton", ""))
    with chosen, mock.patch.object(_hopper, "first_time", return_value=False):  # which asks CUDA
        op(x, weight, *rest, out=y)
    made = error(y, truth).relative_l2
    y.fill_(float("nan"))
    return {"error": made, "outside": bool(buffer.isnan().all())}


def large_mean() -> dict[str, float]:
    """Error of the kernel, and of torch where it does not cancel (NCHW), with a mean of 1000 deviations."""
    op = ops.group_norm_silu
    x = torch.randn((1, 8, 40, 40), generator=torch.Generator().manual_seed(1)) + 1000
    weight, bias = torch.ones(8), torch.zeros(8)
    truth = op.reference(x.double(), weight.double(), bias.double(), 2, silu=False)
    made = op(x.contiguous(memory_format=torch.channels_last), weight, bias, 2, silu=False)
    return {
        "kernel": error(made, truth).relative_l2,
        "torch": error(op.plain(x, weight, bias, 2, silu=False), truth)[1],
    }


if __name__ == "__main__":
    main()
