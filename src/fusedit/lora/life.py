"""load_lora(), set_loras(), unload_lora(): the life of a LoRA on one pipeline, accelerated or not.

The LoRAs are adapters of peft, as diffusers' own are: `get_active_adapters`, `set_adapters`, `delete_adapters`,
`unload_lora_weights` and `save_lora_weights` see them, and these functions see those that diffusers has loaded.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedit.errors import DeviceMemoryError, LoraError, UnsupportedPipelineError
from fusedit.lora.adapters import Injection, Settings, eject, tuner_layers
from fusedit.lora.fitting import TRANSFORMER, overwrite_of, parts_of, report_of
from fusedit.lora.fused import restorable, unfuse
from fusedit.lora.layers import LoraFile
from fusedit.lora.overwrite import Overwrite, check_resettable, reset
from fusedit.lora.parsing import parse, read
from fusedit.lora.paths import below
from fusedit.lora.record import LoraReport, components, remember
from fusedit.lora.verifier import verify_loaded
from fusedit.runtime.collection import no_collection
from fusedit.runtime.install import find

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def load_lora(
    pipe: DiffusionPipeline,
    path: str | PathLike[str] | Mapping[str, Tensor],
    name: str | None = None,
    scale: float = 1.0,
    *,
    text_encoders: bool = True,
) -> LoraReport:
    """Load a LoRA into a pipeline, active beside those that are active already. Everything is checked before anything
    is changed, and a failure leaves the pipeline as it was.

    Args:
        pipe: a FLUX or Z-Image pipeline of diffusers, before or after `accelerate`.
        path: a .safetensors file, or its tensors by key, in any format that `fusedit.lora` reads.
        name: of the adapter; None: that of the file.
        scale: what its effect is multiplied by.
        text_encoders: False leaves the file's parts for text encoders out.

    Returns:
        What matched and what did not.

    Raises:
        LoraError: no such file, no LoRA, one for another model, nothing of it fits, the name is taken, or over e4m3
            weights it does something else than its matrices say.
        UnsupportedPipelineError: the pipeline takes no LoRA.
        DeviceMemoryError: the device is too small for it.
    """
    if isinstance(path, Mapping):
        return load_file(pipe, parse(path), None, name, scale, text_encoders=text_encoders)
    if not isinstance(path, str | PathLike):
        raise LoraError(f"{_short(path)} is neither a path nor tensors by key; give the path of a .safetensors file")
    return load_file(pipe, read(Path(path)), str(path), name, scale, text_encoders=text_encoders)


def load_file(
    pipe: DiffusionPipeline,
    file: LoraFile,
    source: str | None,
    name: str | None = None,
    scale: float = 1.0,
    *,
    text_encoders: bool = True,
) -> LoraReport:
    """load_lora() of what was read already; `source` is the path that reports name."""
    transformer = _transformer_of(pipe)
    checked_scale(scale)
    chosen = _free_name(pipe, name, "lora" if source is None else Path(source).stem)
    parts = parts_of(pipe, transformer, file, text_encoders=text_encoders)
    overwrite = overwrite_of(pipe, transformer, file, parts[0].match)
    injections = [Injection(part.module, chosen, part.changes, scale) for part in parts if part.changes]
    steps: list[Overwrite | Injection] = [overwrite, *injections]
    put: list[Overwrite | Injection] = []
    try:
        with no_collection():  # 5000 new modules start one that reads all objects of the process: 0.3 s of 0.9
            for step in steps:  # widened first: LoRA layers are made around what stands there then
                if isinstance(step, Injection):
                    step.stage()
                put.append(step)
                step.put()
        verify_loaded(transformer)
    except BaseException as error:
        for step in reversed(put):
            step.take_back()
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceMemoryError(
                f"the device has no room for LoRA {chosen!r}; unload others or use pipe.enable_model_cpu_offload()"
            ) from None
        raise
    overwrite.keep(chosen)
    report = report_of(chosen, source, file, scale, parts, text_encoders=text_encoders)
    for injection in injections:
        remember(injection.module, report)
        _regroup(injection.module)
    return report


def set_loras(pipe: DiffusionPipeline, scales: Mapping[str, float]) -> None:
    """Make exactly these LoRAs active, each with its scale; `{}` switches all off. Nothing is loaded or unloaded.

    Raises:
        LoraError: a name that is not loaded, a LoRA that is fused, or one that does something else than its matrices
            say over e4m3 weights; nothing was changed.
        UnsupportedPipelineError: the pipeline takes no LoRA.
    """
    transformer = _transformer_of(pipe)
    if not isinstance(scales, Mapping):
        raise LoraError(f"set_loras takes names with scales, such as {{'style': 0.8}}, not {_short(scales)}")
    for name, scale in scales.items():
        _check_loaded(pipe, name)
        checked_scale(scale)
    layers = [layer for _, module in components(pipe) for _, layer in tuner_layers(module)]
    fused = dict.fromkeys(name for layer in layers for name in layer.merged_adapters)
    if fused:
        raise LoraError(
            f"LoRA {', '.join(map(repr, fused))} is fused into the weights, so scales are frozen; "
            "call pipe.unfuse_lora() first"
        )
    before = [Settings.of(layer) for layer in layers]
    try:
        for layer in layers:
            layer.set_adapter(list(scales), inference_mode=True)
            if layer.disable_adapters:
                layer._disable_adapters = False  # not enable_adapters(), which asks for gradients
            for name, scale in scales.items():
                layer.set_scale(name, scale)
        verify_loaded(transformer)
    except BaseException:
        for settings in before:
            settings.put_back()
        raise


def unload_lora(pipe: DiffusionPipeline, name: str) -> None:
    """Take a LoRA out, however it was loaded; the weights are bit for bit what they were without it. One that is fused
    is unfused first; others that are fused with it stay fused.

    Raises:
        LoraError: no such LoRA, or it was fused before `accelerate`, when nobody kept the original weights.
        UnsupportedPipelineError: the pipeline takes no LoRA.
    """
    transformer = _transformer_of(pipe)
    _check_loaded(pipe, name)
    merged = [layer for _, m in components(pipe) for _, layer in tuner_layers(m) if name in layer.merged_adapters]
    if not all(map(restorable, merged)):
        raise LoraError(
            f"LoRA {name!r} was fused before accelerate() or into a text encoder, where nobody kept the original "
            "weights; call pipe.unfuse_lora(), which subtracts it and rounds, then unload it"
        )
    check_resettable(transformer, name)
    for layer in merged:
        unfuse(layer, name)
    for _, module in components(pipe):
        if name in getattr(module, "peft_config", {}):
            eject(module, name)
            _regroup(module)
    reset(transformer, name)
    if name in getattr(pipe, "_merged_adapters", ()):
        vars(pipe)["_merged_adapters"] = pipe._merged_adapters - {name}  # type: ignore[attr-defined]
    _let_go(transformer)


def _let_go(transformer: nn.Module) -> None:
    """Of what accelerated pipelines keep for the run that is going on, which would hold the weights until the next."""
    fused = find(transformer)
    for session in () if fused is None else fused.sessions.values():
        session.let_go()


def checked_scale(scale: float) -> float:
    """The scale, or a LoraError for what is no finite number."""
    number = math.nan
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        with suppress(OverflowError):  # a whole number beyond all floating-point ones
            number = float(scale)
    if not math.isfinite(number):
        raise LoraError(f"LoRA scale {_short(scale)} is no finite number; give one such as 0.8")
    return number


def _short(value: object) -> str:
    """As Python writes it, or what it is, where that is long or impossible."""
    with suppress(Exception):
        text = repr(value)
        if len(text) <= 60:
            return text
    return f"a {type(value).__name__}"


def _transformer_of(pipe: Any) -> nn.Module:
    from diffusers import DiffusionPipeline

    module = getattr(pipe, TRANSFORMER, None)
    known = getattr(pipe, "_lora_loadable_modules", ())
    if not isinstance(pipe, DiffusionPipeline) or TRANSFORMER not in known or not isinstance(module, nn.Module):
        raise UnsupportedPipelineError(
            f"a {type(pipe).__name__} takes no LoRA here; give a pipeline of diffusers with a transformer, such as "
            "FluxPipeline or ZImagePipeline"
        )
    return module


def _loaded(pipe: Any) -> list[str]:
    return list(dict.fromkeys(name for _, module in components(pipe) for name in getattr(module, "peft_config", {})))


def _check_loaded(pipe: Any, name: str) -> None:
    loaded = _loaded(pipe)
    if name not in loaded:
        have = f"it has {', '.join(map(repr, loaded))}" if loaded else "it has none"
        raise LoraError(f"the pipeline has no LoRA {name!r}; {have}")


def _free_name(pipe: Any, name: str | None, default: str) -> str:
    """The adapter's name, checked; or one made of `default` that is free."""
    taken = _loaded(pipe)
    if name is not None:
        if name in taken:
            raise LoraError(f"LoRA name {name!r} is taken; unload that one first or give another name")
        if not isinstance(name, str) or not _allowed(name):
            raise LoraError(f"LoRA name {name!r} is not allowed; give letters, digits, - and _, such as 'style'")
        return name
    made = re.sub(r"[^\w-]+", "_", default) or "lora"
    made = made if _allowed(made) else f"{made}_lora"
    numbered = (made if n == 1 else f"{made}_{n}" for n in itertools.count(1))
    return next(found for found in numbered if found not in taken)


def _allowed(name: str) -> bool:
    """Whether torch takes it as the name of a module in a ModuleDict."""
    return bool(re.fullmatch(r"[\w-]+", name)) and not hasattr(nn.ModuleDict(), name)


def _regroup(module: nn.Module) -> None:
    """Under group offload, let the groups know of the layers that came and went, as diffusers does."""
    if not any(getattr(child.__dict__.get("_diffusers_hook"), "hooks", None) for child in below(module)):
        return  # diffusers' own look for such a hook takes five times as long
    from diffusers.hooks import group_offloading

    group_offloading._maybe_remove_and_reapply_group_offloading(module)
