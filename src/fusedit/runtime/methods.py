"""Methods: whether the methods of a module's classes are still those that the classes were written with.

A fused forward stands for what stock's classes do. Where somebody has given one of them another `forward`, as step
caches and tracers do, stock runs it and the fused forward would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Final

from torch import nn

# Where classes begin whose methods (moving, loading, saving) are no arithmetic of a model.
_BASES: Final = ("builtins.object", "torch.nn.modules.module.Module", "diffusers.models.modeling_utils.ModelMixin")

_COMPILED: Final = "_compiled_call_impl"
"""What `__call__` of a module runs instead, where it is not None: no class has one."""


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions in what stands for a method, from the outermost decorator in."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    while isinstance(value, FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def described(value: Any) -> str:
    """What stands for a method, in words: whose function, where it has one that is not torch's or diffusers'."""
    modules = [str(function.__globals__["__name__"]) for function in _functions(value)]
    if not modules:
        return f"a {type(value).__name__}"
    others = [module for module in modules if module.partition(".")[0] not in ("torch", "diffusers")]
    return f"a function of {(others or modules)[0]}"


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that this code, or a function inside it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _find(kind: type, name: str) -> tuple[type | None, Any]:
    """The class that `kind` has this attribute from, and the attribute as it stands there."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner, None if owner is None else vars(owner)[name]


def methods_of(kind: type) -> list[str]:
    """What a call of a module (or attention processor) of this class may run of its methods, and how torch calls it.

    No others: they are no arithmetic, and libraries do replace some (`Linear.reset_parameters`) or add their own.
    """
    own = {
        name
        for base in takewhile(lambda base: f"{base.__module__}.{base.__name__}" not in _BASES, kind.__mro__)
        for name, value in vars(base).items()
        if any(_functions(value)) or (callable(value) and not isinstance(value, type))
    }
    names = ["__call__", *own & {"forward"}, *(("_call_impl",) if issubclass(kind, nn.Module) else ())]
    for name in names:  # it grows by what each of them calls
        for function in _functions(_find(kind, name)[1]):
            names += sorted(own.intersection(_names_in(function.__code__)).difference(names))
    return names


def _written_there(kind: type, name: str) -> bool:
    """Whether a method is the one that its class was written with.

    The outermost function tells where it was written: `functools.wraps` copies names, not globals.
    """
    owner, value = _find(kind, name)
    for function in _functions(value):
        where = function.__globals__["__name__"]
        if owner is not None and where == owner.__module__:
            return function.__qualname__.rpartition(".")[0] == owner.__qualname__
        if not where.startswith("diffusers.utils."):  # the home of its decorators
            return False
    return False


def replaced_method(kind: type, names: list[str] | None = None) -> str | None:
    """Words for the first method of this class (of all that a call may run) that it was not written with, or None."""
    for name in methods_of(kind) if names is None else names:
        if not _written_there(kind, name):
            return _words(kind, name)
    return None if getattr(kind, _COMPILED, None) is None else _words(kind, _COMPILED)


def _words(kind: type, name: str) -> str:
    """What stands in the place of a method that was replaced."""
    owner, value = _find(kind, name)
    if owner is None or (owner is nn.Module and name == "forward"):  # what a module without one has
        return f"{kind.__name__}.{name} was taken away"
    return f"{owner.__name__}.{name} was replaced by {described(value)}"


class Methods:
    """The methods that a call of one module may run, its class's and those of what is in it.

    The first look tells by where each was written. One that finds them all in place keeps them, and later ones only
    compare, with one call out of Python: 3 us for the 23 classes of FLUX.
    """

    def __init__(self, kinds: set[type]) -> None:
        # Module first: where torch's own call is replaced, that of every class is, and Module is the one to name.
        ordered = sorted(kinds - {nn.Module}, key=lambda kind: (kind.__module__, kind.__qualname__))
        self._kinds = (nn.Module, *ordered)
        self._watched: list[tuple[type, str]] = []
        self._found: tuple[Any, ...] = ()
        self._read: Callable[[], tuple[Any, ...]] | None = None

    def reason(self) -> str | None:
        """Words for the first method that was replaced, or None."""
        if self._read is None:
            return self._first_look()
        try:
            if self._read() == self._found:
                return None
        except AttributeError:  # taken away
            pass
        pairs = zip(self._watched, self._found, strict=True)
        return next((_words(kind, name) for (kind, name), found in pairs if getattr(kind, name, None) != found), None)

    def _first_look(self) -> str | None:
        watched = []
        for kind in self._kinds:
            names = methods_of(kind)
            reason = replaced_method(kind, names)
            if reason is not None:
                return reason
            watched += [(kind, name) for name in names]
            if hasattr(kind, _COMPILED):  # a module, not an attention processor
                watched.append((kind, _COMPILED))
        holder = SimpleNamespace(**{f"kind{i}": kind for i, kind in enumerate(self._kinds)})
        read = attrgetter(*(f"kind{self._kinds.index(kind)}.{name}" for kind, name in watched))
        self._watched, self._found, self._read = watched, read(holder), lambda: read(holder)
        return None
