"""Signature: what an op's function takes and gives, for torch.library and for sentences about what it cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_type_hints

import torch

from fusedit.errors import OpError
from fusedit.ops import _check

Tensor = torch.Tensor

_SCHEMA: Final[Mapping[Any, str]] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[Tensor] | None: "Tensor[]?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    str: "str",
}


def _literal(value: Any) -> str:
    """A default as the language of torch.library writes it."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


class Signature:
    """Read once from the function that an op is made of.

    Attributes:
        name: of the op.
        first: name of the first parameter, whose dtype and device the results have.
        outputs: how many results there are.
        kinds: parameter -> its type in the language of torch.library.
        declared: the parameters as torch.library declares them.
    """

    def __init__(self, launch: Callable[..., Any]) -> None:
        hints = get_type_hints(launch)
        whole = inspect.signature(launch)
        parameters = [p for p in whole.parameters.values() if p.name != "out"]
        self.name = launch.__name__
        self.first = parameters[0].name
        self.outputs = 1 if hints["return"] is Tensor else len(hints["return"].__args__)
        self.kinds = {p.name: _SCHEMA[hints[p.name]] for p in parameters}
        given = {p.name: "" if p.default is inspect.Parameter.empty else f"={_literal(p.default)}" for p in parameters}
        self.declared = ", ".join(f"{kind} {name}{given[name]}" for name, kind in self.kinds.items())
        self._takes = ", ".join([name + default for name, default in given.items()] + ["*", "out=None"])
        self._without_out = whole.replace(parameters=parameters)

    def outs(self, out: Any) -> tuple[Any, ...]:
        """`out` as a tuple, whether there are one or several results."""
        if self.outputs == 1:
            return (out,)
        if isinstance(out, tuple) and len(out) == self.outputs:
            return out
        raise OpError(f"{self.name}: out must be a tuple of {self.outputs} tensors, not {_check.show(out)}")

    def name_of(self, t: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The parameter that was given this very tensor; a view of one has none."""
        given = (*zip(self.kinds, args, strict=False), *kwargs.items())
        return next((name for name, value in given if value is t), "an input")

    def judge(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises OpError where an argument is missing, unknown, or of a kind that its parameter does not take.

        Too slow for every call: asked once something has gone wrong.
        """
        try:
            bound = self._without_out.bind(*args, **kwargs)
        except TypeError as error:
            raise OpError(f"{self.name}: {error}; it takes ({self._takes})") from None
        for name, value in bound.arguments.items():
            kind = self.kinds[name]
            if kind.endswith("?"):
                if value is None:
                    continue
                kind = kind[:-1]
            if kind == "Tensor":
                _check.dense(self.name, name, value)
            elif kind == "Tensor[]":
                _check.tensors(self.name, name, value)
                for place, item in enumerate(value):
                    _check.dense(self.name, f"{name}[{place}]", item)
            else:
                _check.kind(self.name, name, value, kind)
