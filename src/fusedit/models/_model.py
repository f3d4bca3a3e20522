"""What a file of models/ provides: one class that knows its stock class and calls ops, never kernels."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch
from torch import nn

from fusedit.float8.rows import Rows
from fusedit.models._bounds import Bounds
from fusedit.models._modulation import Modulation
from fusedit.models._precision import Precision
from fusedit.ops._op import Op
from fusedit.plan import TIERS, Plan
from fusedit.report import CacheReport
from fusedit.runtime.counters import Counters
from fusedit.runtime.form import Form, form_of
from fusedit.runtime.graphs import HOST_SHARE_OF_ONE_CALL, StepGraphs
from fusedit.runtime.hoist import RunCache
from fusedit.runtime.look import Looks
from fusedit.runtime.terms import Terms

T = TypeVar("T")
NO_RUN: Final = "no run: called outside the pipeline or before set_timesteps(), or inputs that cannot be watched"


def from_config(module: Any, **changes: Any) -> dict[str, Any]:
    """The arguments that a module with a config was made with, with these changes."""
    known = inspect.signature(type(module).__init__).parameters
    return {key: value for key, value in module.config.items() if key in known} | changes


@dataclass(frozen=True)
class Rewrite:
    """A site, or an algorithmic change, that a plan switches on and off by name.

    Attributes:
        name: `<model>.<site>`, unique over all models.
        exactness: `bitwise`, `reordered` or `lossy`.
        summary: what it replaces, in one line.
        tier: the first tier that has it.
        default: whether that tier switches it on where a plan does not name it.
        replaces: name of the rewrite that it stands for where it is on.
    """

    name: str
    exactness: str
    summary: str
    tier: str = "exact"
    default: bool = True
    replaces: str = ""

    def on(self, plan: Plan) -> bool:
        """Whether this plan switches it on."""
        return plan.enabled(self.name, self.tier, self.default)


class Followed(Generic[T]):
    """What a model keeps for each block of its module, which may be replaced at any time.

    Args:
        make: a block -> what is kept for it.
        let_go: called with what was kept for a block that is gone.
    """

    def __init__(self, make: Callable[[Any], T], let_go: Callable[[T], None]) -> None:
        self._make, self._let_go = make, let_go
        self._kept: list[tuple[Any, T]] = []

    def __call__(self, blocks: Iterable[Any]) -> list[T]:
        """What is kept for each of these blocks, in their order."""
        blocks = list(blocks)
        if len(blocks) != len(self._kept) or any(a is not b for a, (b, _) in zip(blocks, self._kept, strict=True)):
            before = {id(block): value for block, value in self._kept}
            self._kept = [(b, before.pop(id(b)) if id(b) in before else self._make(b)) for b in blocks]
            for value in before.values():
                self._let_go(value)
        return self.values()

    def values(self) -> list[T]:
        return [value for _, value in self._kept]


class FusedModel(ABC):
    """The fused forward of one stock class, for one module under one plan.

    A subclass is the whole of a file of models/: it declares the class attributes below, takes the arguments of the
    stock `forward` unchanged and returns what it returns. It never owns parameters: it reads the stock modules at each
    call, so that LoRA injection, `.to()` and state_dict keep working.
    """

    stock: ClassVar[str]
    """The stock class as `module.path:ClassName`."""
    path: ClassVar[tuple[str, ...]]
    """Where it sits in a pipeline, for example `("vae", "decoder")`."""
    denoiser: ClassVar[bool]
    """True for a transformer: a pipeline whose denoiser is not served is unsupported."""
    pipelines: ClassVar[tuple[str, ...]]
    """Pipeline classes it is tested in, for messages and `fusedit models`."""
    signature: ClassVar[tuple[str, ...]]
    """Parameter names of the stock `forward` this was written against, without self."""
    known: ClassVar[frozenset[str]]
    """Class names of the inner modules the fused forward knows; any other (besides LoRA layers) means stock."""
    blocks: ClassVar[tuple[str, ...]] = ()
    """Lists of the module whose entries are built alike and may be replaced, reordered, fewer or more."""
    rewrites: ClassVar[tuple[Rewrite, ...]]
    precisions: ClassVar[tuple[Precision, ...]] = ()
    """What the fp8 tier does with which linear layers; any that no pattern matches stays as it is."""
    rounding: ClassVar[str] = ""
    """The rewrite that rounds codes for what their layers read."""
    notes: ClassVar[tuple[str, ...]] = ()
    """Facts about what stays stock, for the report."""
    overflows: ClassVar[bool] = False
    """Whether float16 overflows it, so that `run_stock` widens, also where the module was refused."""

    def __init__(self, module: nn.Module, plan: Plan, counters: Counters) -> None:
        self.module = module
        self.plan = plan
        self.counters = counters
        self.cache = RunCache()
        enabled = plan.cache["graphs"]
        if self.denoiser:
            self.graphs = StepGraphs(counters, enabled=enabled)
        else:
            name = f"{'.'.join(self.path)} graphs"
            self.graphs = StepGraphs(counters, enabled=enabled, name=name, host_share=HOST_SHARE_OF_ONE_CALL)
        self.looks = Looks()
        self.terms = Terms(self.cache)
        self.modulation = Modulation(self.cache, counters, self.terms)
        self.limits: tuple[Bounds, ...] = ()
        self._ready: set[tuple[torch.device, torch.dtype]] = set()

    def make_ready(self, x: torch.Tensor) -> None:
        """Launch `rare(x)` once a device and dtype, so that a later LoRA, ControlNet or size compiles nothing."""
        if x.is_cuda and (x.device, x.dtype) not in self._ready and not torch.cuda.is_current_stream_capturing():
            self._ready.add((x.device, x.dtype))
            self.rare(x)

    def rare(self, x: torch.Tensor) -> None:  # noqa: B027 - most models have none
        """Run what only some calls need, on little data with x's device and dtype."""

    def forget(self) -> None:
        """Let go of everything kept between calls."""
        self.cache.clear()
        self.graphs.clear()
        self.terms.clear()
        for bounds in self.limits:
            bounds.clear()

    def cache_reports(self) -> tuple[CacheReport, ...]:
        """What the caches of this model did, for those that were asked at all."""
        reports = (self.modulation.report(), self.graphs.report(), self.terms.report())
        return tuple(report for report in reports if report.hits or report.misses or report.reasons)

    @classmethod
    def stock_class(cls) -> type[nn.Module]:
        module, _, name = cls.stock.partition(":")
        stock: type[nn.Module] = getattr(import_module(module), name)
        return stock

    @classmethod
    def signature_now(cls) -> tuple[str, ...]:
        """Parameter names of the installed diffusers' forward; compared with `signature` before anything is changed."""
        return tuple(inspect.signature(cls.stock_class().forward).parameters)[1:]

    @classmethod
    @abstractmethod
    def arguments(cls, module: nn.Module) -> dict[str, Any]:
        """What the stock class takes to make a module like this one, with one block in each list of `blocks`."""

    @classmethod
    def form_of(cls, module: nn.Module) -> Form:
        """How the stock class builds a module of this config; the fused forward was written for nothing else."""
        return form_of(cls.stock_class(), cls.arguments(module), cls.blocks)

    @classmethod
    def typical(cls, module: nn.Module) -> torch.Tensor | None:  # noqa: ARG003
        """What the layers with e4m3 weights alone read, [n, K] samples of it, where that is known without a picture."""
        return None

    @classmethod
    @abstractmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Why this module (its config) cannot be served, or None."""

    @abstractmethod
    def needs_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why this call must go through the stock forward, or None. Cheap: it runs before every call."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The fused forward. The caller holds torch.no_grad or the inputs need no gradient."""

    def run_stock(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stock forward in place of the fused one, for a reason that was counted."""
        return stock(*args, **kwargs)

    def unpack(self) -> None:  # noqa: B027 - most models pack something, but none has to
        """Give packed parameters their own storage again; runs when the last pipeline lets go of the module."""

    @staticmethod
    @abstractmethod
    def tiny(**changes: Any) -> nn.Module:
        """A stock module with a tiny config and random weights, for tests; `changes` override config values."""

    def site(self, rewrite: str, op: Op[..., Any]) -> Callable[..., Any]:
        """The op behind a rewrite: counted when the plan has it on, plain torch when it is off."""
        if not self.plan.enabled(rewrite):
            return op.unchecked
        counters = self.counters

        def run(*args: Any, **kwargs: Any) -> Any:
            counters.ran(rewrite)
            return op.direct(*args, **kwargs)

        return run

    def either(self, rewrite: str, dense: Op[..., Any], rows: Op[..., Any]) -> Callable[..., Any]:
        """A norm's site: `out`, or the last of it, says whether it gives dense activations or rows in e4m3."""
        give_dense, give_rows = self.site(rewrite, dense), self.site(rewrite, rows)

        def run(*args: Any, out: Any = None) -> Any:
            if isinstance(out, Rows):
                return give_rows(*args, out=tuple(out))
            if isinstance(out, tuple) and isinstance(out[1], Rows):
                return give_rows(*args, out=(out[0], *out[1]))
            return give_dense(*args, out=out)

        return run

    @classmethod
    def rewrites_of(cls, plan: Plan) -> tuple[Rewrite, ...]:
        """The rewrites that the plan's tier has."""
        known = [rewrite for rewrite in cls.rewrites if TIERS.index(rewrite.tier) <= TIERS.index(plan.base)]
        replaced = {rewrite.replaces for rewrite in known if rewrite.on(plan)}
        return tuple(rewrite for rewrite in known if rewrite.name not in replaced)

    @classmethod
    def rounds(cls, plan: Plan) -> bool:
        """Whether the plan has codes rounded for what their layers read."""
        return bool(cls.rounding) and plan.enabled(cls.rounding, "fp8")

    def hoisted(
        self, rewrite: str, inputs: tuple[torch.Tensor, ...], owner: nn.Module, compute: Callable[[], Any]
    ) -> Any:
        """`compute()`, once a run for these inputs and the parameters of `owner` where the plan allows it."""
        if not self.plan.enabled(rewrite):
            return compute()
        value, hit = self.cache.get(compute, inputs, owner)
        if hit:
            self.counters.ran(rewrite)
        elif hit is None:
            self.counters.fell_back(rewrite, NO_RUN)
        return value
