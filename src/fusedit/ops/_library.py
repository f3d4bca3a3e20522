"""Registration with torch.library: `fusedit::name` and `fusedit::name_out`, which tracers and tensor subclasses see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fusedit.ops import _check
from fusedit.ops._outputs import Results
from fusedit.ops._signature import Signature

Tensor = torch.Tensor
_LIBRARY: Final = torch.library.Library("fusedit", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(
    signature: Signature,
    run: Callable[[Sequence[Any], dict[str, Any], Any], Any],
    check: Callable[..., tuple[Sequence[int], ...]],
    results: Results,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Defines both, with their fakes, and returns them: the functional one, and the one that writes into `out_0`, ...

    Args:
        run: (arguments, keyword arguments, out or None) -> the results.
        check: the op's arguments -> shapes of the results.
        results: how the results are made.
    """
    # Not `out`: dynamo refuses an argument of that name that is no dense tensor.
    names = [f"out_{place}" for place in range(signature.outputs)]
    returned = "Tensor" if signature.outputs == 1 else "(" + ", ".join(["Tensor"] * signature.outputs) + ")"
    targets = ", ".join(f"Tensor({chr(97 + place)}!) {name}" for place, name in enumerate(names))

    def lead(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else kwargs[signature.first]

    def functional(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs, None)

    def mutating(*args: Any, **kwargs: Any) -> None:
        outs = [kwargs.pop(name) for name in names]
        run(args, kwargs, results.pack(outs))

    def fake(*args: Any, **kwargs: Any) -> Any:
        shapes = check(*args, **kwargs)
        return results.pack(results.all(lead(args, kwargs), shapes, args, kwargs))

    def fake_out(*args: Any, **kwargs: Any) -> None:
        outs = [kwargs.pop(name) for name in names]
        shapes, x = check(*args, **kwargs), lead(args, kwargs)
        for target, shape, dtype in zip(outs, shapes, results.dtypes(x, args, kwargs), strict=True):
            _check.like(signature.name, "out", target, x, shape, dtype)

    for name, schema, implementation, meta in (
        (signature.name, f"({signature.declared}) -> {returned}", functional, fake),
        (f"{signature.name}_out", f"({signature.declared}, *, {targets}) -> ()", mutating, fake_out),
    ):
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"fusedit::{name}", meta, lib=_LIBRARY)
    made = torch.ops.fusedit
    return getattr(made, signature.name).default, getattr(made, f"{signature.name}_out").default
