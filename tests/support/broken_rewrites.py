"""accelerate() with rewrites that spoil the picture on purpose, to test what finds them.

Each rewrite is a function of (step, output of the transformer); it acts on the twin pipeline's own calls only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from fusedit.plan import Plan
from fusedit.report import Refusal, Report, SiteReport

Effect = Callable[[int, torch.Tensor], torch.Tensor]


def scaled(by: float) -> Effect:
    return lambda _step, output: output * by


def nan_from(first: int) -> Effect:
    return lambda step, output: output * float("nan") if step >= first else output


class Rewrites:
    """What the stub lays on a pipeline; `effects` are the rewrites by name."""

    effects: ClassVar[dict[str, Effect]] = {}
    made: ClassVar[list[StubHandle]] = []


class StubHandle:
    def __init__(self, pipe: Any, plan: Plan) -> None:
        self.plan = plan
        self.pipe = pipe
        self.on = [name for name in Rewrites.effects if plan.enabled(name)]
        self.counts = dict.fromkeys(self.on, 0)
        self.resting = False
        self.active = True
        self.step = 0
        self.hook = pipe.transformer.register_forward_hook(self._spoil)
        self.loop = pipe.scheduler.set_begin_index
        vars(pipe.scheduler)["set_begin_index"] = self._begin

    def _begin(self, index: int = 0) -> None:
        self.step = 0
        self.loop(index)

    def _spoil(self, _module: Any, _args: Any, output: Any) -> Any:
        step, self.step = self.step, self.step + 1
        if self.resting:
            return output
        values = output[0]
        for name in self.on:
            self.counts[name] += 1
            change = Rewrites.effects[name]
            is_list = isinstance(values, list)
            values = [change(step, item) for item in values] if is_list else change(step, values)
        return (values, *output[1:])

    def report(self) -> Report:
        sites = tuple(SiteReport(name, "reordered", "a stub", self.counts[name], 0) for name in self.on)
        refused = tuple(Refusal(name, "switched off by the plan") for name in Rewrites.effects if name not in self.on)
        return Report(type(self.pipe).__name__, self.plan.to_dict(), sites, refused, (), self.active)

    def restore(self) -> None:
        self.hook.remove()
        vars(self.pipe.scheduler).pop("set_begin_index", None)
        self.active = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.resting = True
        try:
            yield
        finally:
            self.resting = False


def install(monkeypatch: pytest.MonkeyPatch) -> type[Rewrites]:
    handles: dict[int, StubHandle] = {}

    def accelerate(pipe: Any, plan: Any = "exact", **_: Any) -> StubHandle:
        before = handles.get(id(pipe))
        if before is not None and before.active:
            before.restore()
        handles[id(pipe)] = StubHandle(pipe, Plan.of(plan))
        Rewrites.made.append(handles[id(pipe)])
        return handles[id(pipe)]

    stub = ModuleType("fusedit.pipeline")
    vars(stub)["accelerate"] = accelerate
    monkeypatch.setitem(sys.modules, "fusedit.pipeline", stub)
    monkeypatch.setattr(Rewrites, "effects", {"stub.gentle": scaled(1 + 1e-6), "stub.other": scaled(1.0)})
    monkeypatch.setattr(Rewrites, "made", [])
    return Rewrites
