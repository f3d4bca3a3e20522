"""load(): a pipeline by the name of an embedded model, a local directory or a hub id. diffusers does the loading."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fusedit.errors import (
    ArgumentError,
    DeviceMemoryError,
    FuseditError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedPipelineError,
)
from fusedit.validation import dtype_name

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from fusedit.lora.option import LoraOption

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_CHECKED_BYTES: Final = 1 << 30  # weights up to this size are checked for NaN at once; larger ones when a picture fails
_SINGLE_FILES: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")


def embedded_models() -> dict[str, Path]:
    """Name -> directory of the models that come with fusedit."""
    from fusedit import assets

    return dict(assets.embedded_models())


def load(
    name: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> DiffusionPipeline:
    """Load a diffusers pipeline, stock, on its device and without a progress bar in a pipe.

    Args:
        name: an embedded model (`tiny-flux`, `tiny-z-image`), a local diffusers directory, or a hub id `owner/name`.
        dtype: torch.float32 or torch.bfloat16, or `fp32` or `bf16`; None: bf16 on a GPU, fp32 on a CPU.
        device: None: the GPU where there is one, else the CPU.

    Raises:
        ModelNotFoundError: no such name, directory or hub id, or the hub cannot be reached.
        UnsupportedPipelineError: the directory is no complete diffusers pipeline.
        NonFiniteError: a weight holds NaN or infinity (checked here up to 1 GiB; above, when a picture fails).
        ArgumentError: an unknown dtype or device, or fp16.
        DeviceMemoryError: the device is too small.
    """
    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device)
    source = _source(name)
    failure = None
    pipe: Any = None  # diffusers' own methods are not typed
    try:
        pipe = _from_pretrained(source, str(name), chosen_dtype, chosen_device)
        pipe.to(chosen_device)
    except torch.OutOfMemoryError as error:
        failure = str(error).split(". ")[0]
    if failure is not None:
        raise DeviceMemoryError(
            f"{str(name)!r} does not fit on {chosen_device} ({failure}); load it with device='cpu' and "
            "call pipe.enable_model_cpu_offload()"
        )
    _check_weights(pipe)
    return pipe  # type: ignore[no-any-return]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, checked to be there; the GPU if none was asked for and there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device {str(device)!r} is not known; give cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device {str(found)!r} is not supported; give cpu or cuda")
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device 'cuda' is not there: this machine has no usable GPU (fusedit doctor says why)")
    if found.index is not None and found.index >= count:
        raise ArgumentError(f"device {str(found)!r} is not there: this machine has {count}")
    return found


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """torch.float32 or torch.bfloat16; by default bf16 on a GPU and fp32 on a CPU."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found


def _source(name: str | Path) -> str:
    """What from_pretrained gets: the directory of an embedded or local model, or the hub id."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ModelNotFoundError(f"model {name!r} is not a name; {_choices()}")
    text = str(name).rstrip("/") or "/"
    embedded = embedded_models()
    if text in embedded:
        return str(embedded[text])
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise UnsupportedPipelineError(
                f"directory {text!r} has no model_index.json, so it is no diffusers pipeline; give the folder above, "
                "or one written by pipe.save_pretrained()"
            )
        return str(path)
    if path.is_file() or path.suffix in _SINGLE_FILES:
        raise UnsupportedPipelineError(
            f"{text!r} is a single file, not a pipeline directory; load it with FluxPipeline.from_single_file(...) "
            "and pass the pipeline to fusedit.accelerate"
        )
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text) or text.startswith((".", "/")):
        raise ModelNotFoundError(f"model {text!r} does not exist; {_choices()}")
    return text


def _choices() -> str:
    known = ", ".join(embedded_models()) or "none in this installation"
    return f"give an embedded model ({known}), a local diffusers directory, or a hub id owner/name"


def _from_pretrained(source: str, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    from diffusers import DiffusionPipeline
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    local = Path(source).is_dir()
    try:
        with quiet_loading():
            own = _converted_transformer(Path(source), dtype, device) if local else {}
            pipe = DiffusionPipeline.from_pretrained(source, dtype=dtype, **own)  # type: ignore[no-untyped-call]
    except GatedRepoError:
        raise ModelNotFoundError(
            f"hub model {name!r} is gated; accept its licence on its page and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelNotFoundError(f"hub model {name!r} does not exist or is private; {_choices()}") from None
    except FuseditError:  # of our own checkpoints: a sentence already
        raise
    except ImportError as error:
        raise MissingExtraError(f"model {name!r} needs a library that is not installed: {_short(error)}") from None
    except (
        HfHubHTTPError,
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if local:
            raise UnsupportedPipelineError(
                f"directory {name!r} cannot be loaded as a diffusers pipeline: {_short(error)}; save it again"
            ) from None
        if isinstance(error, OSError):  # no network, no such id, no such file: the library's own text is a paragraph
            raise ModelNotFoundError(
                f"hub model {name!r} is not in the local cache and the hub did not give it; "
                f"check the name and the network, or {_choices()}"
            ) from None
        raise ModelNotFoundError(f"hub model {name!r} could not be loaded: {_short(error)}") from None
    return pipe


def _converted_transformer(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The transformer of a folder that `fusedit quantize` wrote, as an argument of from_pretrained; else none."""
    from fusedit.float8 import checkpoint

    precision = checkpoint.marked(folder)
    if precision is None:
        return {}
    return {checkpoint.COMPONENT: checkpoint.load_transformer(folder, precision, dtype, device)}


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """No bars and no advice from the libraries while loading, unless a person watches; their settings come back."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    logs: tuple[Any, ...] = (diffusers_logging, transformers_logging)
    levels = [log.get_verbosity() for log in logs]
    bars = [log.is_progress_bar_enabled() for log in logs]
    for log in logs:
        log.set_verbosity_error()
        if not sys.stderr.isatty():
            log.disable_progress_bar()
    try:
        yield
    finally:
        for log, level, bar in zip(logs, levels, bars, strict=True):
            log.set_verbosity(level)
            if bar:
                log.enable_progress_bar()


def _check_weights(pipe: Any) -> None:
    from fusedit.finite import bad_weight, modules_of, weight_error

    size = sum(p.numel() * p.element_size() for _, module in modules_of(pipe) for p in module.parameters())
    if size <= _CHECKED_BYTES:
        bad = bad_weight(pipe)
        if bad is not None:
            raise weight_error(bad)


def _short(error: BaseException) -> str:
    """The first sentence of somebody else's error, without its paragraphs of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". ")[0].rstrip(".")[:200] if lines else type(error).__name__


def load_for(
    name: str, *, dtype: str | None, device: str | None, loras: Sequence[LoraOption] = ()
) -> DiffusionPipeline:
    """load(), with LoRAs on top: what the command line's --model and --lora mean.

    Raises:
        LoraError: a file is no LoRA or none for this model.
        UnsupportedPipelineError: the pipeline takes none.
    """
    from fusedit.lora import read
    from fusedit.lora.life import load_file

    files = [read(option.file) for option in loras]  # before the model, which takes longer
    pipe = load(name, dtype=dtype, device=device)
    for option, file in zip(loras, files, strict=True):
        load_file(pipe, file, str(option.file), scale=option.scale)
    return pipe
