"""`fusedit doctor`: what this machine has and what works on it. Every probe is caught, so it never fails itself."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from fusedit.environment import PACKAGES, driver, processor, version_of

if TYPE_CHECKING:
    from rich.console import Console

# What is optional, what it is for here, and what brings it. Imported only here and only when installed.
OPTIONAL: Final = {
    "flip_evaluator": ("FLIP metric and map", "pip install 'fusedit[fidelity]'"),
    "pynvml": ("driver version and energy", "pip install 'fusedit[gpu]'"),
    "jinja2": ("chat templates of tokenizers", "pip install jinja2"),
}
# Not used by fusedit, but the libraries below it look for them, and a broken one can spoil loading.
NEIGHBOURS: Final = ("flash_attn", "xformers", "torchao", "bitsandbytes", "torchvision", "sageattention")
_DISTRIBUTIONS: Final = {"pynvml": "nvidia-ml-py"}


def examine() -> dict[str, Any]:
    """Everything doctor knows, as JSON data. Works on a bare machine and with broken optional packages."""
    device = _gpu()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "gpus": device["gpus"],
        "cuda": {"usable": device["usable"], "reason": device["reason"], "driver": driver()},
        "tiers": _tiers(),
        "models": _models(),
        "ops": _ops("cuda" if device["usable"] else "cpu"),
        "optional": [_optional(name) for name in OPTIONAL],
        "conflicts": _conflicts(),
    }


def probe(call: Callable[[], Any]) -> tuple[Any, str]:
    """(value, "") or (None, why not). Broken packages raise anything at import, not only ImportError."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _gpu() -> dict[str, Any]:
    torch, reason = probe(lambda: import_module("torch"))
    if torch is None:
        return {"usable": False, "reason": reason, "gpus": []}
    gpus, reason = probe(lambda: [_describe(torch, index) for index in range(torch.cuda.device_count())])
    if not gpus:
        built = torch.version.cuda
        why = reason or (
            f"this torch ({torch.__version__}) is built without CUDA" if built is None else "no GPU was found"
        )
        return {"usable": False, "reason": why, "gpus": []}
    works, reason = probe(lambda: float(torch.ones(2, device="cuda").sum()) == 2.0)
    return {"usable": bool(works), "reason": reason, "gpus": gpus}


