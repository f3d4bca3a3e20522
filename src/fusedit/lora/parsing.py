"""parse() and read(): a LoRA file of any of the known key formats as layers of the diffusers modules.

One way for all formats: each key is taken apart into a layer's name and a role (keys), the name is looked up in the
model's table (names_*), the tensors of one layer become a low-rank pair (factors), and the pair goes to the layers that
the name covers (placing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final

from torch import Tensor

from fusedit.errors import ArgumentError, LoraError
from fusedit.lora.foreign import refuse_foreign
from fusedit.lora.groups import Group, gather
from fusedit.lora.keys import WHOLE
from fusedit.lora.layers import LoraFile
from fusedit.lora.metadata import configs
from fusedit.lora.names import Names, flatten
from fusedit.lora.names_flux import FLUX
from fusedit.lora.names_z_image import Z_IMAGE
from fusedit.lora.reader import Reader
from fusedit.lora.tensors import locate, open_file

FAMILIES: Final[dict[str, Names]] = {"flux": FLUX, "z-image": Z_IMAGE}


def read(path: str | PathLike[str], *, family: str | None = None) -> LoraFile:
    """Read a LoRA from a safetensors file, with the alphas of its metadata. Nothing is unpickled.

    Args:
        path: the file, or a folder with one .safetensors file.
        family: see `parse`.

    Raises:
        LoraError: see `read_tensors` and `parse`; the message begins with the path.
    """
    where = locate(path)
    tensors, metadata = open_file(where)
    try:
        return parse(tensors, family=family, settings=configs(where, metadata))
    except LoraError as error:
        raise LoraError(f"{str(path)!r}: {error}") from None


def parse(
    tensors: Mapping[str, Tensor], *, family: str | None = None, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> LoraFile:
    """Turn keys and tensors into layers. The tensors are neither changed nor copied where they can be shared.

    Args:
        tensors: as in the file.
        family: `flux` or `z-image`, for names that both models have (`x_embedder`); names that only one has go first.
        settings: peft's settings by part (`transformer`, `text_encoder`), for alphas that are not among the tensors.

    Raises:
        LoraError: no tensor, NaN, tensors that make no layer, a LoRA for another model, or no key that is known.
        ArgumentError: an unknown family.
    """
    if not tensors:
        raise LoraError("the file holds no tensors; download or save it again")
    given: Iterable[tuple[object, object]] = tensors.items()
    for key, value in given:
        if not isinstance(key, str) or not isinstance(value, Tensor):
            words = f"{type(key).__name__} {key!r:.60} and a {type(value).__name__}"
            raise LoraError(f"a LoRA is tensors by key, not {words}; give what safetensors' load_file returns")
    if family is not None and family not in FAMILIES:
        raise ArgumentError(f"family {family!r} is not known; give {' or '.join(FAMILIES)}")
    refuse_foreign(tensors)
    groups, unknown = gather(tensors)
    told = _family(groups)
    reader = Reader(FAMILIES[told or family or "flux"], settings or {})
    reader.take(groups)
    if not (reader.layers or reader.text or reader.extra) or not _is_change(groups):
        raise LoraError(_nothing(tensors, groups))
    return LoraFile(
        format=_format(groups),
        family=told or family,
        layers=reader.layers,
        text=reader.text,
        extra=reader.extra,
        keys=len(tensors),
        unmatched=tuple(sorted([*unknown, *reader.unmatched])),
        notes=tuple(reader.notes),
    )


def _family(groups: list[Group]) -> str | None:
    """The model whose names these are, counted by names that only one model has."""
    votes: Counter[str] = Counter()
    for group in groups:
        if "text" not in group.scopes:
            fits = [family for family, names in FAMILIES.items() if names.find(group.name) is not None]
            votes.update(fits if len(fits) == 1 else ())
    return votes.most_common(1)[0][0] if votes else None


def _format(groups: list[Group]) -> str:
    """What most layers look like; a special kind of layer names the file even where there are few of it."""
    scopes = Counter(scope for group in groups for scope in group.scopes if scope != "text")
    roles = {role for group in groups for role in group.parts}
    flat = [flatten(group.name) for group in groups]
    if any(role.startswith(("lokr", "hada")) for role in roles):
        return "lokr" if any(role.startswith("lokr") for role in roles) else "loha"
    if any("processor_" in name and "_lora" in name for name in flat):
        return "xlabs"
    if scopes["onetrainer"] or scopes["kohya"]:
        return max("onetrainer", "kohya", key=lambda scope: scopes[scope])
    if scopes["comfy"]:
        return "ai-toolkit"
    if any(name.startswith(("double_blocks", "single_blocks")) for name in flat):
        return "bfl-control" if any(name.endswith("query_norm") for name in flat) else "bfl"
    return "kohya" if flat and all("text" in group.scopes for group in groups) and "down" in roles else "diffusers"


def _is_change(groups: list[Group]) -> bool:
    """False: whole weights, a model."""
    return any(group.parts.keys() - WHOLE for group in groups)


def _nothing(tensors: Mapping[str, Tensor], groups: list[Group]) -> str:
    """Why nothing came of a file."""
    first = next(iter(tensors))
    if groups and not _is_change(groups):
        return (
            f"the file holds whole weights (first key {first!r}), not a LoRA; load it as a model, with the pipeline's "
            "transformer class and from_single_file"
        )
    return (
        f"none of its {len(tensors)} keys (first {first!r}) names a layer of FLUX.1, Z-Image or their text encoders in "
        "a known format; fusedit reads diffusers, kohya, ai-toolkit, OneTrainer, XLabs, BFL, LoKr and LoHa keys"
    )
