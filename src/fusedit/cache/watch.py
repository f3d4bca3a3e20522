"""examine(): everything but its arguments that decides what a text encoder gives, or why that cannot be watched.

Cheap facts first: which module, its parameters by identity and `_version`, dtypes and shapes, every plain attribute of
every inner module (adapters, their scales and merges are such attributes), its config, torch's own switches. The
content of the weights, which costs one pass over them, is read only when all of those agree.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from fusedit.cache.checksum import checksums
from fusedit.runtime.form import STANDARD
from fusedit.runtime.inspect_module import compiled_by, global_reason, quantised_by

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
# Classes of torch that do the same in training mode: peft leaves it on in the layers it adds to a model in eval mode.
_ALWAYS_SAME: Final = frozenset(
    {nn.Linear, nn.Embedding, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList}
)
# What hooks put beside what every module has; both are looked at by name below.
_WRAPPING: Final = frozenset({"forward", "_old_forward", "_hf_hook", "_diffusers_hook"})
_SKIPPED: Final = _WRAPPING | {"_output_capturing_hooks_installed"}  # a mark that transformers sets in the first call


@dataclass(frozen=True)
class State:
    """What an encoder was at one moment.

    Attributes:
        facts: equal facts mean that nothing but the weights' content can have changed. Holds no weight alive.
        registered: parameters and buffers, all on one device.
        stray: tensors that modules keep as plain attributes, which do not follow `.to()`.
    """

    facts: tuple[Any, ...]
    registered: tuple[torch.Tensor, ...] = field(compare=False, repr=False)
    stray: tuple[torch.Tensor, ...] = field(compare=False, repr=False)

    def content(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Checksums of all weights; see fusedit.cache.checksum."""
        return checksums(self.registered), checksums([t.detach().cpu() for t in self.stray])


class _Unwatchable(Exception):
    """Carries the reason out of the walk; never leaves this file."""


def examine(name: str, encoder: nn.Module, known: tuple[Any, ...] | None = None) -> State | str:
    """The state of an encoder, or the reason why its results cannot be kept.

    It runs at every use, so it reads attribute dictionaries only.

    Args:
        name: the encoder's name in the pipeline, for reasons.
        encoder: the module.
        known: facts that were found watchable before; where they still hold, less has to be looked at.
    """
    if torch.is_grad_enabled():
        return "gradients are on (call under torch.no_grad)"
    hooked = global_reason()
    if hooked is not None:
        return hooked
    try:
        state = _Walk(name, encoder).state()
    except _Unwatchable as reason:
        return str(reason)
    if known is not None and state.facts == known:
        return replace(state, facts=known)  # the very same object: comparing it again costs next to nothing
    quantiser, compiled = quantised_by(encoder), compiled_by(encoder)
    if quantiser is not None:
        return f"{name} is quantised ({quantiser})"
    if compiled is not None:
        return f"{name} is compiled ({compiled})"
    return state


