"""Calls and models that the fused Z-Image forward leaves to stock, with the reason in the report; and stale values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from support.pipes import relative, z_image_call, z_image_pipe
from support.z_image import lively_pipe

import fusedit
from fusedit.errors import UnsupportedPipelineError
from fusedit.models.z_image import ZImage


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"qk_norm": False}, "qk_norm"), ({"n_kv_heads": 1}, "n_kv_heads")],
)
def test_configs_that_are_refused(changes: dict[str, Any], word: str) -> None:
    pipe = z_image_pipe(**changes)
    with pytest.raises(UnsupportedPipelineError, match=word):
        fusedit.accelerate(pipe)
    handle = fusedit.accelerate(pipe, strict=False)
    refused = {r.site: r.reason for r in handle.report().refused}
    assert all(word in refused[rewrite.name] for rewrite in ZImage.rewrites if rewrite.tier == "exact")
    assert "forward" not in pipe.transformer.__dict__


def image(*size: int) -> torch.Tensor:
    return torch.randn(4, 1, *size, generator=torch.Generator().manual_seed(2))


def caption(length: int) -> torch.Tensor:
    return torch.randn(length, 20, generator=torch.Generator().manual_seed(3))


T = torch.tensor([0.5])
# The call, and a word of the reason; what stock rejects, it rejects with its own error.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "siglip": (([image(8, 8)], T, [caption(5)]), {"siglip_feats": [[None]]}, "omni"),
    "noise mask": (([image(8, 8)], T, [caption(5)]), {"image_noise_mask": [[1]]}, "omni"),
    "nested": (([[image(8, 8)]], T, [[caption(5)]]), {"siglip_feats": [[None]], "image_noise_mask": [[1]]}, "omni"),
    "nested images": (([[image(8, 8)]], T, [[caption(5)]]), {}, "omni"),
    "image tensor": ((image(8, 8)[None], T, [caption(5)]), {}, "not a list"),
    "no image": (([], T, []), {}, "not a list"),
    "more images": (([image(8, 8), image(8, 8)], T, [caption(5)]), {}, "2 images for 1 captions"),
    "empty caption": (([image(8, 8)], T, [caption(0)]), {}, "empty"),
    "flat image": (([image(8, 8)[:, 0]], T, [caption(5)]), {}, "4-dimensional"),
    "half a patch": (([image(8, 7)], T, [caption(5)]), {}, "whole number"),
    "patch size": (([image(8, 8)], T, [caption(5)]), {"patch_size": 4}, "patch size"),
    "residual list": (([image(8, 8)], T, [caption(5)]), {"controlnet_block_samples": []}, "no dict"),
    "positional kwargs": (
        ([image(8, 8)], T, [caption(5)], True, None, None, None, 2, 1, {"scale": 0.5}),
        {},
        "by position",
    ),
    "missing argument": (([image(8, 8)], T), {}, "not a list"),
}


def outcome(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return pipe.transformer(*args, **kwargs)[0]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_go_through_stock(name: str) -> None:
    args, kwargs, word = CALLS[name]
    pipe = z_image_pipe()
    stock = outcome(pipe, args, kwargs)
    handle = fusedit.accelerate(pipe)
    ours = outcome(pipe, args, kwargs)
    if isinstance(stock, type):
        assert ours is stock
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    sites = [site for site in handle.report().rewritten if site.site.startswith("z_image.")]
    assert all(site.fused == 0 and site.stock == 1 for site in sites)
    assert all(word in reason for site in sites for reason in site.reasons)


def stock_reasons(handle: Any) -> set[str]:
    sites = [site for site in handle.report().rewritten if site.site.startswith("z_image.")]
    assert all(site.fused == 0 for site in sites)
    return {reason for site in sites for reason in site.reasons}


def test_other_attention_backends_and_processors_go_through_stock() -> None:
    pipe = z_image_pipe()
    stock = z_image_call(pipe)
    handle = fusedit.accelerate(pipe)
    with attention_backend("_native_math"):
        assert relative(z_image_call(pipe), stock) < 2e-5
    attention = pipe.transformer.layers[1].attention
    kept = attention.processor

    class Mine(type(kept)):  # type: ignore[misc]
        pass

    attention.set_processor(Mine())
    assert torch.equal(z_image_call(pipe), stock)
    attention.set_processor(kept)
    kept._attention_backend = "_native_math"
    assert relative(z_image_call(pipe), stock) < 2e-5
    kept._attention_backend = None
    kept._parallel_config = object()
    pipe.transformer.layers[1].attention.forward = lambda x, **_: x  # stands in for a parallel attention
    z_image_call(pipe)
    del pipe.transformer.layers[1].attention.forward
    assert "context parallelism" in ZImage.needs_stock(_model(handle), ([image(8, 8)], T, [caption(5)]), {})
    reasons = stock_reasons(handle)
    for word in ("backend _native_math is active", "processor Mine", "_native_math was asked for", "is wrapped"):
        assert any(word in reason for reason in reasons), (word, reasons)


def _model(handle: Any) -> Any:
    return next(session.model for session in handle._sessions if isinstance(session.model, ZImage))


def test_gradient_checkpointing_hooks_and_gradients_go_through_stock() -> None:
    pipe = z_image_pipe()
    handle = fusedit.accelerate(pipe)
    pipe.transformer.enable_gradient_checkpointing()
    pipe.transformer.requires_grad_(False)
    pipe.transformer([image(8, 8)], T, [caption(5)])
    pipe.transformer.disable_gradient_checkpointing()
    pipe.transformer.requires_grad_(True)
    pipe.transformer([image(8, 8)], T, [caption(5)])[0][0].sum().backward()
    assert pipe.transformer.layers[0].attention.to_q.weight.grad is not None
    hook = pipe.transformer.layers[0].register_forward_hook(lambda *_: None)
    z_image_call(pipe)
    hook.remove()
    reasons = stock_reasons(handle)
    for word in ("gradient checkpointing", "gradients are needed", "forward hook"):
        assert any(word in reason for reason in reasons), (word, reasons)
    z_image_call(pipe)
    assert any(site.fused for site in handle.report().rewritten)


# Hoisting: what is computed once a run must never be stale.


def test_captions_are_refined_once_a_run() -> None:
    pipe = z_image_pipe()
    handle = fusedit.accelerate(pipe)

    def counts(steps: int) -> tuple[int, int]:
        before = {site.site: site.fused for site in handle.report().rewritten}
        z_image_call(pipe, num_inference_steps=steps)
        after = {site.site: site.fused for site in handle.report().rewritten}
        hoisted, attention = (after[name] - before[name] for name in ("z_image.hoist", "z_image.attention"))
        return hoisted, attention

    counts(2)  # the first call packs the refiner's weights
    assert counts(5) == (2 * 4, 2 + 5 * (2 + 3))  # layout and captions kept in the four steps after the first


def test_stale_captions_positions_or_weights_are_impossible() -> None:
    pipe = lively_pipe()
    handle = fusedit.accelerate(pipe)
    given = [caption(7)]

    def check(**changes: Any) -> torch.Tensor:
        fused = z_image_call(pipe, **{"prompt_embeds": given, **changes})
        with handle.paused():
            assert relative(fused, z_image_call(pipe, **{"prompt_embeds": given, **changes})) < 2e-5
        return fused

    first = check()
    given[0].add_(torch.linspace(-1, 1, 20))  # in place between runs
    second = check()
    assert relative(second, first) > 1e-4
    check(width=48, height=64)  # same token count, other positions
    pipe.transformer.cap_embedder[1].weight.data.mul_(-1.2)  # no version counter sees this; a new run does
    third = check()
    assert relative(third, second) > 1e-4
    with torch.no_grad():
        pipe.transformer.cap_pad_token.add_(1.0)
    fourth = check()
    assert relative(fourth, third) > 1e-4
    pipe.transformer.context_refiner[0].load_state_dict(pipe.transformer.context_refiner[1].state_dict())
    fifth = check()
    assert relative(fifth, fourth) > 1e-4
    pipe.transformer.rope_embedder = type(pipe.transformer.rope_embedder)(10.0, [4, 6, 6], [512, 64, 64])
    assert relative(check(), fifth) > 1e-4


@pytest.mark.parametrize("what", ["caption", "weight", "address", "rope", "pad"])
def test_what_changes_within_a_run_takes_effect_at_once(what: str) -> None:
    """A callback edits caption or weights in place, or frees the caption for one that may get its address."""

    def edit(pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        transformer = pipe.transformer
        with torch.no_grad():
            if what == "caption" and i == 0:
                kwargs["prompt_embeds"][0].add_(torch.linspace(-1, 1, 20))
            elif what == "weight" and i == 0:
                transformer.context_refiner[1].ffn_norm2.weight.mul_(-3.0)
            elif what == "pad" and i == 0:
                transformer.cap_pad_token.add_(1.0)
            elif what == "rope" and i == 0:
                transformer.rope_embedder = type(transformer.rope_embedder)(10.0, [4, 6, 6], [512, 64, 64])
            elif what == "address":
                values = kwargs["prompt_embeds"][0] + torch.linspace(-1, 1, 20)
                kwargs["prompt_embeds"].clear()
                kwargs["prompt_embeds"].append(values.clone())
        return kwargs

    arguments = {
        "callback_on_step_end": edit,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        "num_inference_steps": 4,
    }
    reference, pipe = lively_pipe(), lively_pipe()
    untouched = z_image_call(reference, num_inference_steps=4)
    stock = z_image_call(reference, **arguments)
    fusedit.accelerate(pipe)
    assert relative(stock, untouched) > 1e-4
    assert relative(z_image_call(pipe, **arguments), stock) < 2e-5


def test_inference_mode_tensors_are_not_cached() -> None:
    pipe = lively_pipe()
    handle = fusedit.accelerate(pipe)
    with torch.inference_mode():
        fused = z_image_call(pipe)
    with handle.paused(), torch.inference_mode():
        assert relative(fused, z_image_call(pipe)) < 2e-5
    hoist = next(site for site in handle.report().rewritten if site.site == "z_image.hoist")
    assert hoist.stock > 0
