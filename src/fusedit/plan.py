"""Plan: which rewrites run, at what precision, with what caches. Frozen; JSON in and out; unknown keys are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fusedit.errors import PlanError

SCHEMA: Final = 1
TIERS: Final = ("exact", "fp8")
"""Each allows what the ones before it allow."""
PRECISIONS: Final = ("model", "fp8", "weights")
"""Of linear layers: the dtype of the model; e4m3 weights and activations; e4m3 weights alone."""
CACHES: Final = ("prompts", "graphs")
DEPTH: Final = 100
"""Objects and lists inside each other at most: less than Python itself can walk through."""
_KEYS: Final = ("schema", "base", "rewrites", "precision", "cache", "budget", "evidence")


def _frozen(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({k: _frozen(v) if isinstance(v, Mapping) else v for k, v in value.items()})


def _too_deep(value: Any) -> bool:
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        if inner and depth > DEPTH:
            return True
        left += [(part, depth + 1) for part in inner]
    return False


def _thawed(value: Any) -> Any:
    return {k: _thawed(v) for k, v in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Plan:
    """A frozen description of what `accelerate` may do.

    Attributes:
        base: the tier that everything not named below follows; `exact` (same mathematics, only rounding order differs)
            or `fp8` (products in e4m3).
        rewrites: rewrite name -> on or off, overriding the tier. `fusedit models` lists the names.
        precision: `{"default": "model", "sites": {}}`, which `exact` always has: the model's own dtype. In `fp8` the
            default is `fp8`, each model's own table, and `sites` maps patterns over the paths of linear layers
            (`single_transformer_blocks.3.*`) to `model`, `fp8` or `weights` (e4m3 weights, activations as they are);
            of several that match a layer the last one counts.
        cache: what is kept from one call to the next: `{"prompts": true, "graphs": true}` in `exact`, since neither
            changes a bit of the picture; a key that is left out follows the tier.
        budget: fidelity budget a tuned plan was found under, empty when not tuned.
        evidence: measurements that came with a tuned plan, or None.

    Raises:
        PlanError: unknown tier, key, rewrite or value, or a schema newer than this version reads.
    """

    base: str = "exact"
    rewrites: Mapping[str, bool] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, bool] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    evidence: Any = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if isinstance(self.schema, bool) or not isinstance(self.schema, int) or self.schema < 1:
            raise PlanError(f"plan schema is {self.schema!r}; this version reads schema {SCHEMA}")
        if self.schema > SCHEMA:
            raise PlanError(
                f"plan schema {self.schema} is newer than the {SCHEMA} this version reads; upgrade fusedit to use it"
            )
        if self.base not in TIERS:
            raise PlanError(f"unknown plan {self.base!r}; known tiers: {', '.join(TIERS)}")
        for name in ("rewrites", "precision", "cache", "budget"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise PlanError(f"plan key {name!r} must be an object, not {type(value).__name__}")
            if _too_deep(value):
                raise PlanError(f"plan key {name!r} is nested more than {DEPTH} deep; make it flatter")
            object.__setattr__(self, name, _frozen(value))
        if _too_deep(self.evidence):
            raise PlanError(f"plan key 'evidence' is nested more than {DEPTH} deep; make it flatter")
        for name, on in self.rewrites.items():
            if not isinstance(on, bool):
                raise PlanError(f"rewrite {name!r} must be true or false, not {on!r}")
        object.__setattr__(self, "precision", _frozen(_precision(self.base, self.precision)))
        for name, on in self.cache.items():
            if name not in CACHES:
                raise PlanError(f"unknown key {name!r} in plan 'cache'; known keys: {', '.join(CACHES)}")
            if not isinstance(on, bool):
                raise PlanError(f"plan cache.{name} must be true or false, not {_thawed(on)!r}")
        object.__setattr__(self, "cache", _frozen({**dict.fromkeys(CACHES, True), **self.cache}))

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return _read, (self.to_dict(),)  # the read-only views inside can be neither copied nor pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # frozen

    def enabled(self, rewrite: str, tier: str = "exact", default: bool = True) -> bool:
        """Whether this plan switches a rewrite of `tier` on: unless it names it, by `default` from that tier on."""
        return self.rewrites.get(rewrite, default) and TIERS.index(self.base) >= TIERS.index(tier)

    def without(self, *names: str) -> Plan:
        """The same plan with these rewrites switched off."""
        return Plan(
            base=self.base,
            rewrites={**self.rewrites, **dict.fromkeys(names, False)},
            precision=self.precision,
            cache=self.cache,
            budget=self.budget,
            evidence=self.evidence,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data; `Plan.from_dict` reads it back to an equal plan."""
        return {key: _thawed(getattr(self, key)) for key in _KEYS}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Read a plan from JSON data. Unknown keys are errors, so that no setting is silently dropped."""
        if not isinstance(data, Mapping):
            raise PlanError(f"a plan is a JSON object, not {type(data).__name__}")
        schema = data.get("schema")
        if schema is None:
            raise PlanError(f"plan has no 'schema'; write \"schema\": {SCHEMA}")
        if isinstance(schema, int) and schema > SCHEMA:  # before the key check: a newer file may well have new keys
            raise PlanError(f"plan schema {schema} is newer than the {SCHEMA} this version reads; upgrade fusedit")
        unknown = sorted(set(map(str, data)) - set(_KEYS))
        if unknown:
            raise PlanError(f"unknown plan key {unknown[0]!r}; known keys: {', '.join(_KEYS)}")
        return cls(**data)

    @classmethod
    def of(cls, plan: Plan | str | Path) -> Plan:
        """A plan from a tier name, a path to a plan JSON, or a Plan (returned as it is)."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, str) and plan in TIERS:
            return cls(base=plan)
        if not isinstance(plan, str | Path):
            raise PlanError(f"plan must be a tier name, a Plan or a path, not {type(plan).__name__}")
        path = Path(plan)
        try:
            there = path.is_file()
        except OSError:  # a name too long, or a folder that cannot be entered
            there = False
        if not there:
            raise PlanError(f"unknown plan {str(plan)!r}; give one of {', '.join(TIERS)} or the path of a plan JSON")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"plan file {str(path)!r} cannot be read as JSON: {error}") from error
        except RecursionError:
            raise PlanError(f"plan file {str(path)!r} is nested too deep to be a plan; write a plan JSON") from None
        return cls.from_dict(data)


