"""The command line: parses, calls the public functions, prints. Everything heavy is imported inside the commands.

Exit codes: 0 done, 1 a gate failed or a picture held NaN or infinity, 2 wrong use or results that cannot be written, 3
a defect in fusedit itself, 130 interrupted, 141 nobody reads the results any more, 143 ended by SIGTERM.
Results go to standard output, everything else to standard error. An error is one sentence, and with --json also
`{"error": {"type", "message"}}` on standard output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusedit.cli_shared import (
    Device,
    Dtype,
    Guidance,
    Json,
    Loras,
    Model,
    Negative,
    PlanName,
    SizeText,
    Steps,
    TextTokens,
    TrueCfg,
    console,
    print_json,
    print_loras,
    reporting,
)
from fusedit.stdout import guard
from fusedit.termination import watch

app = typer.Typer(
    name="fusedit",
    help="Makes diffusion-transformer image generation faster in place, and shows what it did to the picture.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lora_app = typer.Typer(help="Look into LoRA files.", no_args_is_help=True)
app.add_typer(lora_app, name="lora")


def version(value: bool) -> None:
    if value:
        from fusedit import __version__

        typer.echo(f"fusedit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Makes diffusion-transformer image generation faster in place, and shows what it did to the picture."""


@app.command(epilog='Example: fusedit generate "a red apple, 3d style" --seed 7 --size 256x256 -o apple.png')
@reporting
def generate(
    prompt: Annotated[str, typer.Argument(help='What to draw; "" is a prompt too.')],
    model: Model = "tiny-flux",
    plan: PlanName = "exact",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first picture.")] = 0,
    size: SizeText = None,
    steps: Steps = None,
    guidance: Guidance = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many pictures: seeds seed, seed + 1, ...")] = 1,
    negative: Negative = None,
    true_cfg: TrueCfg = None,
    text_tokens: TextTokens = None,
    dtype: Dtype = None,
    device: Device = None,
    loras: Loras = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file; several get -SEED.")] = Path("fusedit.png"),
    json: Json = False,
) -> None:
    """Draw pictures with the accelerated pipeline; settings go into the PNG and into a JSON beside it."""
    from fusedit.generate import Job, generate_files

    job = Job.of(
        prompt=prompt,
        model=model,
        plan=plan,
        seed=seed,
        size=size,
        steps=steps,
        guidance=guidance,
        count=count,
        negative=negative,
        true_cfg=true_cfg,
        text_tokens=text_tokens,
        dtype=dtype,
        device=device,
        loras=loras,
        output=output,
    )
    result = generate_files(job, quiet=json)
    if json:
        print_json(result)
        return
    for note in result["notes"]:
        if note.startswith("warning"):  # the others are in the files
            typer.echo(note, err=True)
    print_loras(result["loras"])
    for image in result["images"]:
        typer.echo(f"{image['path']}  seed {image['seed']}, {image['size']}, {image['total_s']:.2f} s")


@app.command(
    epilog='Example: fusedit compare --model tiny-z-image --prompt "a red apple" --prompt "a fox" --out out/compare'
)
@reporting
def compare(
    prompts: Annotated[list[str], typer.Option("--prompt", "-p", help="What to draw; may be given several times.")],
    model: Model = "tiny-flux",
    plan: PlanName = "exact",
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="May be given several times. Default: 0 1.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for report.html, result.json and the PNGs.")] = None,
    size: SizeText = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    true_cfg: TrueCfg = None,
    text_tokens: TextTokens = None,
    dtype: Dtype = None,
    device: Device = None,
    loras: Loras = None,
    reference: Annotated[
        str, typer.Option("--reference", metavar="same|fp32", help="fp32 adds stock fp32 as the yardstick.")
    ] = "same",
    min_psnr: Annotated[
        float | None, typer.Option("--min-psnr", help="Gate in dB. Default: 45 in bf16, 80 in fp32.")
    ] = None,
    min_ssim: Annotated[float | None, typer.Option("--min-ssim", help="Gate. Default: 0.98.")] = None,
    gate_on: Annotated[
        str, typer.Option("--gate-on", metavar="min|median", help="Which pair the gates judge.")
    ] = "min",
    flip: Annotated[
        bool | None, typer.Option("--flip/--no-flip", help="FLIP map. Default: where flip-evaluator is installed.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Look for the guilty rewrite when the verdict is red.")
    ] = True,
    json: Json = False,
) -> None:
    """Draw the same pictures with stock and with the plan; print times and fidelity; exit with 1 if a gate failed."""
    from fusedit.cli_compare import run_compare
    from fusedit.validation import parse_size

    result = run_compare(
        model=model,
        device=device,
        dtype=dtype,
        loras=loras,
        out=out,
        quiet=json,
        prompts=prompts,
        plan=plan,
        seeds=seeds if seeds is not None else [0, 1],
        size=parse_size(size) if size is not None else None,
        steps=steps,
        guidance=guidance,
        negative=negative,
        true_cfg=true_cfg,
        text_tokens=text_tokens,
        reference=reference,
        min_psnr=min_psnr,
        min_ssim=min_ssim,
        gate_on=gate_on,
        flip=flip,
        search=search,
    )
    if json:
        print_json(result.to_dict())
    else:
        from fusedit.quality.table import print_table

        print_table([result], console())
        print_loras(result.loras)
        if out is not None:
            typer.echo(f"report: {out / 'report.html'}")
    if not result.verdict.passed:
        raise typer.Exit(1)


