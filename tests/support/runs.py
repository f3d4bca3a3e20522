"""Runs of tiny pipelines of both architectures, described once, so that a test of runs is written once for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import pytest
import torch

import fusedit
from fusedit.report import CacheReport
from support.pipes import flux_call, flux_inputs, flux_pipe, z_image_call
from support.z_image import lively_pipe

_diffusers: Any = diffusers


class Kind(NamedTuple):
    """One architecture."""

    name: str
    pipe: Callable[..., Any]
    call: Callable[..., torch.Tensor]
    """(pipeline, arguments that differ) -> latents of three steps."""
    prompt: Callable[..., dict[str, Any]]
    """(pipeline, tokens of each item, seed) -> its arguments."""
    negative: Callable[..., dict[str, Any]]
    """(pipeline) -> arguments of real guidance against another prompt."""
    conditions: tuple[str, ...]
    """Parameters that the modulation vectors depend on: of the embeddings, of norms, first and last."""
    others: tuple[str, ...]
    """Parameters that hoisted values or the step depend on."""
    lora: tuple[tuple[str, ...], ...]
    """Names of layers for a LoRA: those of the modulation, what they depend on, others."""

    def __repr__(self) -> str:
        return self.name


def _flux_prompt(pipe: Any, lengths: tuple[int, ...] = (7,), seed: int = 1) -> dict[str, Any]:
    return flux_inputs(pipe, len(lengths), max(lengths), seed)


def _flux_negative(pipe: Any) -> dict[str, Any]:
    return {"true_cfg_scale": 2.0, **{f"negative_{k}": v for k, v in flux_inputs(pipe, seed=7).items()}}


def _z_image_prompt(pipe: Any, lengths: tuple[int, ...] = (7,), seed: int = 1) -> dict[str, Any]:
    generator, width = torch.Generator().manual_seed(seed), pipe.transformer.config.cap_feat_dim
    return {"prompt_embeds": [torch.randn(n, width, generator=generator).to(pipe.transformer.dtype) for n in lengths]}


def _z_image_negative(pipe: Any) -> dict[str, Any]:
    other = _z_image_prompt(pipe, (40,), 7)["prompt_embeds"]
    return {"guidance_scale": 3.0, "negative_prompt_embeds": other}


FLUX = Kind(
    "flux",
    flux_pipe,
    flux_call,
    _flux_prompt,
    _flux_negative,
    (
        "time_text_embed.timestep_embedder.linear_1.weight",
        "time_text_embed.guidance_embedder.linear_2.bias",
        "time_text_embed.text_embedder.linear_1.weight",
        "transformer_blocks.0.norm1.linear.weight",
        "transformer_blocks.1.norm1_context.linear.bias",
        "single_transformer_blocks.2.norm.linear.weight",
        "norm_out.linear.bias",
    ),
    ("context_embedder.weight", "x_embedder.bias", "transformer_blocks.1.attn.to_k.weight"),
    (("norm1.linear", "norm_out"), ("time_text_embed",), ("attn.to_q", "context_embedder")),
)
Z_IMAGE = Kind(
    "z_image",
    lively_pipe,
    z_image_call,
    _z_image_prompt,
    _z_image_negative,
    (
        "t_embedder.mlp.0.weight",
        "t_embedder.mlp.2.bias",
        "noise_refiner.0.adaLN_modulation.0.weight",
        "layers.2.adaLN_modulation.0.bias",
        "all_final_layer.2-1.adaLN_modulation.1.weight",
    ),
    ("cap_embedder.1.weight", "cap_pad_token", "layers.1.attention.to_k.weight"),
    (("adaLN_modulation.0",), ("t_embedder",), ("attention.to_q", "cap_embedder")),
)
KINDS = (FLUX, Z_IMAGE)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def cache_of(handle: fusedit.Handle, name: str) -> CacheReport:
    """What the report says about a cache; one that nobody asked is in no report."""
    found = [cache for cache in handle.report().caches if cache.name == name]
    return found[0] if found else CacheReport(name, 0, 0, 0, 0, 0)


def rows(handle: fusedit.Handle) -> CacheReport:
    """What the report says about modulation tables."""
    return cache_of(handle, "modulation rows")


def site(handle: fusedit.Handle, name: str) -> Any:
    return next(site for site in handle.report().rewritten if site.site == name)


def at_step(step: int, do: Callable[[Any, dict[str, Any]], None]) -> dict[str, Any]:
    """Arguments of a call that does something to its pipeline when a step has ended."""

    def ended(pipe: Any, i: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if i == step:
            do(pipe, kwargs)
        return kwargs

    return {"callback_on_step_end": ended}


def framed(pipe: Any) -> Any:
    """A pipeline of the same components whose call calls a function, which may call the transformer as it likes."""

    def __call__(self: Any, body: Callable[[], Any]) -> Any:  # noqa: ARG001
        with torch.no_grad():
            return body()

    return type("Framed", (type(pipe),), {"__call__": __call__})(**pipe.components)


def with_image(pipe: Any) -> Any:
    """The img2img pipeline of the same components."""
    made = getattr(_diffusers, type(pipe).__name__.replace("Pipeline", "Img2ImgPipeline"))(**pipe.components)
    made.set_progress_bar_config(disable=True)
    return made


def with_control(pipe: Any) -> Any:
    """The ControlNet pipeline of the same components, with a ControlNet of random weights."""
    model, config = pipe.transformer, pipe.transformer.config
    torch.manual_seed(3)
    control: Any
    with torch.device(model.device):
        control = _controlnet(model, config)
    for parameter in control.parameters():  # its outputs start at zero, which would test nothing
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if control.dtype != model.dtype:
        control.to(model.dtype)
    control.eval().requires_grad_(False)
    made = getattr(_diffusers, type(pipe).__name__.replace("Pipeline", "ControlNetPipeline"))(
        **pipe.components, controlnet=control
    )
    made.set_progress_bar_config(disable=True)
    return made


def _controlnet(model: Any, config: Any) -> Any:
    names: tuple[str, ...]
    if type(model).__name__.startswith("Flux"):
        names = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim")
        names += ("pooled_projection_dim", "guidance_embeds", "axes_dims_rope")
        same = {name: config[name] for name in names}
        return _diffusers.FluxControlNetModel(num_layers=1, num_single_layers=2, **same)
    names = ("all_patch_size", "all_f_patch_size", "dim", "n_refiner_layers", "n_heads", "n_kv_heads", "qk_norm")
    same = {name: config[name] for name in names}
    return _diffusers.ZImageControlNetModel(control_layers_places=[0, 2], control_in_dim=config.in_channels, **same)


def picture(width: int = 64, height: int = 48, **where: Any) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0)).to(**where)


def fused(handle: fusedit.Handle) -> int:
    """How often any site ran fused."""
    return sum(site.fused for site in handle.report().rewritten)


def reasons(handle: fusedit.Handle) -> set[str]:
    """Why any site ran stock."""
    return {reason for site in handle.report().rewritten for reason in site.reasons}