def _read(data: dict[str, Any]) -> Plan:
    return Plan.from_dict(data)


def _precision(base: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The precision of a plan with what its tier fills in, checked."""
    unknown = [key for key in given if key not in ("default", "sites")]
    if unknown:
        raise PlanError(f"unknown key {unknown[0]!r} in plan 'precision'; known keys: default, sites")
    allowed = ("model",) if base == "exact" else ("fp8", "model")
    default, sites = given.get("default", allowed[0]), given.get("sites", {})
    if default not in allowed:
        known = " or ".join(map(repr, allowed))
        raise PlanError(f"plan precision.default is {_thawed(default)!r}; tier {base!r} allows {known}")
    if not isinstance(sites, Mapping):
        raise PlanError(f"plan precision.sites must be an object of pattern to precision, not {type(sites).__name__}")
    if base == "exact" and sites:
        raise PlanError(
            f"plan precision.sites is {_thawed(sites)!r}; tier 'exact' computes in the model's dtype, use base 'fp8'"
        )
    for pattern, value in sites.items():
        if not isinstance(pattern, str):
            raise PlanError(f"plan precision.sites has {pattern!r}, which is no pattern over paths; give text")
        if value not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise PlanError(f"plan precision of {pattern!r} is {_thawed(value)!r}; give one of {known}")
    return {"default": default, "sites": dict(sites)}
