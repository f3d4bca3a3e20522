"""PromptCache: prompt embeddings of one pipeline, kept from call to call.

It stands as `encode_prompt` on that pipeline object: outside the encoders' offload hooks, so that a kept result moves
no encoder to the GPU, and on no module that another pipeline may share.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit.cache.store import Store
from fusedit.cache.views import PipelineView, Run
from fusedit.errors import UsageError
from fusedit.report import CacheReport

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_FAMILIES: Final = ("diffusers.pipelines.flux.", "diffusers.pipelines.z_image.")  # whose encode_prompt tests run


class PromptCache:
    """Callable that stands where `encode_prompt` of one pipeline stood.

    It does not keep the pipeline alive. Whoever still holds it after `uninstall` gets stock behaviour.
    """

    __name__ = "encode_prompt"

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self._pipe = weakref.ref(pipe)
        self._store = Store()
        self._hits = 0
        self._misses = 0
        self._reasons: Counter[str] = Counter()
        self._active = False
        self.paused = 0
        self.__doc__ = type(pipe).encode_prompt.__doc__

    @staticmethod
    def refusal(pipe: DiffusionPipeline) -> str | None:
        """Why the prompts of this pipeline cannot be kept, or None."""
        kind = type(pipe)
        if not callable(getattr(kind, "encode_prompt", None)):
            return f"{kind.__name__} has no encode_prompt"
        if not kind.__module__.startswith(_FAMILIES):
            return f"{kind.__module__}.{kind.__name__} is no FLUX or Z-Image pipeline of diffusers"
        found = vars(pipe).get("encode_prompt")
        if found is not None and not (isinstance(found, PromptCache) and found._gone_from(pipe)):
            return "encode_prompt of this pipeline was replaced by something else"
        return None

    def _gone_from(self, pipe: DiffusionPipeline) -> bool:
        """Whether this is only a leftover here: put back after restore(), or brought along from another pipeline."""
        return not self._active or self._pipe() is not pipe

    def install(self) -> None:
        pipe = self._pipe()
        self._active = True
        vars(pipe).update(encode_prompt=self, __getstate__=_StockState(self))

    def installed(self) -> bool:
        """Whether it is still there, itself or inside a wrapper that somebody put over it."""
        pipe = self._pipe()
        return self._active and pipe is not None and "encode_prompt" in vars(pipe)

    def displaced(self) -> bool:
        """Whether somebody took it off, or put a wrapper over it, since `install`."""
        pipe = self._pipe()
        return self._active and pipe is not None and vars(pipe).get("encode_prompt") is not self

    def uninstall(self) -> None:
        """Forget everything and take it off the pipeline; a wrapper that somebody put over it stays, and runs stock."""
        self._active = False
        self._store.clear()
        pipe = self._pipe()
        for name, value in list(vars(pipe).items()) if pipe is not None else ():
            if self.owns(value):
                del vars(pipe)[name]

    def owns(self, value: Any) -> bool:
        """Whether `value` is one of the two attributes that stand on the pipeline."""
        return value is self or (isinstance(value, _StockState) and value.cache is self)

    def report(self) -> CacheReport:
        store = self._store
        return CacheReport(
            "prompts", self._hits, self._misses, len(store), store.capacity, store.bytes, dict(self._reasons)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipe, stock = self._pipe(), self._stock()
        if self.paused or not self._active or torch.compiler.is_compiling():
            return stock(*args, **kwargs)
        # Stock Z-Image writes its template into the list of prompts that it is given.
        args = tuple(map(_own, args))
        kwargs = {name: _own(value) for name, value in kwargs.items()}
        run = Run(self._store)
        try:
            return stock.__func__(PipelineView(pipe, run), *args, **kwargs)
        finally:
            if self._store.trim():
                run.reasons.add("larger than the cache")
            self._misses += run.computed
            self._hits += run.reused and not run.computed
            self._reasons.update(run.reasons)

    def _stock(self) -> MethodType:
        pipe = self._pipe()
        if pipe is None:
            raise UsageError("the pipeline of this encode_prompt is gone; keep the pipeline while you use its methods")
        return MethodType(type(pipe).encode_prompt, pipe)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._stock())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # As a bound method does; in a copy of the pipeline the name finds the stock method.
        return getattr, (self._pipe(), "encode_prompt")


class _StockState:
    """Stands as `__getstate__` on the pipeline: what copies and pickles are made of holds nothing of ours."""

    __slots__ = ("cache",)

    def __init__(self, cache: PromptCache) -> None:
        self.cache = cache

    def __call__(self) -> Any:
        pipe = self.cache._pipe()
        kind: Any = type(pipe)
        state = kind.__getstate__(pipe)
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if not self.cache.owns(value)}


def _own(value: Any) -> Any:
    """A copy of a list of texts; everything else, embeddings above all, as it is."""
    return list(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
