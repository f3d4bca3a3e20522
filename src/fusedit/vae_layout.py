"""What a memory layout costs and brings in a VAE, measured stage by stage, and what follows from the numbers.

The decoder and the encoder of one AutoencoderKL, each three ways (see vae_stages): stock in NCHW, stock in NHWC
(channels_last), and the fused ops. No other part of the pipeline is loaded.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch

from fusedit.environment import environment
from fusedit.errors import DeviceMemoryError, ModelNotFoundError, UnsupportedPipelineError
from fusedit.finite import bad_weight, weight_error
from fusedit.loading import _choices, _short, _source, quiet_loading
from fusedit.progress import Progress
from fusedit.quality.metrics import relative_l2
from fusedit.quality.words import small
from fusedit.vae_stages import (
    VARIANTS,
    Conversions,
    Times,
    Variant,
    count_conversions,
    layouts_of,
    no_tf32,
    time_all,
    variants,
)
from fusedit.validation import MULTIPLE, Size, check_size

T = TypeVar("T")
Tensor = torch.Tensor
RANDOM: Final = "random-flux"
FLUX_1_DEV: Final[dict[str, Any]] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
"""The configuration of FLUX.1-dev's AutoencoderKL; Z-Image-Turbo's is the same."""
SLACK: Final = 1.05
"""In bf16: how much of stock's own error against fp32 the fused one may have."""
LIMIT_FP32: Final = 1e-4
RESULTS: Final = {"decode": "picture", "encode": "latents"}


@dataclass(frozen=True)
class Check:
    """How right the results are.

    Attributes:
        reference: what they are held against.
        errors: variant -> relative L2, None for the reference itself; the worse of stage by stage and in one go.
        limit: the most that `fused` may have; None where there is nothing to judge by.
        passed: None where it was not judged.
    """

    reference: str
    errors: dict[str, float | None]
    limit: float | None
    passed: bool | None

    @property
    def sentence(self) -> str:
        against = f"fused differs from {self.reference} by {small(self.errors['fused'])} (relative L2)"
        if self.passed is None:
            return f"not judged: {against}, and stock's own error is not known"
        stock = self.errors["nchw"]
        own = "" if stock is None else f", stock by {small(stock)}"
        return f"{'passed' if self.passed else 'FAILED'}: {against}{own}; the most it may is {small(self.limit)}"


@dataclass(frozen=True)
class Pass:
    """Decode or encode.

    Attributes:
        what: `decode` or `encode`.
        shape: of the input.
        parts: the input's conversion, each stage, the result's conversion, by name.
        times: variant -> milliseconds of these parts, and of all in one go.
        check: how right the results are.
        layouts: variant -> how the result of each stage lies in memory: `NCHW`, `NHWC` or `neither`.
        conversions: variant -> those inside the stages; None: not measured, and `unmeasured` says why.
        unmeasured: empty where they were.
    """

    what: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    times: dict[str, Times]
    check: Check
    layouts: dict[str, tuple[str, ...]]
    conversions: dict[str, tuple[Conversions, ...]] | None = None
    unmeasured: str = ""

    @property
    def stages(self) -> range:
        """Places of the stages among the parts."""
        return range(1, len(self.parts) - 1)

    def ms(self, variant: str) -> list[float | None]:
        """Milliseconds of each part; None for conversions in NCHW, where there are none."""
        figures = self.times[variant].parts
        return [None if variant == "nchw" and i not in self.stages else f.ms for i, f in enumerate(figures)]

    def sum_ms(self, variant: str) -> float:
        return sum(ms for ms in self.ms(variant) if ms is not None)

    def fastest(self) -> dict[str, str] | None:
        """Stage -> variant; None unless the check is green."""
        if not self.check.passed:
            return None
        columns = {variant: self.ms(variant) for variant in VARIANTS}
        return {self.parts[i]: min(VARIANTS, key=lambda v: columns[v][i] or 0.0) for i in self.stages}

    def speedup(self) -> dict[str, float] | None:
        """Variant -> how many times as fast as stock in NCHW, all in one go; None unless the check is green."""
        if not self.check.passed:
            return None
        whole = {variant: self.times[variant].whole.ms for variant in VARIANTS}
        return {variant: whole["nchw"] / whole[variant] for variant in ("nhwc", "fused")}

    def to_dict(self) -> dict[str, Any]:
        fastest, speedup = self.fastest(), self.speedup()
        columns = {variant: self._column(variant) for variant in VARIANTS}
        return {
            "what": self.what,
            "shape": list(self.shape),
            "parts": [
                {
                    "name": name,
                    "kind": "stage" if i in self.stages else "conversion",
                    **{variant: columns[variant][i] for variant in VARIANTS},
                    "fastest": (fastest or {}).get(name),
                }
                for i, name in enumerate(self.parts)
            ],
            "layouts": {variant: list(found) for variant, found in self.layouts.items()},
            "sum_ms": {variant: self.sum_ms(variant) for variant in VARIANTS},
            "whole": {variant: self.times[variant].whole._asdict() for variant in VARIANTS},
            "laps": {variant: self.times[variant].laps for variant in VARIANTS},
            "host_bound": [variant for variant in VARIANTS if self.times[variant].host_bound],
            "conversions": None
            if self.conversions is None
            else {variant: [one._asdict() for one in found] for variant, found in self.conversions.items()},
            "conversions_unmeasured": self.unmeasured or None,
            "check": {**vars(self.check), "sentence": self.check.sentence},
            "speedup": speedup,
            "chosen": None if fastest is None else {"fastest": fastest, "accelerate": "fused"},
        }

    def _column(self, variant: str) -> list[dict[str, float] | None]:
        figures = self.times[variant].parts
        return [None if ms is None else f._asdict() for ms, f in zip(self.ms(variant), figures, strict=True)]


