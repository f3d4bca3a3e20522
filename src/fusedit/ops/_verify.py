"""The 2x rule: an op's result against fp64, measured by the error of plain torch in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fusedit.ops._cases import Case, place
from fusedit.ops._fp8 import E4M3, E4M3_MAX
from fusedit.ops._op import SLACK, Op

Tensor = torch.Tensor


class Error(NamedTuple):
    """Distance of a result from the truth: max |y - r| / max |r|, and |y - r| / |r| in the 2-norm."""

    largest: float
    relative_l2: float

    def within(self, other: Error, slack: float = SLACK) -> bool:
        """At most twice the other's, plus the slack; NaN is never within."""
        return self.largest <= 2 * other.largest + slack and self.relative_l2 <= 2 * other.relative_l2 + slack


def error(y: Tensor, truth: Tensor) -> Error:
    if truth.numel() == 0:
        return Error(0.0, 0.0)
    d = y.double() - truth.double()
    size, norm = truth.abs().max().clamp_min(1e-300), truth.norm().clamp_min(1e-300)
    return Error(float(d.abs().max() / size), float(d.norm() / norm))


def misrounded(q: Tensor, truth: Tensor, slack: float) -> int:
    """How many of these e4m3 codes are not the nearest to the truth, the values before rounding.

    Two codes are as good where the truth is so near to the middle between them that fp32 arithmetic in another order
    may see it on the other side: within `slack` * 448.
    """
    kept, truth = q.double(), truth.double().clamp(-E4M3_MAX, E4M3_MAX)
    # Steps are 2^-3 of the power of two below a code, and of 2^-6 at least. Below a power of two they are half as long.
    half = torch.ldexp(torch.ones_like(kept), kept.abs().clamp_min(2.0**-6).frexp().exponent - 5)
    inward = (truth.abs() < kept.abs()) & (kept.abs().frexp().mantissa == 0.5) & (kept.abs() > 2.0**-6)
    far = (kept - truth).abs() > torch.where(inward, half / 2, half) + slack * E4M3_MAX
    return int((far | (kept.isnan() != truth.isnan())).sum())


def verify(op: Op[..., Any], case: Case, dtype: torch.dtype, device: str | torch.device = "cpu") -> list[str]:
    """Runs one case in every way it can be called; returns a sentence for each way that is wrong.

    Fresh results; results into memory full of NaN; into a slice of a wider buffer, whose rest must stay as it was;
    onto an input, where the case has an `alias`; and all into one tensor, where the op takes that.
    """
    args, kwargs = case.build(dtype, device)
    kept = op.dtypes(*args, **kwargs)
    truths = as_list(op.reference(*map(double, args), **kwargs))
    plains = [error(y, truth) for y, truth in zip(as_list(op.plain(*args, **kwargs)), truths, strict=True)]
    wrong = []
    for way, results in _ways(op, case, dtype, device, args, kwargs):
        if isinstance(results, str):
            wrong.append(f"{way}: {results}")
            continue
        for index, (y, truth, allowed) in enumerate(zip(results, truths, plains, strict=True)):
            if y.shape != truth.shape or y.dtype != kept[index]:
                wrong.append(f"{way}[{index}]: {y.dtype}{list(y.shape)}, not {kept[index]}{list(truth.shape)}")
            elif not error(y, truth).within(allowed, op.slack[index]):
                wrong.append(f"{way}[{index}]: {error(y, truth)}, plain torch {allowed}")
            elif y.dtype is E4M3 and (count := misrounded(y, truth, op.slack[index])):
                wrong.append(f"{way}[{index}]: {count} of {y.numel()} codes are not the nearest")
    again, _ = case.build(dtype, device)
    for index, (before, after) in enumerate(zip(again, args, strict=True)):
        if isinstance(before, Tensor) and not same(before, after):
            wrong.append(f"argument {index} was changed")
    return wrong


def _ways(
    op: Op[..., Any],
    case: Case,
    dtype: torch.dtype,
    device: str | torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[tuple[str, list[Tensor] | str]]:
    fresh = as_list(op(*args, **kwargs))
    yield "fresh", fresh
    outs = [torch.full_like(y, float("nan")) for y in fresh]
    returned = op(*args, **kwargs, out=_tuple(outs))
    yield "out", outs
    if any(a is not b for a, b in zip(as_list(returned), outs, strict=True)):
        yield "out", "returned another tensor than out"
    outs = [place(torch.full_like(t, float("nan")), "inside" if t.ndim > 2 else "sliced") for t in fresh]
    for t in outs:
        _whole(t).fill_(float("nan"))  # the buffer around the slice too
    op(*args, **kwargs, out=_tuple(outs))
    yield "out in a buffer", [t.clone() for t in outs]
    for t in outs:
        t.fill_(float("nan"))
        if not _nothing_but_nan(_whole(t)):
            yield "out in a buffer", "wrote outside of out"
    if case.alias is not None:
        own, _ = case.build(dtype, device)
        on_top = case.alias(*own)
        op(*own, **kwargs, out=on_top)
        yield "alias", as_list(on_top)
    for layout in ("dense", "channels_last") if op.one_place else ():
        t = place(torch.full_like(fresh[-1], float("nan")), layout)
        op(*args, **kwargs, out=(t,) * len(fresh))
        yield f"one place, {layout}", [*fresh[:-1], t]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for NaN, which differs from itself; of e4m3 the codes."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype is E4M3 else torch.equal(a, b)


def _nothing_but_nan(t: Tensor) -> bool:
    return bool((t.view(torch.uint8) & 127 == 127).all() if t.dtype is E4M3 else t.isnan().all())


def _whole(t: Tensor) -> Tensor:
    """All memory of the buffer that a view is part of."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def double(value: Any) -> Any:
    """The same arguments in fp64."""
    if isinstance(value, list):
        return [double(item) for item in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def as_list(value: Any) -> list[Tensor]:
    """The results of an op, one or several."""
    return [value] if isinstance(value, Tensor) else list(value)


def _tuple(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
