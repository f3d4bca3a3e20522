"""One half of a VAE three ways, stage by stage: stock in NCHW, stock in NHWC, fused; timed, its conversions counted.

A lap runs the stages one after the other, each on what the one before gave, with a mark of the clock between them, and
then the whole half once more as a caller runs it, without marks. Nothing is installed on the module.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from fusedit import ops, timing
from fusedit.errors import UnsupportedPipelineError
from fusedit.models._sum import Sum
from fusedit.models._vae import VaeModel
from fusedit.models.autoencoder_kl import AutoencoderKL
from fusedit.models.autoencoder_kl_encoder import AutoencoderKLEncoder
from fusedit.plan import Plan
from fusedit.runtime.counters import Counters
from fusedit.runtime.graphs import HOST_SHARE_OF_ONE_CALL

Tensor = torch.Tensor
VARIANTS: Final = ("nchw", "nhwc", "fused")
HALVES: Final[dict[str, type[VaeModel]]] = {"decode": AutoencoderKL, "encode": AutoencoderKLEncoder}
LEAST_ROUNDS: Final = 3
KINDS: Final = ("cuDNN, NCHW to NHWC", "cuDNN, NHWC to NCHW", "copies in GroupNorm", "copies in convolutions", "others")
"""Conversions inside the stages, in the order of a report; `others` are copies for attention, padding and the like."""


@dataclass(frozen=True)
class Variant:
    """One way to compute a half.

    Attributes:
        name: one of VARIANTS.
        enter: the input as a caller has it, in NCHW -> what the first stage takes.
        stages: names and functions, each of which takes what the one before returned.
        leave: what the last stage returned -> the result in NCHW.
        whole: all of that as a caller runs it.
    """

    name: str
    enter: Callable[[Tensor], Any]
    stages: tuple[tuple[str, Callable[[Any], Any]], ...]
    leave: Callable[[Any], Tensor]
    whole: Callable[[Tensor], Tensor]

    @property
    def converts(self) -> bool:
        """Whether input and result change their layout at the ends."""
        return self.name != "nchw"

    def run(self, x: Tensor, tick: Callable[[], None] = lambda: None) -> Tensor:
        """Stage by stage; `tick` is called behind the input's conversion, each stage, and the result's conversion."""
        s = self.enter(x)
        tick()
        for _, stage in self.stages:
            s = stage(s)
            tick()
        y = self.leave(s)
        tick()
        return y


def layouts_of(variant: Variant, x: Tensor) -> tuple[str, ...]:
    """How what each stage returns lies in memory: NCHW, NHWC, or neither. Stock does not keep what it was given: what
    attention returns lies in NHWC, and a sum lies as its first term."""
    s, found = variant.enter(x), []
    for _, stage in variant.stages:
        s = stage(s)
        y = s.x if isinstance(s, Sum) else s
        nchw, nhwc = y.is_contiguous(), y.is_contiguous(memory_format=torch.channels_last)
        found.append("NCHW" if nchw else "NHWC" if nhwc else "neither")
    return tuple(found)


class Figure(NamedTuple):
    """Milliseconds: the median of all laps, the least and the most."""

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Times:
    """What one variant took.

    Attributes:
        parts: the input's conversion, each stage, the result's conversion.
        whole: from the input to the result in one go.
        laps: how many were timed.
        host_bound: whether the host was slower than the GPU in most of them.
    """

    parts: tuple[Figure, ...]
    whole: Figure
    laps: int
    host_bound: bool


class Conversions(NamedTuple):
    """Conversions of one kind inside the stages of one pass: how many, and their time on the GPU."""

    kind: str
    number: int
    ms: float


def variants(module: Any, what: str, x: Tensor) -> tuple[Variant, ...]:
    """The three, for a decoder or an encoder and inputs like x.

    Raises:
        UnsupportedPipelineError: the fused forward does not serve this module; says why.
    """
    model_class = HALVES[what]
    reason = model_class.refuse(module)
    if reason is None:
        own = copy.deepcopy(module)  # whose weights may be laid otherwise
        model = model_class(own, Plan(cache={"graphs": False, "prompts": False}), Counters())
        reason = model.needs_stock((x,), {})
    if reason is not None:
        raise UnsupportedPipelineError(f"fusedit has no fused {what} for this VAE: {reason}; stock is all there is")
    other = copy.deepcopy(module).to(memory_format=torch.channels_last)
    made = (
        Variant("nchw", _same, _stock(module, what), _same, module),
        Variant("nhwc", _to_nhwc, _stock(other, what), _to_nchw, lambda x: _to_nchw(other(_to_nhwc(x)))),
        Variant("fused", lambda x: Sum(ops.nchw_to_nhwc(x)), tuple(model.stages()), _result, model.forward),
    )
    names = {tuple(name for name, _ in variant.stages) for variant in made}
    assert len(names) == 1, names  # what stands side by side in a row must be the same stage
    return made


def _stock(m: Any, what: str) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The stock submodules in the order of the stock forward."""
    kind = "up_blocks" if what == "decode" else "down_blocks"
    blocks = [(f"{kind}.{place}", block) for place, block in enumerate(getattr(m, kind))]
    middle = [("mid_block", m.mid_block)]
    inner = [*middle, *blocks] if what == "decode" else [*blocks, *middle]
    return ("conv_in", m.conv_in), *inner, ("conv_out", nn.Sequential(m.conv_norm_out, m.conv_act, m.conv_out))


