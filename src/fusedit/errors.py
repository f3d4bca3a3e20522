"""Every exception that fusedit raises on purpose.

FuseditError
|-- UsageError (ValueError)            the caller asked for something that cannot be done; command line exit code 2
|   |-- UnsupportedPipelineError       no diffusers pipeline, or a class that no file of models/ serves
|   |-- PlanError                      unknown plan, rewrite, key or schema version
|   |-- ModelNotFoundError             no embedded model, directory or hub id of that name
|   |-- ArgumentError                  a size, step count, seed, guidance or prompt out of range
|   |-- RestoreError                   the weights that an fp8 plan replaced are gone, or held by a hook
|   |-- OutputError                    a place that cannot be written, or a file there that is not from fusedit
|   |-- LoraError                      no LoRA file, a damaged one, or one for another model
|   `-- MissingExtraError              an optional dependency is not installed
|-- OpError (ValueError)               an op was given a tensor it cannot take; names the argument and its shape
|-- NonFiniteError (ArithmeticError)   NaN or infinity in weights, latents or pixels; names the step and the rewrite
`-- DeviceMemoryError (RuntimeError)   the device ran out of memory; the pipeline is left usable

Each message is one sentence that says what was wrong, with the value, and what to do about it.
"""

from __future__ import annotations


class FuseditError(Exception):
    """Root of the tree: `except FuseditError` catches everything fusedit raises on purpose."""


class UsageError(FuseditError, ValueError):
    """The caller asked for something that cannot be done. Nothing was changed or written."""


class UnsupportedPipelineError(UsageError):
    """The object is no diffusers pipeline, or none of its components is served by a file of models/."""


class PlanError(UsageError):
    """The plan names an unknown tier, rewrite or key, or was written by a newer version."""


class ModelNotFoundError(UsageError):
    """No embedded model, local directory or hub id has this name."""


class ArgumentError(UsageError):
    """A size, step count, image count, seed, guidance scale, prompt or threshold is out of range."""


class RestoreError(UsageError):
    """The original weights were dropped, are not what was converted, or cannot be put back now. Nothing was changed."""


class OutputError(UsageError):
    """The output path cannot be written."""


class LoraError(UsageError):
    """A LoRA file is missing, damaged, refused or for another model, nothing of it fits, or a layer over e4m3 weights
    does something else than its matrices say. Nothing was changed."""


class MissingExtraError(UsageError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class OpError(FuseditError, ValueError):
    """A tensor handed to an op has the wrong shape, dtype or device; the message names the argument."""


class NonFiniteError(FuseditError, ArithmeticError):
    """NaN or infinity appeared where a picture was being made.

    Attributes:
        step: zero-based denoising step, or None when it happened outside the denoising loop.
        stage: `weights`, `latents` or `pixels`.
        rewrite: name of the rewrite that causes it, or None when stock shows it too (or it was not searched for).
    """

    def __init__(self, message: str, *, stage: str, step: int | None = None, rewrite: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.step = step
        self.rewrite = rewrite


class DeviceMemoryError(FuseditError, RuntimeError):
    """The device ran out of memory. The message says what would help; the pipeline stays usable."""
