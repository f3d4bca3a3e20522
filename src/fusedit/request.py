"""One picture to draw, and the keyword arguments of the pipeline's call that it stands for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

from fusedit.errors import ArgumentError, UnsupportedPipelineError
from fusedit.validation import (
    MULTIPLE,
    Size,
    check_guidance,
    check_prompt,
    check_seed,
    check_size,
    check_steps,
    check_text_tokens,
)

_NEEDED: Final = (
    "prompt",
    "height",
    "width",
    "num_inference_steps",
    "generator",
    "callback_on_step_end",
    "output_type",
)
_PICTURES: Final = {"image": "an image", "control_image": "a control image", "mask_image": "a mask image"}


@dataclass(frozen=True)
class Request:
    """One picture to draw. Everything is explicit; `fusedit.defaults` knows what each model likes.

    Attributes:
        prompt: may be empty.
        seed: 0 to 2**63 - 1.
        width, height: pixels, multiples of 16.
        steps: denoising steps.
        guidance: guidance scale; 0 is a value. None where the pipeline takes none.
        negative: negative prompt, or None for none.
        true_cfg: FLUX's scale for real classifier-free guidance against the negative prompt, or None.
        text_tokens: longest prompt in tokens, or None for the pipeline's own.
    """

    prompt: str
    seed: int
    width: int
    height: int
    steps: int
    guidance: float | None = None
    negative: str | None = None
    true_cfg: float | None = None
    text_tokens: int | None = None

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        check_seed(self.seed)
        check_size(self.width, self.height)
        check_steps(self.steps)
        if self.guidance is not None:
            check_guidance(self.guidance)
        if self.true_cfg is not None:
            check_guidance(self.true_cfg)
        if self.negative is not None:
            check_prompt(self.negative)
        if self.text_tokens is not None:
            check_text_tokens(self.text_tokens)

    @property
    def size(self) -> Size:
        return Size(self.width, self.height)


def call_arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """The keyword arguments of the pipeline's call, or an error for a setting that it would silently ignore."""
    known = inspect.signature(type(pipe).__call__).parameters
    remedy = "use a text-to-image pipeline such as FluxPipeline or ZImagePipeline"
    for name in _NEEDED:
        if name not in known:
            raise UnsupportedPipelineError(f"{type(pipe).__name__} takes no {name!r}; {remedy}")
    for name in _PICTURES:
        if name in known:
            raise UnsupportedPipelineError(f"{type(pipe).__name__} wants {_PICTURES[name]}; {remedy}")
    arguments: dict[str, Any] = {
        "prompt": request.prompt,
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
    }
    for value, name, word in (
        (request.guidance, "guidance_scale", "guidance"),
        (request.negative, "negative_prompt", "negative prompt"),
        (request.true_cfg, "true_cfg_scale", "true CFG scale"),
        (request.text_tokens, "max_sequence_length", "text length"),
    ):
        if value is None:
            continue
        if name not in known:
            raise ArgumentError(f"{type(pipe).__name__} takes no {word}; leave it out")
        arguments[name] = value
    if request.negative is not None:
        _check_negative(pipe, request, known)
    elif request.true_cfg not in (None, 1):  # at 1 there is no guidance, whatever the negative prompt
        raise ArgumentError(
            f"{type(pipe).__name__} ignores the true CFG scale {request.true_cfg:g} without a negative prompt; "
            "give one (--negative TEXT) or leave the scale out"
        )
    _check_position_tables(pipe, request.size)
    return arguments


def _check_position_tables(pipe: Any, size: Size) -> None:
    """Z-Image looks positions up in tables; beyond their end a GPU stops the whole process by an assertion."""
    lengths = getattr(getattr(getattr(pipe, "transformer", None), "config", None), "axes_lens", None)
    if lengths is None:
        return
    for name, value, positions in (("width", size.width, lengths[2]), ("height", size.height, lengths[1])):
        if value > MULTIPLE * positions:
            raise ArgumentError(
                f"{name} {value} is more than this model has positions for; {MULTIPLE * positions} is its most"
            )


def _check_negative(pipe: Any, request: Request, known: Any) -> None:
    if "true_cfg_scale" in known and not (request.true_cfg or 0) > 1:
        raise ArgumentError(
            f"{type(pipe).__name__} ignores a negative prompt unless the true CFG scale is above 1; "
            "set it (--true-cfg 4) or leave the negative prompt out"
        )
    if "true_cfg_scale" not in known and request.guidance == 0:
        raise ArgumentError("a negative prompt has no effect at guidance 0; set a guidance or leave the prompt out")
