"""Why a stock attention module may not be bypassed: another processor or backend was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def attention_reason(attentions: Iterable[Any], processor: type) -> str | None:
    """The first reason among these attention modules, or None; `processor` is the class stock gives each of them."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    active: Any = _AttentionBackendRegistry.get_active_backend()[0]  # type: ignore[no-untyped-call]
    if active is not AttentionBackendName.NATIVE:
        return f"attention backend {active.value} is active"
    for attention in attentions:
        found = attention.processor
        if type(found) is not processor:
            return f"attention processor {type(found).__name__}"
        backend: Any = getattr(found, "_attention_backend", None)
        if backend not in (None, AttentionBackendName.NATIVE):
            return f"attention backend {getattr(backend, 'value', backend)} was asked for"
        if getattr(found, "_parallel_config", None) is not None:
            return "context parallelism"
        if getattr(attention, "fused_projections", False):
            return "fuse_qkv_projections() was called"
    return None