@dataclass(frozen=True)
class Layouts:
    """All that was measured of one model."""

    model: str
    device: torch.device
    dtype: str
    size: Size
    batch: int
    passes: tuple[Pass, ...]

    @property
    def random(self) -> bool:
        return self.model == RANDOM

    @property
    def passed(self) -> bool:
        """No check is red."""
        return all(one.check.passed is not False for one in self.passes)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{"model": self.model, "random_weights": self.random, "device": self.device.type},
            **{"dtype": self.dtype, "size": str(self.size), "batch": self.batch, "passed": self.passed},
            "passes": [one.to_dict() for one in self.passes],
            "environment": environment(self.device),
        }


# -- what is measured ------------------------------------------------------------------------------------------------


def load_vae(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The AutoencoderKL of a model alone: an embedded one, a local diffusers directory, a hub id, or `random-flux`.

    Raises:
        ModelNotFoundError: no such model, or the hub does not give its VAE.
        UnsupportedPipelineError: it has no VAE, one of another class, or one that cannot be loaded.
        NonFiniteError: a weight holds NaN or infinity.
    """
    from diffusers import AutoencoderKL

    if name == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            vae: Any = AutoencoderKL(**FLUX_1_DEV)  # type: ignore[no-untyped-call]
        with quiet_loading():  # diffusers advises against another dtype
            return vae.to(device, dtype).eval().requires_grad_(False)
    source = _source(name)
    if Path(source).is_dir() and not (Path(source) / "vae" / "config.json").is_file():
        raise UnsupportedPipelineError(f"{name!r} has no vae/config.json, so no VAE to measure; name another model")
    failure: str | None = None
    try:
        with quiet_loading(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the hub's library about how it was called
            config: Any = AutoencoderKL.load_config(source, subfolder="vae")
            found = config.get("_class_name")
            if found == "AutoencoderKL":
                vae = AutoencoderKL.from_pretrained(source, subfolder="vae", torch_dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        failure = _short(error)
    if failure is not None and Path(source).is_dir():
        raise UnsupportedPipelineError(f"the VAE of {name!r} cannot be loaded: {failure}; save it again")
    if failure is not None:
        raise ModelNotFoundError(
            f"the VAE of hub model {name!r} is not in the local cache and the hub did not give it; check the name, "
            f"its licence and the network, or {_choices()}"
        )
    if found != "AutoencoderKL":
        raise UnsupportedPipelineError(f"the VAE of {name!r} is {found}; only AutoencoderKL can be measured")
    bad = bad_weight(SimpleNamespace(components={"vae": vae}))
    if bad is not None:
        raise weight_error(bad)
    return vae.to(device).eval().requires_grad_(False)


def inputs(vae: Any, what: str, size: Size, batch: int) -> Tensor:
    """Random latents as a pipeline hands them to the decoder, or a random picture from -1 to 1; the same each time."""
    config, generator = vae.config, torch.Generator("cpu").manual_seed(0)
    if what == "encode":
        x = 2 * torch.rand(batch, config.in_channels, size.height, size.width, generator=generator) - 1
    else:
        side = _factor(vae)
        shape = (batch, config.latent_channels, size.height // side, size.width // side)
        x = torch.randn(shape, generator=generator) / config.scaling_factor + (config.shift_factor or 0.0)
    return x.to(vae.device, vae.dtype)


def _factor(vae: Any) -> int:
    return int(2 ** (len(vae.config.block_out_channels) - 1))


@torch.no_grad()
def measure(
    vae: Any,
    model: str,
    size: Size,
    *,
    batch: int = 1,
    what: Sequence[str] = ("decode", "encode"),
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> Layouts:
    """Check and time each pass, then count the conversions of all of them.

    Raises:
        ArgumentError: the size does not fit this VAE.
        UnsupportedPipelineError: the fused forward does not serve it.
        DeviceMemoryError: the device is too small.
    """
    check_size(*size, multiple=max(MULTIPLE, _factor(vae)))
    progress = progress or Progress()
    device = torch.device(vae.device)
    passes = [_on(device, partial(_measure, vae, w, size, batch, seconds, progress), f"{w} at {size}") for w in what]
    if device.type == "cuda":  # last, since a process that has profiled launches more slowly
        passes = [_on(device, partial(_count, vae, one, size, batch), f"{one.what} at {size}") for one in passes]
    else:
        passes = [replace(one, unmeasured="not measured on a CPU") for one in passes]
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[vae.dtype]
    return Layouts(model, device, dtype, size, batch, tuple(passes))


def _measure(vae: Any, what: str, size: Size, batch: int, seconds: float, progress: Progress) -> Pass:
    x = inputs(vae, what, size, batch)
    module = vae.decoder if what == "decode" else vae.encoder
    made = variants(module, what, x)
    progress.begin(what, 2)
    progress.picture("checking")
    found = check(module, made, x)
    layouts = {variant.name: layouts_of(variant, x) for variant in made}
    _free(x.device)
    progress.finish_picture()
    progress.picture("timing")
    times = time_all(made, x, seconds)
    progress.finish_picture()
    stages = [name for name, _ in made[0].stages]
    parts = ("input to NHWC", *stages, f"{RESULTS[what]} to NCHW")
    return Pass(what, tuple(x.shape), parts, times, found, layouts)


def check(module: Any, made: Sequence[Variant], x: Tensor) -> Check:
    """Every variant against stock in NCHW in fp32, without TF32; in fp32 that is the first variant itself."""
    with no_tf32():
        exact = None if x.dtype == torch.float32 else _in_fp32(module, x)
        reference = "stock in NCHW" + (" and fp32" if exact is not None or x.dtype == torch.float32 else "")
        held = exact if exact is not None else made[0].run(x)
        errors = {
            one.name: None
            if exact is None and one.name == "nchw"
            else _worst(relative_l2(held, one.run(x)), relative_l2(held, one.whole(x)))
            for one in made
        }
    stock, fused = errors["nchw"], errors["fused"]
    limit = LIMIT_FP32 if x.dtype == torch.float32 else None if stock is None else SLACK * stock
    return Check(reference, errors, limit, None if limit is None or fused is None else fused <= limit)


def _worst(*errors: float) -> float:
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _in_fp32(module: Any, x: Tensor) -> Tensor | None:
    """One picture at a time, so that it fits; None where it does not."""
    try:
        whole = copy.deepcopy(module).float()
        return torch.cat([whole(one.float()) for one in torch.split(x, 1)])
    except (torch.OutOfMemoryError, MemoryError):
        return None


def _count(vae: Any, one: Pass, size: Size, batch: int) -> Pass:
    x = inputs(vae, one.what, size, batch)
    found = {}
    for variant in variants(vae.decoder if one.what == "decode" else vae.encoder, one.what, x):
        counted = count_conversions(variant, x)
        if counted is None:
            return replace(one, unmeasured="not measured: the profiler saw no kernel, for want of a permission perhaps")
        found[variant.name] = counted
    return replace(one, conversions=found)


def _on(device: torch.device, call: Callable[[], T], doing: str) -> T:
    """`call()`, with running out of memory turned into an error that keeps no tensor alive."""
    try:
        return call()
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # how a CPU says it
            raise
    finally:
        _free(device)
    raise DeviceMemoryError(f"{device.type} ran out of memory in {doing}; give a smaller --size or --batch")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