def _same(x: Tensor) -> Tensor:
    return x


def _to_nhwc(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _to_nchw(x: Tensor) -> Tensor:
    return x.contiguous()


def _result(s: Sum) -> Tensor:
    return s.x if s.x.is_contiguous() else ops.nhwc_to_nchw(s.x)


def time_all(made: Sequence[Variant], x: Tensor, seconds: float) -> dict[str, Times]:
    """Laps of all variants in turn, a different one first each round, until there were `seconds` for each."""
    for variant in made:
        variant.run(x)  # a check has run before, but perhaps at another precision
    laps: dict[str, list[tuple[tuple[float, ...], bool]]] = {variant.name: [] for variant in made}
    began, turn = timing.now(), 0
    while turn < LEAST_ROUNDS or timing.now() - began < seconds * len(made):
        for place in range(len(made)):
            variant = made[(turn + place) % len(made)]
            laps[variant.name].append(_lap(variant, x))
        turn += 1
    return {name: _times(found) for name, found in laps.items()}


def _lap(variant: Variant, x: Tensor) -> tuple[tuple[float, ...], bool]:
    """Milliseconds of the parts and of the whole, and whether the host took about as long to ask for them."""
    clock = timing.StepClock(x.device)
    clock.start()
    if clock.on_gpu:
        variant.whole(x)  # the GPU has work while the host asks for what is timed
    clock.loop()
    began = timing.now()
    variant.run(x, clock.tick)
    variant.whole(x)
    host_ms = 1e3 * (timing.now() - began)
    clock.tick()
    took = clock.stop().step_ms
    return took, clock.on_gpu and host_ms > HOST_SHARE_OF_ONE_CALL * sum(took)


def _times(laps: Sequence[tuple[tuple[float, ...], bool]]) -> Times:
    *parts, whole = [
        Figure(statistics.median(ms), min(ms), max(ms)) for ms in zip(*(ms for ms, _ in laps), strict=True)
    ]
    slow = sum(host_bound for _, host_bound in laps)
    return Times(tuple(parts), whole, len(laps), 2 * slow > len(laps))


# -- conversions on a GPU --------------------------------------------------------------------------------------------


def count_conversions(variant: Variant, x: Tensor) -> tuple[Conversions, ...] | None:
    """What the stages convert in one pass, by torch's profiler; None where it saw no kernel.

    A process that has profiled launches more slowly from then on, so nothing is timed after this.
    """
    from torch.profiler import ProfilerActivity, profile

    variant.whole(x)  # lays the weights of the fused one, once and for all
    s = variant.enter(x)
    timing.synchronise(x.device)
    # acc_events: torch 2.11 warns without it, though there is one cycle only.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _, stage in variant.stages:
            s = stage(s)
        timing.synchronise(x.device)
    return conversions_in(recorded.events())


def conversions_in(events: Any) -> tuple[Conversions, ...] | None:
    """Every kernel belongs to the operator that launched it, which tells what a copy was for."""
    numbers, ms = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    kernels = 0
    for event in events or ():
        for kernel in getattr(event, "kernels", ()):
            kernels += 1
            kind = _kind(kernel.name, partial(_callers, event))
            if kind is not None:
                numbers[kind] += 1
                ms[kind] += kernel.duration / 1e3
    return tuple(Conversions(kind, numbers[kind], ms[kind]) for kind in KINDS) if kernels else None


def _kind(kernel: str, callers: Callable[[], Iterator[str]]) -> str | None:
    """What a kernel converts, or None if it does something else."""
    name = kernel.lower()
    if "nchwtonhwc" in name:
        return KINDS[0]
    if "nhwctonchw" in name:
        return KINDS[1]
    if "copy" not in name:
        return None
    for caller in callers():
        if caller == "aten::_to_copy":  # another dtype, not another layout
            return None
        if "group_norm" in caller:
            return KINDS[2]
        if "conv" in caller:
            return KINDS[3]
    return KINDS[4]


def _callers(event: Any) -> Iterator[str]:
    """The operator and those it was called by, from the inside out."""
    while event is not None:
        yield event.name
        event = getattr(event, "cpu_parent", None)


@contextmanager
def no_tf32() -> Iterator[None]:
    """Inside, cuDNN computes fp32 in fp32; by default it rounds factors to TF32, nearly as coarse as bf16."""
    settings: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precision, settings.fp32_precision = settings.fp32_precision, "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = precision