class _Walk:
    """One pass over the modules of an encoder, which collects what its State consists of."""

    def __init__(self, name: str, encoder: nn.Module) -> None:
        self.name = name
        self.encoder = encoder
        self.refs = _Refs()
        self.facts: list[Any] = [self.refs, self._identity(encoder), *_torch_settings()]
        self.registered: list[torch.Tensor] = []
        self.stray: list[torch.Tensor] = []
        self.configs: set[int] = set()

    def state(self) -> State:
        modules, places = [self.encoder], {id(self.encoder): 0}
        for module in modules:
            self._module(module)
            for name, child in module._modules.items():
                if child is not None:
                    if id(child) not in places:
                        places[id(child)] = len(modules)
                        modules.append(child)
                    self.facts += name, places[id(child)]
        self.facts.append(self._device())
        return State(tuple(self.facts), tuple(self.registered), tuple(self.stray))

    def _module(self, module: nn.Module) -> None:
        space, kind, facts = module.__dict__, type(module), self.facts
        if space["training"] and kind not in _ALWAYS_SAME and kind.__module__.partition(".")[0] != "peft":
            raise _Unwatchable(f"{self.name} is in training mode")
        if space["_forward_hooks"] or space["_forward_pre_hooks"]:
            self._hooks(space)
        own = space.keys() - STANDARD
        if not own.isdisjoint(_WRAPPING):
            self._wrapping(module, space)
        facts += kind, kind.forward
        for key in own:
            if key not in _SKIPPED:
                value = space[key]
                facts += key, value if type(value) in _ATOMS else self._plain(key, value)
        for key, tensor in space["_parameters"].items():
            if tensor is not None:
                # By identity only here: moving a module (offload) keeps its parameters and replaces its buffers.
                self._tensor(tensor, nn.Parameter)
                facts += key, self._identity(tensor), tensor._version, tensor.shape, tensor.dtype
                self.registered.append(tensor)
        for key, tensor in space["_buffers"].items():
            if tensor is not None:
                facts += key, self._tensor(tensor, torch.Tensor).shape, tensor.dtype
                self.registered.append(tensor)

    def _hooks(self, space: dict[str, Any]) -> None:
        for hook in (*space["_forward_hooks"].values(), *space["_forward_pre_hooks"].values()):
            if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":  # collects hidden_states
                raise _Unwatchable(f"{self.name} has a forward hook")

    def _wrapping(self, module: nn.Module, space: dict[str, Any]) -> None:
        hook = space.get("_hf_hook")
        if hook is not None and (module is not self.encoder or type(hook).__name__ != "CpuOffload"):
            raise _Unwatchable(f"{self.name} has an accelerate hook other than model CPU offload")
        if getattr(space.get("_diffusers_hook"), "hooks", None):
            raise _Unwatchable(f"{self.name} has a diffusers hook (group offload, layerwise casting)")
        forward = space.get("forward")
        if forward is None or _is_stock(forward, module):
            return
        wrapped = hook is not None and isinstance(forward, functools.partial)
        if not (wrapped and _is_stock(space.get("_old_forward"), module)):
            raise _Unwatchable(f"the forward of {self.name} was replaced")

    def _identity(self, value: Any) -> int:
        """A number that no other object has for as long as these facts are kept, without keeping `value`.

        An object has one plain weak reference, which is kept: comparing numbers is what makes facts cheap to compare.
        """
        reference = weakref.ref(value)
        self.refs.append(reference)
        return id(reference)

    def _tensor(self, t: torch.Tensor, kind: type) -> torch.Tensor:
        if type(t) is not kind or t.layout is not torch.strided:
            raise _Unwatchable(f"{self.name} has a weight of class {type(t).__name__} and layout {t.layout}")
        if t.is_inference():
            raise _Unwatchable(f"{self.name} was loaded under inference_mode")
        return t

    def _plain(self, key: str, value: Any) -> Any:
        """A value that compares by content, or by identity where it has none that could be compared."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in (list, tuple):
            return kind, *(self._plain("", item) for item in value)
        if kind in (dict, OrderedDict):
            return kind, *((name, self._plain("", item)) for name, item in value.items())
        if kind in (set, frozenset):
            return kind, frozenset(self._plain("", item) for item in value)
        # issubclass: isinstance asks a config for its __class__, which transformers answers in 10 us.
        if issubclass(kind, torch.Tensor) and key:
            self.stray.append(value)
            return value.shape, value.dtype
        if issubclass(kind, nn.Module | torch.Tensor):
            raise _Unwatchable(f"{self.name} keeps a {kind.__name__} outside its modules and buffers")
        if key == "config" and id(value) not in self.configs:
            self.configs.add(id(value))
            return self._plain("", getattr(value, "__dict__", None))
        if issubclass(kind, np.generic):  # a LoRA scale out of np.linspace, say
            return kind, value.tobytes()
        try:
            return weakref.ref, self._identity(value)
        except TypeError:
            return _Same(value)

    def _device(self) -> torch.device:
        """Where the encoder computes."""
        places = {t.device for t in self.registered}
        if len(places) != 1 or "meta" in {place.type for place in places}:
            raise _Unwatchable(f"the weights of {self.name} are not in one place")
        hook: Any = self.encoder.__dict__.get("_hf_hook")
        device = places.pop() if hook is None else torch.device(hook.execution_device)
        if torch.is_autocast_enabled(device.type):
            raise _Unwatchable("autocast is on")
        return device


class _Refs(list[Any]):
    """Weak references that belong to facts, which compare their numbers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Refs)

    __hash__ = None


class _Same:
    """Equal to what holds the very same object; for one that cannot be held weakly."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_stock(value: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward


def _torch_settings() -> tuple[Any, ...]:
    """The process-wide switches that decide how products and attention are computed."""
    backends: Any = torch.backends
    cuda, products = backends.cuda, backends.cuda.matmul
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        products.fp32_precision,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        backends.mkldnn.matmul.fp32_precision,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
