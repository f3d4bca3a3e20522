"""LoraReport: what a load matched, and what a pipeline says about the LoRAs that it has now."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from fusedit.lora import verifier
from fusedit.lora.adapters import active_in, adapters_in, tuner_layers
from fusedit.lora.fused import kept_bytes

_SHOWN: Final = 3
_LOADED: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, LoraReport]]]] = weakref.WeakKeyDictionary()
"""Module -> adapter -> (peft's own description of it, by which it is known again; the report of its load)."""


@dataclass(frozen=True)
class LoraReport:
    """What `load_lora` loaded.

    Attributes:
        name: the adapter's name in the pipeline.
        file: path of the file, or None where tensors were given.
        format, family: see `fusedit.lora.LoraFile`.
        scale: it was loaded with.
        matched, total: layers that were found in the pipeline, and layers that the file names.
        missing: (path or key, reason) of the others.
        parts: component -> layers that were adapted in it.
        notes: what was decided while reading and loading.
    """

    name: str
    file: str | None
    format: str
    family: str | None
    scale: float
    matched: int
    total: int
    missing: tuple[tuple[str, str], ...] = ()
    parts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**vars(self), "missing": [list(pair) for pair in self.missing], "notes": list(self.notes)}

    def __str__(self) -> str:
        return f"LoRA {self.name!r} ({self.format}) at {self.scale:g}: {counted(self)}"


def counted(report: LoraReport) -> str:
    """`matched 494 of 494 layers`, and what did not match."""
    told = f"matched {report.matched} of {report.total} layers"
    if not report.missing:
        return told
    listed = "; ".join(f"{path} ({reason})" for path, reason in report.missing[:_SHOWN])
    more = len(report.missing) - _SHOWN
    return f"{told}, without {listed}" + (f" and {more} more" if more > 0 else "")


def remember(module: nn.Module, report: LoraReport) -> None:
    """Keep the report for as long as the adapter of this name is the one just loaded."""
    config: Any = module.peft_config[report.name]  # type: ignore[index]
    _LOADED.setdefault(module, {})[report.name] = (weakref.ref(config), report)


def notes(pipe: Any) -> list[str]:
    """One sentence for each LoRA that this pipeline has, however it was loaded, and what fused ones keep."""
    modules = dict(components(pipe))
    told = [f"LoRA {name!r} {_state(modules, name)}: {_matched(modules, name)}" for name in _names(modules)]
    for part, module in modules.items():
        asides = _branches(module)
        if asides:
            keys = ", ".join(map(repr, dict.fromkeys(key for keys in asides for key in keys)))
            told.append(f"{part}: fused LoRA {keys} is a side branch of {len(asides)} float8 layers, not merged")
        told += [f"{part}: {words}" for words in verifier.notes(module)]
        kept = kept_bytes(module)
        if kept:
            told.append(f"{part}: {kept / 2**20:.1f} MiB of weights from before fuse_lora are kept on the CPU")
    return told


def loras(pipe: Any) -> list[dict[str, Any]]:
    """JSON data of each LoRA that this pipeline has; `matched` and `total` are None for one that diffusers loaded."""
    modules = dict(components(pipe))
    found = []
    for name in _names(modules):
        report = _report(modules, name)
        data: dict[str, Any] = {"file": None, "format": None, "matched": None, "total": None, "missing": []}
        data |= {} if report is None else {key: value for key, value in report.to_dict().items() if key in data}
        found.append({"name": name, "state": _state(modules, name), **data})
    return found


def components(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """The components that may have LoRAs: those that diffusers knows of, and every text encoder."""
    known = getattr(pipe, "_lora_loadable_modules", ())
    for name in (*known, *(other for other in ("text_encoder", "text_encoder_2") if other not in known)):
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            yield name, module


def _layers(modules: dict[str, nn.Module], name: str) -> list[Any]:
    return [layer for m in modules.values() for _, layer in tuner_layers(m) if name in adapters_in(layer)]


def _names(modules: dict[str, nn.Module]) -> list[str]:
    return list(dict.fromkeys(name for module in modules.values() for name in getattr(module, "peft_config", {})))


def _report(modules: dict[str, nn.Module], name: str) -> LoraReport | None:
    """That of its load, if it was loaded by us and nobody has put another one in its place."""
    for module in modules.values():
        config, report = _LOADED.get(module, {}).get(name, (lambda: None, None))
        if report is not None and config() is getattr(module, "peft_config", {}).get(name):
            return report
    return None


def _matched(modules: dict[str, nn.Module], name: str) -> str:
    report = _report(modules, name)
    return f"on {len(_layers(modules, name))} layers" if report is None else counted(report)


def _state(modules: dict[str, nn.Module], name: str) -> str:
    layers = _layers(modules, name)
    if any(name in layer.merged_adapters for layer in layers):
        return "is fused"
    if any(layer.disable_adapters for layer in layers):
        return "is switched off"
    if not any(name in active_in(module) for module in modules.values()):
        return "is not active"
    scales = sorted({_scale(layer, name) for layer in layers if hasattr(layer, "lora_alpha")})
    if not scales:  # another kind of adapter, injected by peft itself
        return "is active"
    return f"at {scales[0]:g}" if len(scales) == 1 else f"at {scales[0]:g} to {scales[-1]:g}"


def _scale(layer: Any, name: str) -> float:
    """What `set_scale` was called with."""
    full = float(layer.lora_alpha[name]) / (layer.r[name] ** 0.5 if layer.use_rslora.get(name) else layer.r[name])
    return round(layer.scaling[name] / full, 6) if full else 0.0


def _branches(module: nn.Module) -> list[list[str]]:
    found = (child.__dict__.get("branches") for child in module.modules())
    return [list(branches) for branches in found if isinstance(branches, dict) and branches]
