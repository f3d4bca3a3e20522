"""Benchmarks against stock, on any CUDA GPU: `python -m benchmarks step --help`."""

from __future__ import annotations

import typer

from benchmarks import step

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.command("step")(step.main)


@app.callback()
def _group() -> None:
    """Keeps `step` a subcommand while it is the only one."""


if __name__ == "__main__":
    app()
