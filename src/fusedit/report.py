"""Report: what was rewritten, how often it really ran, what was refused or fell back, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any


@dataclass(frozen=True)
class SiteReport:
    """One rewrite that the plan laid on this pipeline.

    Attributes:
        site: name of the rewrite, for example `flux.qk_norm_rope`.
        exactness: `bitwise`, `reordered` or `lossy`.
        summary: what it replaces, in one line.
        fused: how often the fused code ran since accelerate().
        stock: how often stock code ran in its place.
        reasons: reason -> how often, for the stock runs.
        called: whether the module it belongs to was called since accelerate(); text to image never encodes a picture.
    """

    site: str
    exactness: str
    summary: str
    fused: int
    stock: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    called: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "exactness": self.exactness,
            "summary": self.summary,
            "fused": self.fused,
            "stock": self.stock,
            "reasons": dict(self.reasons),
            "called": self.called,
        }


@dataclass(frozen=True)
class Refusal:
    """A rewrite that does not apply here, with the reason."""

    site: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        return {"site": self.site, "reason": self.reason}


@dataclass(frozen=True)
class CacheReport:
    """What one cache did since accelerate() and what it holds now.

    Attributes:
        name: what it keeps, for example `prompts`.
        hits: calls that found everything they needed, kept by an earlier call; of `modulation rows`, rows of calls.
        misses: the others, which computed something.
        entries: how much of `capacity` is in use.
        capacity: entries that are kept at most.
        bytes: memory that the entries take.
        reasons: reason -> calls that could not use the cache because of it.
    """

    name: str
    hits: int
    misses: int
    entries: int
    capacity: int
    bytes: int
    reasons: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "reasons": dict(self.reasons)}

    def __str__(self) -> str:
        kept = f"{self.entries} of {self.capacity} kept, {self.bytes / 2**20:.1f} MiB"
        why = "".join(f"; not kept: {reason} ({count}x)" for reason, count in self.reasons.items())
        return f"{self.name}: {self.hits} reused, {self.misses} computed, {kept}{why}"


@dataclass(frozen=True)
class Report:
    """What accelerate() did to one pipeline. Prints as a table; `to_dict()` is its JSON form.

    Attributes:
        pipeline: class name of the pipeline.
        plan: the plan, as JSON data.
        rewritten: every rewrite that is in force, with its counters.
        refused: every rewrite that is not, with its reason.
        notes: facts a user should know, for example that weights were repacked.
        active: False once restore() has run.
        caches: every cache in force, with its counters.
    """

    pipeline: str
    plan: Mapping[str, Any]
    rewritten: tuple[SiteReport, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    active: bool = True
    caches: tuple[CacheReport, ...] = ()

    def never_ran(self, steps: int) -> tuple[SiteReport, ...]:
        """The rewrites in force that never ran, but for those whose module was never called and those that save nothing
        on the first step of so few."""
        idle = (site for site in self.rewritten if site.called and not site.fused)
        return tuple(site for site in idle if site.stock or steps > 1 or not site.site.endswith(".hoist"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "active": self.active,
            "plan": dict(self.plan),
            "rewritten": [site.to_dict() for site in self.rewritten],
            "refused": [refusal.to_dict() for refusal in self.refused],
            "notes": list(self.notes),
            "caches": [cache.to_dict() for cache in self.caches],
        }

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        state = "" if self.active else " (restored)"
        table = Table(title=f"{self.pipeline}, plan {self.plan.get('base', '?')}{state}", title_justify="left")
        for name in ("site", "exactness"):
            table.add_column(name, no_wrap=True)
        for name in ("fused", "stock"):
            table.add_column(name, justify="right")
        table.add_column("why stock ran")
        for site in self.rewritten:
            why = "; ".join(f"{reason} ({count}x)" for reason, count in site.reasons.items())
            table.add_row(site.site, site.exactness, str(site.fused), str(site.stock), why)
        for refusal in self.refused:
            table.add_row(refusal.site, "refused", "-", "-", refusal.reason)
        out = StringIO()
        console = Console(file=out, width=140, force_terminal=False, markup=False, highlight=False)
        console.print(table)
        for cache in self.caches:
            console.print(str(cache))
        for note in self.notes:
            console.print(f"note: {note}")
        return out.getvalue().rstrip()
