"""Reasons, found on the module itself, why stock has to run: hooks, other inner modules, quantised weights."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import Parameter

from fusedit.runtime.branches import from_peft
from fusedit.runtime.form import FREE_CHILDREN, Form, plain
from fusedit.runtime.methods import described

# Container and leaf classes every fused model knows; a model adds the classes of its own blocks.
_PLAIN: Final = frozenset(
    {
        "Linear",
        "Conv2d",
        "LayerNorm",
        "RMSNorm",
        "GroupNorm",
        "ModuleList",
        "ModuleDict",
        "Sequential",
        "Dropout",
        "SiLU",
        "GELU",
    }
)
_PACKAGES: Final = ("torch", "diffusers")
# What every module has, and every look reads.
_NEEDED: Final = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BYTES: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_HOOKS: Final = frozenset({"_hf_hook", "_diffusers_hook"})
# What comparing settings raises where one is gone, a tensor or an array of several elements, or nothing to compare.
_INCOMPARABLE: Final = (KeyError, RuntimeError, ValueError, TypeError)


def _stock_kind(kind: type) -> type:
    """The class that a layer with e4m3 weights was made of; of any other its own."""
    found: type = kind.__dict__.get("stock_kind", kind)
    return found


def global_reason() -> str | None:
    """Why no module may be bypassed at all, or None: a hook that torch calls around every module's forward, or another
    attention for all."""
    hooks: Any = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "a forward hook for all modules is set"
    if type(functional.scaled_dot_product_attention) is not BuiltinFunctionType:  # as other attention libraries advise
        by = described(functional.scaled_dot_product_attention)
        return f"scaled_dot_product_attention was replaced by {by}"
    return None


class Difference(str):
    """A reason that lies in how the module is built, not in what is attached to it for a while."""

    __slots__ = ()


_GONE: Final = object()
_Stack = list[tuple[str, Any, Form | None]]


def inner_reason(module: nn.Module, known: frozenset[str], form: Form) -> str | None:
    """Why the fused forward may not bypass the inner modules of `module` in this call, or None.

    Runs before every call, so it looks at attribute dictionaries only (about as much as asking each for its class).
    A LoRA layer is called as a module, so of what is inside it only the layer it wraps matters.

    Args:
        module: the module whose forward is fused.
        known: class names of the inner modules that the fused forward knows.
        form: how its stock class builds it. A known class in another role, or with other settings, is a Difference;
            so is a method of a class that was replaced.
    """
    reason = global_reason()
    if reason is not None:
        return reason
    replaced = None if form.methods is None else form.methods.reason()
    if replaced is not None:
        return Difference(replaced)
    return None if _as_stock(module, form) else _first_reason(module, known, form)


def _as_stock(module: nn.Module, form: Form) -> bool:
    """Whether `_first_reason` would surely find none: the same questions, without names, in less time."""
    try:
        return _alike(module, form)
    except KeyError:  # one of _NEEDED is gone
        return False


def _alike(module: nn.Module, form: Form) -> bool:
    stack: list[tuple[Any, Form]] = [(module, form)]
    while stack:
        child, role = stack.pop()
        kind = _stock_kind(type(child))
        space = child.__dict__
        if kind is not role.kind:
            if not from_peft(child) or _wrapped_otherwise("", child, role) is not None:
                return False
            continue
        if not space.keys().isdisjoint(role.shadows):  # this way round it goes through the fewer names
            return False
        if child is not module and (space["_forward_hooks"] or space["_forward_pre_hooks"]):
            return False
        try:
            if role.read is not None and role.read(space) != role.values:
                return False
        except _INCOMPARABLE:
            return False
        if kind is nn.Dropout and _drops(space):
            return False
        count = len(role.parameters)
        for key, parameter in space["_parameters"].items():
            if parameter is not None:
                if type(parameter) is not Parameter or key not in role.parameters:
                    return False
                count -= 1
        if count:
            return False
        inner = space["_modules"]
        if role.each is not None:
            if None in inner.values():
                return False
            stack += [(value, role.each) for value in inner.values()]
        elif inner or role.children:
            count = len(role.children)
            for key, value in inner.items():
                if value is not None and key not in FREE_CHILDREN:
                    expected = role.children.get(key)
                    if expected is None:
                        return False
                    stack.append((value, expected))
                    count -= 1
            if count:
                return False
    return True


def _first_reason(module: nn.Module, known: frozenset[str], form: Form) -> str | None:
    stack: _Stack = []
    space = module.__dict__
    reason = (
        _incomplete("", space)
        or _shadowed("", space, form)
        or _built_otherwise("", space, form)
        or _push(stack, "", module, form)
    )
    while stack and reason is None:
        name, child, role = stack.pop()
        space = child.__dict__
        if role is None or _stock_kind(type(child)) is not role.kind:
            reason = (
                _wrapped_otherwise(name, child, role) if from_peft(child) else _other_class(name, child, role, known)
            )
            continue
        reason = (
            _incomplete(name, space)
            or _attached(name, space)
            or _shadowed(name, space, role)
            or _built_otherwise(name, space, role)
            or ((space["_modules"] or role.children) and _push(stack, name + ".", child, role))
            or None
        )
        if reason is None and role.kind is nn.Dropout and _drops(space):
            reason = f"inner module {name!r} drops values in training mode"
    return reason


def _drops(space: dict[str, Any]) -> bool:
    p = space.get("p")
    return bool(space.get("training", True)) and not (plain(p) and p == 0)


def _incomplete(name: str, space: dict[str, Any]) -> Difference | None:
    gone = next((key for key in _NEEDED if key not in space), None)
    return None if gone is None else Difference(f"{_called(name)} has no {gone}, which every module has")


def _shadowed(name: str, space: dict[str, Any], role: Form) -> str | None:
    """Which method of module `name`, whose `__dict__` is `space`, was replaced on this module alone."""
    for key in space:
        if key in role.shadows and key not in _HOOKS:
            return f"{key} of {_called(name)}, a {_kind(role.kind)}, was replaced by {described(space[key])}"
    return None


def _attached(name: str, space: dict[str, Any]) -> str | None:
    """What was put around the forward of inner module `name`, whose `__dict__` is `space`."""
    if space["_forward_hooks"] or space["_forward_pre_hooks"]:
        return f"inner module {name!r} has a forward hook"
    if "forward" in space or "_hf_hook" in space:
        return f"the forward of inner module {name!r} is wrapped (offload or another hook)"
    if "_diffusers_hook" in space and getattr(space["_diffusers_hook"], "hooks", None):
        return f"inner module {name!r} has a diffusers hook"
    return None


def _built_otherwise(name: str, space: dict[str, Any], form: Form) -> str | None:
    """What differs in the parameters or settings of module `name`, whose `__dict__` is `space`."""
    count = 0
    for key, parameter in space["_parameters"].items():
        if parameter is not None:
            if type(parameter) is not Parameter:
                return f"a weight of inner module {name!r} is a {type(parameter).__name__}"
            if key not in form.parameters:
                return Difference(f"{_called(name)} has a {key}, which its stock model has not")
            count += 1
    if count != len(form.parameters):
        missing = next(key for key in sorted(form.parameters) if space["_parameters"].get(key) is None)
        return Difference(f"{_called(name)} has no {missing}, which its stock model has")
    if form.read is not None:
        try:
            if form.read(space) == form.values:
                return None
        except _INCOMPARABLE:
            pass
        return _other_setting(name, space, form)
    return None


def _other_setting(name: str, space: dict[str, Any], form: Form) -> str | None:
    for key, expected in form.settings.items():
        found = space.get(key, space["_modules"].get(key, space["_parameters"].get(key, _GONE)))
        if found is _GONE:
            return Difference(f"{_called(name)} has no {key}, which its stock model has")
        if not plain(found) or found != expected:
            shown = repr(found) if plain(found) else f"a {type(found).__name__}"
            return Difference(f"{key} of {_called(name)} is {shown}, and {expected!r} in its stock model")
    return None


def _push(stack: _Stack, prefix: str, module: nn.Module, form: Form) -> str | None:
    """Put what is in this module on the stack, each with its role; a reason where something is missing."""
    inner = module.__dict__["_modules"]
    for key, child in inner.items():
        if child is not None and (form.each or key not in FREE_CHILDREN):
            stack.append((prefix + key, child, form.each or form.children.get(key)))
    roles = form.children if form.each is None else dict.fromkeys(inner, form.each)
    for key, role in roles.items():
        if inner.get(key) is None:
            stock = _kind(role.kind)
            return Difference(f"inner module {prefix + key!r} is missing, and a {stock} in its stock model")
    return None


def _wrapped_otherwise(name: str, layer: Any, role: Form | None) -> str | None:
    """The difference of what a LoRA layer wraps from the stock layer in its place."""
    while from_peft(layer) and isinstance(layer.__dict__.get("_modules", {}).get("base_layer"), nn.Module):
        layer = layer._modules["base_layer"]
    incomplete = _incomplete(name, layer.__dict__)
    if incomplete is not None:
        return incomplete
    if role is None or _stock_kind(type(layer)) is not role.kind:
        return _difference_of_class(name, layer, role)
    if role.kind not in (nn.Linear, nn.Conv2d):  # read, not called: what is wrapped around it would be passed by
        return f"inner module {name!r} is wrapped by peft and is no Linear or Conv2d"
    return _built_otherwise(name, layer.__dict__, role)


def _other_class(name: str, module: Any, role: Form | None, known: frozenset[str]) -> str:
    kind = type(module)
    reason = _incomplete(name, module.__dict__) or _attached(name, module.__dict__)
    if reason is not None:
        return reason
    expected = kind.__name__ in known or kind.__name__ in _PLAIN
    if not expected or kind.__module__.partition(".")[0] not in _PACKAGES:
        return f"inner module {name!r} is a {_kind(kind)}, unknown to the fused forward"
    return _difference_of_class(name, module, role)


def _difference_of_class(name: str, module: nn.Module, role: Form | None) -> Difference:
    stock = "which its stock model has not" if role is None else f"and a {_kind(role.kind)} in its stock model"
    return Difference(f"inner module {name!r} is a {_kind(type(module))}, {stock}")


def _called(name: str) -> str:
    return f"inner module {name!r}" if name else "the module"


def _kind(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def quantised_by(module: nn.Module) -> str | None:
    """Name of the library that quantised this module, or None."""
    # Not getattr(module, ...): diffusers warns when a config entry is read as an attribute of the module.
    config = module.__dict__.get("quantization_config") or getattr(
        getattr(module, "config", None), "quantization_config", None
    )
    method = getattr(config, "quant_method", None) if not isinstance(config, dict) else config.get("quant_method")
    if method not in (None, "fusedit"):  # our own conversion, whose layers the fused forward knows
        return str(getattr(method, "value", method))
    if getattr(module, "is_loaded_in_4bit", False) or getattr(module, "is_loaded_in_8bit", False):
        return "bitsandbytes"
    for parameter in module.parameters():
        for kind in (type(parameter), type(parameter.data)):
            library = kind.__module__.partition(".")[0]
            if kind.__name__ == "GGUFParameter":
                return "gguf"
            if library not in ("torch", "builtins"):
                return str(library)
    for child in module.modules():
        library = type(child).__module__.partition(".")[0]
        if library in ("bitsandbytes", "torchao", "optimum"):
            return str(library)
        if type(child).__name__ == "GGUFLinear":
            return "gguf"
    for child in module.modules():  # our own layers have stock's class to their name
        if "stock_kind" not in type(child).__dict__ and any(p.dtype in _BYTES for p in child.parameters(recurse=False)):
            return "8-bit storage"
    return None


def compiled_by(module: nn.Module) -> str | None:
    """How this module, or one inside it, was compiled, or None."""
    for child in module.modules():
        if hasattr(child, "_orig_mod"):
            return "torch.compile(module)"
        if getattr(child, "_compiled_call_impl", None) is not None:
            return "module.compile()" if child is module else "compile_repeated_blocks() or an inner module's compile()"
    return None


def offload_hook(module: nn.Module) -> bool:
    """Whether an offload hook moves this module's weights between calls."""
    hook: Any = module.__dict__.get("_hf_hook")
    if hook is not None:
        return True
    registry = module.__dict__.get("_diffusers_hook")
    return bool(getattr(registry, "hooks", None))