@app.command(epilog="Example: fusedit layout --model random-flux --size 1024x1024 --what decode")
@reporting
def layout(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Embedded model, local diffusers directory, hub id, or random-flux: FLUX.1-dev's VAE, random weights.",
        ),
    ] = "tiny-flux",
    size: Annotated[
        str | None, typer.Option("--size", metavar="WxH", help="Pixels, multiples of 16, at most 8192 a side.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Pictures at once.")] = 1,
    what: Annotated[str, typer.Option("--what", metavar="decode|encode|both", help="Half of the VAE.")] = "both",
    dtype: Dtype = None,
    device: Device = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each of the three ways, at least.")] = 2.0,
    json: Json = False,
) -> None:
    """Time a model's VAE by stages: stock in NCHW, stock in NHWC, fused; exit with 1 if the fused result is wrong."""
    from fusedit.cli_layout import layouts_data, print_layouts, run_layout

    result = run_layout(
        model=model,
        size=size,
        batch=batch,
        what=what,
        dtype=dtype,
        device=device,
        seconds=seconds,
        quiet=json,
    )
    print_json(layouts_data(result)) if json else print_layouts(result, console())
    if not result.passed:
        raise typer.Exit(1)


@app.command(epilog="Example: fusedit quantize black-forest-labs/FLUX.1-dev -o flux-fp8")
@reporting
def quantize(
    model: Annotated[str, typer.Argument(help="Embedded model, local diffusers directory, or hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the checkpoint.")],
    plan: Annotated[str, typer.Option("--plan", help="fp8 or the path of a plan JSON with base fp8.")] = "fp8",
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Write a checkpoint with e4m3 weights that --model and fusedit.load start from, without the original."""
    from fusedit.cli_fp8 import quantised_line, run_quantize

    made = run_quantize(model=model, out=output, plan=plan, dtype=dtype, quiet=json)
    print_json(made.to_dict()) if json else typer.echo(quantised_line(made))


@app.command(epilog="Example: fusedit sensitivity --model tiny-flux --plan fp8 --by role")
@reporting
def sensitivity(
    model: Model = "tiny-flux",
    plan: Annotated[str, typer.Option("--plan", help="fp8 or the path of a plan JSON with base fp8.")] = "fp8",
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Draws the steps that are measured.")] = "red apple",
    seed: Annotated[int, typer.Option("--seed", help="Of that picture.")] = 0,
    size: SizeText = None,
    steps: Steps = None,
    by: Annotated[str, typer.Option("--by", metavar="role|block|layer", help="What is measured together.")] = "role",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Denoising steps that are measured.")] = 3,
    keep: Annotated[int, typer.Option("--keep", help="For --save: worst groups that stay in the model's dtype.")] = 1,
    save: Annotated[Path | None, typer.Option("--save", help="JSON file for the plan with --keep.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Measure how much each group of layers adds to the error of the transformer's output under a plan."""
    from fusedit.cli_fp8 import print_sensitivity, run_sensitivity

    found = run_sensitivity(
        model=model,
        plan=plan,
        prompt=prompt,
        seed=seed,
        size=size,
        steps=steps,
        by=by,
        samples=samples,
        keep=keep,
        save=save,
        dtype=dtype,
        device=device,
        quiet=json,
    )
    print_json(found.to_dict()) if json else print_sensitivity(found, console())
    if save is not None and (drawback := found.drawback(keep)):
        typer.echo(f"warning: {drawback}", err=True)


@app.command(epilog="Example: fusedit doctor --json")
@reporting
def doctor(json: Json = False) -> None:
    """Say what this machine has, which tiers and ops work here, and which do not and why. Never fails."""
    from fusedit.doctor import examine, print_findings

    found = examine()
    print_json(found) if json else print_findings(found, console())


@app.command(epilog="Example: fusedit models")
@reporting
def models(json: Json = False) -> None:
    """List the embedded models, the stock classes supported, and every rewrite with its exactness."""
    from fusedit.catalogue import catalogue, print_catalogue

    found = catalogue()
    print_json(found) if json else print_catalogue(found, console())


@app.command(epilog="Example: fusedit demo --out out/demo")
@reporting
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html, result.json and the PNGs.")] = Path(
        "out/demo"
    ),
    json: Json = False,
) -> None:
    """Compare stock and `exact` on both embedded models, four prompts each, and write a report page."""
    from fusedit.demo import run_demo

    results, written = run_demo(out, quiet=json)
    if json:
        print_json({"results": [result.to_dict() for result in results]})
    else:
        from fusedit.quality.table import print_table

        print_table(results, console())
        typer.echo(f"report: {written[0]}")
    if not all(result.verdict.passed for result in results):
        raise typer.Exit(1)


@lora_app.command("inspect", epilog="Example: fusedit lora inspect my_style.safetensors --json")
@reporting
def inspect_lora(
    file: Annotated[str, typer.Argument(help="A .safetensors file, or a folder with one.")], json: Json = False
) -> None:
    """Print a LoRA's format, model family, ranks, alphas and layers; it is loaded into no model."""
    from fusedit import lora
    from fusedit.cli_lora import lora_lines

    found = lora.inspect(lora.read(file))
    print_json({"file": file, **found}) if json else typer.echo("\n".join(lora_lines(found)))


def main() -> None:
    """Entry point of the `fusedit` command."""
    guard()
    watch()
    app()
