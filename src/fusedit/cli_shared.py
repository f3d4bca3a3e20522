"""What the commands share: their common options, an error as one sentence and an exit code, and printing."""

from __future__ import annotations

import functools
import json as json_module
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from fusedit.errors import FuseditError, NonFiniteError
from fusedit.termination import CODE, Terminated

Command = TypeVar("Command", bound=Callable[..., Any])

Model = Annotated[str, typer.Option("--model", "-m", help="Embedded model, local diffusers directory, or hub id.")]
PlanName = Annotated[str, typer.Option("--plan", help="A tier (exact, fp8) or the path of a plan JSON.")]
SizeText = Annotated[str | None, typer.Option("--size", metavar="WxH", help="Pixels, multiples of 16.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option("--guidance", help="Guidance scale; 0 is a value.")]
Negative = Annotated[str | None, typer.Option("--negative", help="Negative prompt.")]
TrueCfg = Annotated[float | None, typer.Option("--true-cfg", help="FLUX: scale of real guidance against --negative.")]
TextTokens = Annotated[int | None, typer.Option("--text-tokens", help="Longest prompt in tokens, up to 512.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="fp32|bf16", help="Default: bf16 on a GPU, else fp32.")]
Device = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="Default: the GPU, if there is one.")]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE[:SCALE]", help="LoRA to load, in any format; may be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def reporting(command: Command) -> Command:
    """Turn every error into one sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read at its import: no advice about image processors
        try:
            return command(*args, **kwargs)
        except FuseditError as error:
            code = 1 if isinstance(error, NonFiniteError) and error.stage != "weights" else 2
            raise typer.Exit(fail(error, code, bool(kwargs.get("json")))) from None
        except Terminated:
            typer.echo("fusedit: terminated", err=True)
            raise typer.Exit(CODE) from None
        except KeyboardInterrupt:
            typer.echo("fusedit: interrupted", err=True)
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if os.environ.get("FUSEDIT_DEBUG"):
                raise
            raise typer.Exit(fail(error, 3, bool(kwargs.get("json")))) from None

    return run  # type: ignore[return-value]


def fail(error: Exception, code: int, json: bool) -> int:
    """Print an error and return the exit code."""
    message = " ".join(str(error).split())
    if code == 3:
        message = f"unexpected {type(error).__name__}: {message} (FUSEDIT_DEBUG=1 shows where)"
    if json:
        print_json({"error": {"type": type(error).__name__, "message": message}})
    typer.echo(f"fusedit: {message}", err=True)
    return code


def print_json(data: Any) -> None:
    from fusedit.files import plain

    typer.echo(json_module.dumps(plain(data), indent=2, allow_nan=False))


def print_loras(loras: Iterable[Mapping[str, Any]]) -> None:
    """A line for each LoRA; what did not match goes to standard error, by name."""
    for lora in loras:
        typer.echo(f"LoRA {lora['name']} {lora['state']}: matched {lora['matched']} of {lora['total']} layers")
        for path, reason in lora["missing"]:
            typer.echo(f"warning: LoRA {lora['name']} does not fit {path}: {reason}", err=True)


def console() -> Any:
    """A rich console for results: the terminal's width, or 120 columns of plain text in a pipe."""
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console() if terminal else Console(width=120, color_system=None)
