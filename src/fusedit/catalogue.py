"""`fusedit models`: the embedded models, the stock classes that are served, and every rewrite by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def catalogue() -> dict[str, Any]:
    """`embedded`, `supported` and their rewrites, as JSON data."""
    from fusedit.defaults import MODELS
    from fusedit.loading import embedded_models
    from fusedit.models import registry

    return {
        "embedded": [
            {
                "name": name,
                "size": str(MODELS[name].size) if name in MODELS else None,
                "steps": MODELS[name].steps if name in MODELS else None,
                "guidance": MODELS[name].guidance if name in MODELS else None,
                "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            }
            for name, folder in embedded_models().items()
        ],
        "supported": [
            {
                "model": name,
                "stock_class": model.stock.partition(":")[2],
                "component": ".".join(model.path),
                "pipelines": list(model.pipelines),
                "rewrites": [
                    {key: getattr(rewrite, key) for key in ("name", "tier", "exactness", "summary")}
                    for rewrite in model.rewrites
                ],
                "notes": list(model.notes),
            }
            for name, model in registry().items()
        ],
    }


def print_catalogue(found: dict[str, Any], console: Console) -> None:
    """The same for people."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Embedded models", title_justify="left")
    for name in ("name", "size", "steps", "guidance", "on disk"):
        table.add_column(name)
    for model in found["embedded"]:
        row = (model["name"], model["size"], model["steps"], model["guidance"], f"{model['bytes'] / 2**20:.0f} MiB")
        table.add_row(*[Text("–" if cell is None else str(cell)) for cell in row])
    console.print(table)
    for model in found["supported"]:
        title = Text(f"{model['stock_class']} ({model['component']} of {', '.join(model['pipelines'])})")
        table = Table(title=title, title_justify="left")
        for name in ("rewrite", "tier", "exactness", "what it replaces"):
            table.add_column(name, overflow="fold")
        for rewrite in model["rewrites"]:
            table.add_row(*[Text(rewrite[key]) for key in ("name", "tier", "exactness", "summary")])
        console.print(table)
        for note in model["notes"]:
            console.print(Text(f"note: {note}"))