def _describe(torch: Any, index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {"name": found.name, "capability": f"{found.major}.{found.minor}", "memory_bytes": found.total_memory}


def _models() -> list[dict[str, Any]]:
    registry, reason = probe(lambda: import_module("fusedit.models").registry())
    if registry is None:
        return [{"model": "all", "works": False, "reason": reason}]
    return [_model(name, model) for name, model in registry.items()]


def _model(name: str, model: Any) -> dict[str, Any]:
    now, reason = probe(model.signature_now)
    if now is not None and now != model.signature:
        reason = f"forward of diffusers {version_of('diffusers')} takes other arguments; install diffusers 0.42"
    return {"model": name, "stock": model.stock.partition(":")[2], "works": not reason, "reason": reason}


def _tiers() -> list[dict[str, Any]]:
    from fusedit.plan import TIERS

    denoisers, reason = probe(
        lambda: [
            name
            for name, model in import_module("fusedit.models").registry().items()
            if model.denoiser and model.signature_now() == model.signature
        ]
    )
    why = reason or ("" if denoisers else "no transformer of this diffusers version can be served")
    reasons = {tier: why or (_why_no_fp8() if tier == "fp8" else "") for tier in TIERS}
    return [{"tier": tier, "works": not why, "reason": why, "serves": denoisers or []} for tier, why in reasons.items()]


def _why_no_fp8() -> str:
    """Why products in e4m3 do not run here; on a CPU they are emulated."""
    import torch

    from fusedit.float8.refusals import device_refusal

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return device_refusal(capability) or ""


def _ops(device: str) -> list[dict[str, Any]]:
    registry, reason = probe(lambda: import_module("fusedit.ops").registry())
    if registry is None:
        return [{"op": "all", "works": False, "backend": None, "reason": reason}]
    return [_op(name, op, device) for name, op in registry.items()]


def _op(name: str, op: Any, device: str) -> dict[str, Any]:
    """Run the op's first small case and say which implementation served it, and why no faster one did."""
    import torch

    def run() -> Any:
        case = next(case for case in op.cases if "small" in case.tags)
        args, kwargs = case.build(torch.bfloat16 if device == "cuda" else torch.float32, device)
        with torch.no_grad():
            op(*args, **kwargs)
        if device == "cuda":
            torch.cuda.synchronize()
        return op.backend(*args, **kwargs)

    backend, reason = probe(run)
    if backend is None:
        return {"op": name, "works": False, "backend": None, "reason": reason}
    return {"op": name, "works": True, "backend": backend.name, "reason": backend.reason}


def _optional(name: str) -> dict[str, Any]:
    use, remedy = OPTIONAL[name]
    installed, reason = probe(lambda: find_spec(name) is not None)
    if installed:
        _, reason = probe(lambda: import_module(name))
    else:
        reason = reason or f"not installed; {remedy}"
    version, _ = probe(lambda: version_of(_DISTRIBUTIONS.get(name, name.replace("_", "-"))))
    return {"package": name, "for": use, "version": version, "works": not reason, "reason": reason}


def _conflicts() -> list[dict[str, str]]:
    """Installed packages that fusedit does not use but that break the libraries it stands on."""
    found = []
    for name in NEIGHBOURS:
        if not probe(partial(find_spec, name))[0]:
            continue
        _, reason = probe(partial(import_module, name))
        if reason:
            advice = f"{name} is installed but cannot be imported ({reason}); update it or pip uninstall it"
            found.append({"package": name, "problem": advice})
    _, reason = probe(lambda: import_module("peft.import_utils").is_torchao_available())
    if reason:
        found.append({"package": "torchao", "problem": f"peft refuses it, so no LoRA can be loaded ({reason})"})
    for name in ("diffusers", "transformers", "accelerate", "peft"):
        _, reason = probe(partial(import_module, name))
        if reason:
            found.append({"package": name, "problem": f"cannot be imported: {reason}"})
    return found


def print_findings(found: dict[str, Any], console: Console) -> None:
    """The same for people."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"fusedit {found['packages'].get('fusedit')}, python {found['python']}, {found['platform']}"))
    console.print(
        Text(", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items()))
    )
    console.print(Text(f"CPU: {found['cpu']}"))
    for gpu in found["gpus"]:
        memory = gpu["memory_bytes"] / 2**30
        console.print(Text(f"GPU: {gpu['name']}, compute capability {gpu['capability']}, {memory:.0f} GiB"))
    cuda = found["cuda"]
    state = f"usable, driver {cuda['driver'] or 'unknown'}" if cuda["usable"] else f"not usable: {cuda['reason']}"
    console.print(Text(f"CUDA: {state}"))
    for title, kind, rows in (
        ("Tiers and models", "tier", [*found["tiers"], *found["models"]]),
        ("Ops on this machine", "op", found["ops"]),
        ("Optional packages", "package", found["optional"]),
    ):
        table = Table(title=title, title_justify="left")
        for name in (kind, "works", "how", "why not, or why not faster"):
            table.add_column(name, overflow="fold")
        for row in rows:
            name = row.get("tier") or row.get("op") or row.get("package") or row.get("model")
            how = row.get("backend") or row.get("stock") or row.get("version") or ", ".join(row.get("serves", []))
            table.add_row(Text(str(name)), "yes" if row["works"] else "no", Text(str(how or "")), Text(row["reason"]))
        console.print(table)
    for conflict in found["conflicts"]:
        console.print(Text(f"conflict: {conflict['package']}: {conflict['problem']}", style="yellow"))
