"""What each model draws best with when the caller does not say: size, steps, guidance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusedit.request import Request
from fusedit.validation import Size, check_guidance, check_prompt, check_size, check_steps


@dataclass(frozen=True)
class Defaults:
    """What a model draws best with.

    Attributes:
        size: pixels.
        steps: denoising steps.
        guidance: guidance scale, or None where the pipeline takes none.
        text_tokens: text lengths it was trained with, shortest first; empty: the pipeline's own default. FLUX attends
            to padding, so the length is part of the picture, and the shortest one that holds the prompt is the best.
    """

    size: Size
    steps: int
    guidance: float | None
    text_tokens: tuple[int, ...] = ()


MODELS: Final = {
    "tiny-flux": Defaults(Size(256, 256), 20, 3.5, (32, 128, 512)),
    "tiny-z-image": Defaults(Size(256, 256), 9, 0.0),
}
_CLASSES: Final = {
    "FluxPipeline": Defaults(Size(1024, 1024), 28, 3.5),
    "ZImagePipeline": Defaults(Size(1024, 1024), 9, 0.0),
}
_OTHER: Final = Defaults(Size(1024, 1024), 28, None)
_DISTILLED_STEPS: Final = 4  # FLUX.1-schnell: no guidance embedding, made for four steps


def model_name(pipe: Any) -> str:
    """The embedded model's name, the hub id, the last part of a local path, or the pipeline's class."""
    origin = str(getattr(pipe.config, "_name_or_path", "") or "")
    if not origin:
        return type(pipe).__name__
    path = Path(origin)
    if path.is_dir():
        from fusedit.loading import embedded_models

        for name, folder in embedded_models().items():
            if path.resolve() == folder.resolve():
                return name
        return path.resolve().name
    return origin


def defaults_for(pipe: Any) -> Defaults:
    """The defaults of this pipeline, by its model's name where that is embedded, else by its class."""
    known = MODELS.get(model_name(pipe))
    if known is not None:
        return known
    found = _CLASSES.get(type(pipe).__name__, _OTHER)
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    if type(pipe).__name__ == "FluxPipeline" and not getattr(config, "guidance_embeds", True):
        return Defaults(found.size, _DISTILLED_STEPS, 0.0)
    return found


def request_for(
    pipe: Any,
    prompt: str,
    seed: int,
    *,
    width: int | None = None,
    height: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    negative: str | None = None,
    true_cfg: float | None = None,
    text_tokens: int | None = None,
) -> Request:
    """A request with every None filled in from the model's defaults. 0 and "" are values and stay.

    Raises:
        ArgumentError: any value is out of range; one of width and height alone takes the other from the default.
    """
    for text in (prompt, "" if negative is None else negative):
        check_prompt(text)  # before it is tokenized
    default = defaults_for(pipe)
    size = check_size(
        default.size.width if width is None else width,
        default.size.height if height is None else height,
        multiple=multiple_of(pipe),
    )
    return Request(
        prompt=prompt,
        seed=seed,
        width=size.width,
        height=size.height,
        steps=default.steps if steps is None else check_steps(steps),
        guidance=default.guidance if guidance is None else check_guidance(guidance),
        negative=negative,
        true_cfg=true_cfg,
        text_tokens=_text_tokens(pipe, default, (prompt, negative or "")) if text_tokens is None else text_tokens,
    )


def _text_tokens(pipe: Any, default: Defaults, texts: tuple[str, ...]) -> int | None:
    """The shortest length the model knows that cuts nothing off these texts; None leaves it to the pipeline."""
    if not default.text_tokens:
        return None
    needed = max(len(pipe.tokenizer_2(text, truncation=False).input_ids) for text in texts)
    return next((length for length in default.text_tokens if length >= needed), default.text_tokens[-1])


def multiple_of(pipe: Any) -> int:
    """What width and height must be multiples of: 16, or more where the VAE shrinks by more than 8."""
    return max(16, 2 * int(getattr(pipe, "vae_scale_factor", 8)))


def guidance_note(pipe: Any, guidance: float | None) -> str | None:
    """A note when a guidance scale was asked for that this checkpoint cannot follow."""
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    if guidance is not None and getattr(config, "guidance_embeds", None) is False:
        return f"warning: this checkpoint has no guidance embedding: guidance {guidance:g} has no effect on it"
    return None
