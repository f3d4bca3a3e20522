"""The one place that says what a size, step count, seed, guidance scale, prompt or threshold may be.

The command line and the Python functions share these checks, so both give the same sentence. No check changes its
input, rounds it or fills in a default: 0 is a guidance scale, "" is a prompt. Nothing here imports torch.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from fusedit.errors import ArgumentError

MULTIPLE: Final = 16  # VAE factor 8 times patch 2: a size between the multiples would be rounded by the pipeline
MAX_SEED: Final = 2**63 - 1  # what torch.Generator.manual_seed takes without wrapping a negative number around
MAX_STEPS: Final = 1000  # the levels of noise that the models were trained on
MAX_TEXT_TOKENS: Final = 512
DTYPES: Final = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_HALF: Final = ("fp16", "float16", "half")
_SIZE: Final = re.compile(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", re.ASCII)


class Size(NamedTuple):
    """A picture size in pixels; prints as WIDTHxHEIGHT."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    """`"320x256"` -> Size(width=320, height=256).

    Raises:
        ArgumentError: not WIDTHxHEIGHT, zero, or not a multiple of 16.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ArgumentError(f"size {text!r} is not WIDTHxHEIGHT in pixels, for example 256x256")
    return check_size(int(match[1]), int(match[2]))


def check_size(width: Any, height: Any, multiple: int = MULTIPLE) -> Size:
    """The size, or an error that names the two nearest lengths that work. Nothing is rounded.

    Args:
        width: pixels.
        height: pixels.
        multiple: what both must be a multiple of; 16 for every model served here.
    """
    sides = [_whole(value, name) for name, value in (("width", width), ("height", height))]
    for name, value in zip(("width", "height"), sides, strict=True):
        if value < 1:
            raise ArgumentError(f"{name} is {value}; give a positive multiple of {multiple}")
        if value % multiple:
            below = value // multiple * multiple
            near = (below, below + multiple) if below else (multiple, 2 * multiple)
            raise ArgumentError(
                f"{name} {value} is not a multiple of {multiple}; the nearest that work are {near[0]} and {near[1]}"
            )
    return Size(*sides)


def check_steps(steps: Any) -> int:
    """A number of denoising steps: 1 to 1000, the levels of noise that these models know."""
    value = _whole(steps, "steps")
    if not 1 <= value <= MAX_STEPS:
        raise ArgumentError(f"steps is {value}; give 1 to {MAX_STEPS}")
    return value


def check_count(count: Any) -> int:
    """A number of pictures: 1 or more."""
    value = _whole(count, "count")
    if value < 1:
        raise ArgumentError(f"count is {value}; give 1 or more")
    return value


def check_seed(seed: Any) -> int:
    """A seed: 0 to 2**63 - 1."""
    value = _whole(seed, "seed")
    if not 0 <= value <= MAX_SEED:
        raise ArgumentError(f"seed {value} is out of range; give 0 to {MAX_SEED}")
    return value


def check_seeds(seeds: Any) -> tuple[int, ...]:
    """One or more different seeds, as a tuple of their own."""
    if isinstance(seeds, numbers.Integral | str | bytes) or not isinstance(seeds, Iterable):
        raise ArgumentError(f"seeds must be a list of whole numbers, not {seeds!r}; for one seed give a list of one")
    values = tuple(check_seed(seed) for seed in seeds)
    if not values:
        raise ArgumentError("seeds is empty; give at least one, for example [0]")
    twice = [seed for position, seed in enumerate(values) if seed in values[:position]]
    if twice:
        raise ArgumentError(f"seed {twice[0]} is given twice; every seed makes one picture of each prompt")
    return values


def check_guidance(guidance: Any) -> float:
    """A guidance scale: finite, 0 or more. 0 is a value of its own, never "use the default"."""
    if isinstance(guidance, bool) or not isinstance(guidance, numbers.Real):
        raise ArgumentError(f"guidance must be a number, not {guidance!r}")
    value = float(guidance)
    if not math.isfinite(value) or value < 0:
        raise ArgumentError(f"guidance is {value:g}; give a finite number, 0 or more")
    return value


def check_text_tokens(length: Any) -> int:
    """A text length in tokens: 1 to 512, what the pipelines take."""
    value = _whole(length, "text tokens")
    if not 1 <= value <= MAX_TEXT_TOKENS:
        raise ArgumentError(f"text tokens is {value}; give 1 to {MAX_TEXT_TOKENS}")
    return value


def check_prompt(prompt: Any) -> str:
    """A prompt. The empty prompt is valid."""
    if not isinstance(prompt, str):
        raise ArgumentError(f"a prompt must be text, not {type(prompt).__name__}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8 become lone surrogates
        wrong = ascii(error.object[error.start])
        raise ArgumentError(
            f"a prompt must be valid Unicode text; its character {error.start + 1} is {wrong}, half of a surrogate pair"
        ) from None
    return prompt


def check_prompts(prompts: Any) -> tuple[str, ...]:
    """One prompt or several, as a tuple of their own, so that nothing downstream can change the caller's list."""
    if isinstance(prompts, str):
        return (check_prompt(prompts),)
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ArgumentError(f"prompts must be text or a list of texts, not {type(prompts).__name__}")
    values = tuple(check_prompt(prompt) for prompt in prompts)
    if not values:
        raise ArgumentError('prompts is empty; give at least one ("" is a prompt)')
    return values


def check_psnr(value: Any, name: str = "min_psnr") -> float:
    """A PSNR gate in dB: a number, 0 or more; infinity asks for identical pictures."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise ArgumentError(f"{name} is {value!r}; give decibels, 0 or more")
    return float(value)


def check_ssim(value: Any, name: str = "min_ssim") -> float:
    """An SSIM gate: -1 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not -1 <= float(value) <= 1:
        raise ArgumentError(f"{name} is {value!r}; give a number from -1 to 1")
    return float(value)


def check_choice(value: Any, allowed: Iterable[str], name: str) -> str:
    """One of a few words."""
    known = tuple(allowed)
    if value not in known:
        raise ArgumentError(f"{name} is {value!r}; give one of {', '.join(known)}")
    return str(value)


def dtype_name(dtype: Any) -> str:
    """`float32` or `bfloat16` from a torch.dtype or its name (fp32, bf16, ...).

    fp16 is refused: both models overflow it, and stock then returns a black picture without a word.
    """
    name = str(dtype).removeprefix("torch.")
    if name in _HALF:
        raise ArgumentError("dtype fp16 overflows in these models and draws black pictures; use bf16 or fp32")
    if name not in DTYPES:
        raise ArgumentError(f"dtype {name!r} is not known; give fp32 or bf16")
    return DTYPES[name]


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{name} must be a whole number, not {value!r}")
    return int(value)
