"""Form: how a stock module is built, read off one that its class has just made, for telling others apart from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import torch
from torch import nn

from fusedit.runtime.methods import Methods, methods_of

_PLAIN: Final = (type(None), bool, int, float, str)
# What changes no result, what the fused forwards read at each call or have a reason of their own for, and a block's
# number. The sizes of a product are those of its weight: a FLUX Control LoRA widens one, pruning narrows some.
_FREE: Final = frozenset({"in_features", "out_features", "gradient_checkpointing", "fused_projections", "layer_id"})
STANDARD: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
# What fuse_qkv_projections() adds and unfuse_qkv_projections() may leave.
FREE_CHILDREN: Final = frozenset({"to_qkv", "to_kv", "to_added_qkv"})
# What is set on one module to run around its forward; its own methods are the other names that would shadow its class.
_WRAPPING: Final = frozenset({"forward", "_call_impl", "_hf_hook", "_diffusers_hook"})


def plain(value: Any) -> bool:
    """Whether a setting can be compared by its value."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(plain, value)))


@dataclass(frozen=True, slots=True)
class Form:
    """One module and what is in it, by role; it keeps no module and no weight.

    Attributes:
        kind: its class.
        settings: its plain attributes.
        read: takes the values of the settings out of a module's `__dict__`; None where it has none.
        values: what `read` gives for this form.
        parameters: names of the parameters it has.
        children: the form of each inner module.
        each: in a list of blocks that are built alike: the form of every one of them, however many there are.
        shadows: names that, set on the module itself, stand for methods of its class or run around its forward.
        processor: class of its attention processor, if it has one.
        methods: of the whole, the methods of all its classes; None for what is in it.
    """

    kind: type[nn.Module]
    settings: dict[str, Any]
    read: Callable[[dict[str, Any]], Any] | None
    values: Any
    parameters: frozenset[str]
    children: dict[str, Form]
    each: Form | None
    shadows: frozenset[str]
    processor: type | None
    methods: Methods | None = None

    @classmethod
    def of(cls, module: nn.Module, blocks: frozenset[str] = frozenset()) -> Form:
        """The form of this module; `blocks` names the lists in it whose entries are built alike."""
        space = module.__dict__
        free = STANDARD | _FREE | ({"p"} if type(module) is nn.Dropout else set())
        settings = {
            key: value for key, value in space.items() if key not in free and not key.startswith("_") and plain(value)
        }
        read: Callable[[dict[str, Any]], Any] | None = itemgetter(*settings) if settings else None
        children = {name: cls.of(child) for name, child in module._modules.items() if child is not None}
        for name in blocks & children.keys():
            children[name] = replace(children[name], children={}, each=children[name].children["0"])
        return cls(
            type(module),
            settings,
            read,
            None if read is None else read(space),
            frozenset(name for name, parameter in space["_parameters"].items() if parameter is not None),
            children,
            None,
            _WRAPPING.union(name for name in methods_of(type(module)) if not name.startswith("__")) - space.keys(),
            type(space["processor"]) if "processor" in space else None,
        )

    def kinds(self) -> set[type]:
        """The classes of the module, of what is in it, and of attention processors."""
        inner = (*self.children.values(), *(() if self.each is None else (self.each,)))
        own: set[type] = {self.kind} if self.processor is None else {self.kind, self.processor}
        return own.union(*(form.kinds() for form in inner))


_MADE: Final[dict[tuple[type[nn.Module], str], Form]] = {}


def form_of(stock: type[nn.Module], arguments: dict[str, Any], blocks: tuple[str, ...]) -> Form:
    """The form of what `stock(**arguments)` makes, built without memory for weights, once for these arguments.

    Settings of the whole are left out: what stock's own forward reads of itself, the fused forward reads at each call.
    So are hooks, which run around the fused forward as they do around stock's. A form made while a method of its
    classes is replaced is not kept: which other methods a call may run was read off that one.
    """
    key = stock, repr(sorted(arguments.items()))
    if key in _MADE:
        return _MADE[key]
    with torch.device("meta"):
        form = Form.of(stock(**arguments), frozenset(blocks))
    methods = Methods(form.kinds())
    form = replace(form, settings={}, read=None, values=None, shadows=form.shadows - _WRAPPING, methods=methods)
    if methods.reason() is None:
        _MADE[key] = form
    return form
