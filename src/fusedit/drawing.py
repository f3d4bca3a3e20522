"""The one place that runs a pipeline: one prompt, one seed, one picture, timed and checked for NaN and infinity.

`draw` makes the same call a user would make, with one CPU generator a picture, so that a picture depends on its own
seed alone and never on the batch or the device it is drawn on. While it runs, two attributes of this pipeline object
are shadowed and put back afterwards: `progress_bar` (which also tells when the loop begins) and the image processor's
`postprocess` (the last place where infinity is still visible: after it, pixels are clamped to [0, 1]).
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fusedit.errors import DeviceMemoryError, NonFiniteError
from fusedit.finite import explain, is_finite
from fusedit.request import Request, call_arguments
from fusedit.timing import Lap, StepClock
from fusedit.validation import Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
OnStep = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True, eq=False)
class Drawing:
    """One finite picture and what it took.

    Attributes:
        pixels: float32 [height, width, 3] in [0, 1], as the pipeline's own postprocessing gives them.
        latents: the last latents, float32 on the CPU, in the pipeline's own layout.
        lap: times and memory peak.
    """

    pixels: NDArray[np.float32]
    latents: torch.Tensor
    lap: Lap

    @property
    def size(self) -> Size:
        return Size(self.pixels.shape[1], self.pixels.shape[0])


def draw(pipe: Any, request: Request, *, on_step: OnStep | None = None, noise: torch.Tensor | None = None) -> Drawing:
    """Draw one picture.

    Args:
        pipe: a diffusers text-to-image pipeline, stock or accelerated.
        request: what to draw.
        on_step: called after every step with (steps done, steps in all).
        noise: initial latents in the pipeline's own layout; None lets the pipeline draw them from the seed.

    Raises:
        NonFiniteError: NaN or infinity in the weights, the latents (with the step) or the pixels.
        DeviceMemoryError: the device ran out of memory; the pipeline is usable again.
        ArgumentError: the pipeline takes no such setting.
        UnsupportedPipelineError: not a text-to-image pipeline that reports its steps.
    """
    arguments = call_arguments(pipe, request)
    arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
    if noise is not None:
        arguments["latents"] = noise.clone()
    watch = _Watch(pipe, request, on_step)

    def call() -> tuple[Any, Lap]:
        with watch.installed():
            watch.clock.start()
            output = pipe(**arguments, output_type="pt", callback_on_step_end=watch.after_step)
            return output.images, watch.clock.stop()

    images, lap = out_of_memory_as_error(call, f"drawing {request.size}", pipe)
    pixels = images[0].detach().float().permute(1, 2, 0).cpu().contiguous().numpy()
    watch.check_pixels(images)
    return Drawing(pixels=pixels, latents=watch.latents.detach().float().cpu().clone(), lap=lap)


def initial_noise(pipe: Any, request: Request) -> torch.Tensor:
    """The latents that the pipeline would start from for this request, in its own layout and dtype."""
    channels = pipe.transformer.config.in_channels // (4 if _packs_latents(pipe) else 1)
    generator = torch.Generator("cpu").manual_seed(request.seed)
    dtype = pipe.text_encoder_2.dtype if _packs_latents(pipe) else torch.float32  # FLUX: that of the T5 embeddings
    device = pipe._execution_device
    made = pipe.prepare_latents(1, channels, request.height, request.width, dtype, device, generator)
    latents = made[0] if isinstance(made, tuple) else made
    assert isinstance(latents, torch.Tensor)
    return latents


def device_of(pipe: Any) -> torch.device:
    """Where the pipeline computes, also when its parts wait on the CPU (offload)."""
    return torch.device(pipe._execution_device)


class _Watch:
    """Follows one call: its clock, its progress, its last latents, and whether everything stayed finite."""

    def __init__(self, pipe: Any, request: Request, on_step: OnStep | None) -> None:
        self.pipe = pipe
        self.request = request
        self.on_step = on_step
        self.clock = StepClock(device_of(pipe))
        self.flags: list[torch.Tensor] = []
        self.latents = torch.empty(0)
        self.total = request.steps

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_shadowed(self.pipe, "progress_bar", self._progress_bar))
            processor = getattr(self.pipe, "image_processor", None)
            if processor is not None:
                stock = processor.postprocess

                def postprocess(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                    self.check_pixels(image)
                    return stock(image, *args, **kwargs)

                stack.enter_context(_shadowed(processor, "postprocess", postprocess))
            yield

    def _progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        self.total = total or self.total
        self.clock.loop()
        return _SilentBar(iterable)

    def after_step(self, _pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        self.clock.tick()
        self.latents = values["latents"]
        self.flags.append(torch.isfinite(self.latents).all())
        # Asking the GPU would stop its queue after every step: there the flags are read once, before decoding.
        if not self.clock.on_gpu or step + 1 >= self.total:
            self._check_latents()
        if self.on_step is not None:
            self.on_step(step + 1, self.total)
        return {}

    def _check_latents(self) -> None:
        good = torch.stack(self.flags).tolist()
        if not all(good):
            raise self._error("latents", good.index(False))

    def check_pixels(self, image: torch.Tensor) -> None:
        if not is_finite(image):
            raise self._error("pixels", None)

    def _error(self, stage: str, step: int | None) -> NonFiniteError:
        return explain(self.pipe, stage=stage, step=step, steps=self.total)


@contextlib.contextmanager
def silenced(pipe: Any) -> Iterator[None]:
    """Inside the block the pipeline shows no progress of its own."""
    with _shadowed(pipe, "progress_bar", lambda iterable=None, total=None: _SilentBar(iterable)):  # noqa: ARG005
        yield


class _SilentBar:
    """Stands in for tqdm while fusedit shows its own progress."""

    def __init__(self, iterable: Any = None) -> None:
        self.iterable = iterable

    def __enter__(self) -> _SilentBar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def update(self, n: int = 1) -> None:
        del n


@contextlib.contextmanager
def _shadowed(target: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute over a class attribute, for the length of a `with`; whatever was there comes back."""
    missing = object()
    before = vars(target).get(name, missing)
    vars(target)[name] = value
    try:
        yield
    finally:
        if before is missing:
            vars(target).pop(name, None)
        else:
            vars(target)[name] = before


