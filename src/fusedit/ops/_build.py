"""Build: a variant of a kernel, described well enough to compile it without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """One variant of one kernel, as the launcher would compile it: enough to compile it without a GPU."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    traits: frozenset[str] = field(default_factory=frozenset)
    """`vector`: every global access of an activation is 128 bits wide; `no-spill`: no local memory; `descriptors`:
    tiles come and go by TMA."""
    num_stages: int = 3
    capability: int = 0
    """The least that it compiles for: 89 where it converts to e4m3."""

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        types: Mapping[str, str],
        constexprs: Mapping[str, Any],
        num_warps: int,
        *traits: str,
        num_stages: int = 3,
        capability: int = 0,
    ) -> Build:
        """`types` gives the pointers' and floats' types; every other number is i32, as at a launch."""
        signature = {p: "constexpr" if p in constexprs else types.get(p, "i32") for p in kernel.arg_names}
        return cls(name, kernel, signature, dict(constexprs), num_warps, frozenset(traits), num_stages, capability)
