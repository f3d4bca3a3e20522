"""What a pipeline's own `encode_prompt` is run with: the pipeline, but for its text encoders, which remember.

`encode_prompt` itself always runs, stock: tokenising, templates, warnings, LoRA scales, repeating for several pictures.
Only a run of an encoder is replaced, by what the very same run gave before; anything read from its output that was not
kept runs the encoder after all. So nothing has to be known about what a pipeline's `encode_prompt` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from fusedit.cache.store import Entry, Path, Store
from fusedit.cache.watch import examine


@dataclass
class Run:
    """What happened in one call of encode_prompt."""

    store: Store
    computed: bool = False
    reused: bool = False
    reasons: set[str] = field(default_factory=set)

    def encode(self, name: str, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`encoder(*args, **kwargs)`, or what it gave before."""

        def compute() -> Any:
            self.computed = True
            return encoder(*args, **kwargs)

        state = examine(name, encoder, self.store.facts(name))
        key = None if isinstance(state, str) else _key((args, kwargs))
        if isinstance(state, str) or key is None:
            self.reasons.add(state if isinstance(state, str) else f"{name} got an argument that cannot be compared")
            return compute()
        entry = self.store.find(name, key, state)
        if entry is not None:
            self.reused = True
            return _read(_Result(compute), entry, ())
        result = _Result(compute)
        result.at(())
        after = examine(name, encoder, state.facts)  # read here, where offload has the weights on the GPU
        if isinstance(after, str) or after.facts != state.facts:
            self.reasons.add(f"running {name} changed it")
            return result.at(())
        return _read(result, self.store.add(name, key, after), ())


class PipelineView:
    """The `self` of a stock encode_prompt: reads and writes the pipeline; its text encoders are EncoderViews."""

    __slots__ = ("_fusedit_pipe", "_fusedit_run")

    def __init__(self, pipe: Any, run: Run) -> None:
        object.__setattr__(self, "_fusedit_pipe", pipe)
        object.__setattr__(self, "_fusedit_run", run)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # stock asks isinstance(self, FluxLoraLoaderMixin)
        return type(self._fusedit_pipe)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fusedit_pipe, name)
        if name.startswith("text_encoder") and value is not None:
            if isinstance(value, nn.Module):
                return EncoderView(name, value, self._fusedit_run)
            self._fusedit_run.reasons.add(f"{name} is no torch module")
        if isinstance(value, MethodType) and value.__self__ is self._fusedit_pipe:
            return MethodType(value.__func__, self)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fusedit_pipe, name, value)


class EncoderView:
    """A text encoder in every respect, except that calling it may give what the same call gave before."""

    __slots__ = ("_fusedit_module", "_fusedit_name", "_fusedit_run")

    def __init__(self, name: str, module: nn.Module, run: Run) -> None:
        object.__setattr__(self, "_fusedit_name", name)
        object.__setattr__(self, "_fusedit_module", module)
        object.__setattr__(self, "_fusedit_run", run)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._fusedit_module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fusedit_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fusedit_module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fusedit_run.encode(self._fusedit_name, self._fusedit_module, args, kwargs)


class _Result:
    """The output of one run, computed when something is read from it that is not kept."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    def at(self, path: Path) -> Any:
        if self._compute is not None:
            self._value, self._compute = self._compute(), None
        value = self._value
        for kind, step in path:
            value = getattr(value, str(step)) if kind == "attribute" else value[step]
        return value


class Output:
    """Stands for a ModelOutput, or a tuple inside one; what is read from it and is a tensor is kept."""

    __slots__ = ("_fusedit_entry", "_fusedit_path", "_fusedit_result")

    def __init__(self, result: _Result, entry: Entry, path: Path) -> None:
        self._fusedit_result = result
        self._fusedit_entry = entry
        self._fusedit_path = path

    def __getattr__(self, name: str) -> Any:
        return self._fusedit_read("attribute", name)

    def __getitem__(self, index: Any) -> Any:
        if type(index) not in (int, str):
            return self._fusedit_result.at(self._fusedit_path)[index]
        return self._fusedit_read("item", index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fusedit_result.at(self._fusedit_path))

    def __len__(self) -> int:
        return len(self._fusedit_result.at(self._fusedit_path))

    def _fusedit_read(self, kind: str, step: int | str) -> Any:
        return _read(self._fusedit_result, self._fusedit_entry, (*self._fusedit_path, (kind, step)))


def _read(result: _Result, entry: Entry, path: Path) -> Any:
    if path in entry.values:
        kept = entry.values[path]
        return Output(result, entry, path) if kept is None else kept.clone()  # a copy: callers may edit what they get
    value = result.at(path)
    if type(value) is torch.Tensor:
        entry.keep(path, value)
        return value
    if isinstance(value, tuple | list | dict):  # a ModelOutput is a dict
        entry.values[path] = None
        return Output(result, entry, path)
    return value


def _key(value: Any) -> Hashable | None:
    """Arguments as a value that compares by content, token ids bit for bit; None where one cannot be compared."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type != "meta":
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, value.shape, value.device, bits
    if isinstance(value, dict):
        inner = _key(list(value.values()))
        return None if inner is None else (dict, tuple(value), inner)
    if isinstance(value, list | tuple):
        items = tuple(map(_key, value))
        return None if None in items else (type(value), items)
    return None