def _packs_latents(pipe: Any) -> bool:
    return hasattr(pipe, "_pack_latents")  # FLUX: 2x2 patches in the channel dimension


def out_of_memory_as_error(call: Callable[[], T], doing: str, pipe: Any) -> T:
    """`call()`, with running out of memory turned into a DeviceMemoryError that keeps no tensor alive."""
    failure: str | None = None
    try:
        return call()
    except (torch.OutOfMemoryError, MemoryError) as error:
        failure = _amount(error)
    except NonFiniteError:
        _free(pipe)
        raise
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # how a CPU says it: torch has no class of its own for that
            raise
        failure = _amount(error)
    # Raised out here, where the exception has no context: its traceback would hold the tensors of the failed call.
    del call
    _free(pipe)
    remedies = "a smaller size, bf16 or pipe.enable_model_cpu_offload()"
    if device_of(pipe).type == "cpu":
        remedies = "a smaller size"
    raise DeviceMemoryError(f"out of memory {doing}{failure}; {remedies} would help")


def rest(pipe: Any) -> None:
    """Offloaded components go back to where they wait, as at the end of a call: a call that fails leaves that out."""
    hooks = getattr(pipe, "maybe_free_model_hooks", None)
    if hooks is not None:
        hooks()


def _free(pipe: Any) -> None:
    """After a failed call: offload hooks back to their resting place, cached device memory back to the device."""
    rest(pipe)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _amount(error: BaseException) -> str:
    """How much was asked for at once, as torch and numpy say it, or nothing."""
    found = re.search(r"allocate ([\d.]+ (?:[KMGTPE]i?B|bytes))", str(error))
    return f" ({found[1]} asked for at once)" if found else ""
