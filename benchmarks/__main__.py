"""Benchmarks against stock, on any CUDA GPU, and the page that shows them: `python -m benchmarks step --help`."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read at its import: no advice about image processors

import typer

from benchmarks import cold_start, convolutions, image, launches, layouts, lora, ops, page, pictures, step, vae
from benchmarks.arguments import reporting

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=__doc__,
)
for name, command in (
    ("step", step.main),
    ("launches", launches.main),
    ("cold-start", cold_start.main),
    ("image", image.main),
    ("vae", vae.main),
    ("lora", lora.main),
    ("pictures", pictures.main),
    ("ops", ops.main),
    ("convolutions", convolutions.main),
    ("layouts", layouts.main),
    ("page", page.main),
):
    app.command(name)(reporting(command))

if __name__ == "__main__":
    app()
