"""The names of layers: what each trainer calls them, as tables from there to the paths of the diffusers module.

Dots and underscores are the same here (`double_blocks.0.img_attn.qkv`, `double_blocks_0_img_attn_qkv`): kohya's files
cannot tell them apart, and no two layers of one model differ in them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

_BLOCK: Final = re.compile(r"(.+?)_(\d+)_(.+)")
_OLD_PROCESSOR: Final = re.compile(r"(?:processor_)?((?:to|add)_\w+?)_lora$")


class Place(NamedTuple):
    """Where one matrix of a file belongs.

    Attributes:
        paths: the modules whose weights, one below the other, are the matrix: one; three of equal height (q, k, v); or
            four (q, k, v, MLP) of which the first three are as high as the matrix is wide.
        swapped: the two halves of its rows are the other way round in diffusers.
        own: the file used diffusers' own name.
    """

    paths: tuple[str, ...]
    swapped: bool = False
    own: bool = False


Leaves = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Names:
    """The names of one model: layers inside numbered blocks and layers outside of them.

    Attributes:
        blocks: name of a list of blocks -> (diffusers' name, name of a layer in it -> its paths there).
        single: name of a layer outside of blocks -> its paths.
        swapped: names whose rows are in halves the other way round.
    """

    blocks: Mapping[str, tuple[str, Leaves]]
    single: Leaves
    swapped: frozenset[str] = frozenset()

    def find(self, name: str) -> Place | None:
        """The place of a layer by any of its names; None: this model has no such layer."""
        flat = flatten(name)
        if (paths := self.single.get(flat)) is not None:
            return Place(paths, flat in self.swapped, len(paths) == 1 and flatten(paths[0]) == flat)
        if (parts := _BLOCK.fullmatch(flat)) is None or (block := self.blocks.get(parts[1])) is None:
            return None
        root, leaves = block
        if (ends := leaves.get(parts[3])) is None:
            return None
        paths = tuple(f"{root}.{int(parts[2])}.{end}" for end in ends)
        return Place(paths, False, len(paths) == 1 and flatten(paths[0]) == flat)


@lru_cache(maxsize=4096)
def flatten(name: str) -> str:
    """Dots as underscores, and diffusers' former names of attention processors (`processor.to_q_lora`) as layers.

    Kept, since each name of a file is asked for several times.
    """
    flat = re.sub(r"[._]+", "_", name).strip("_")
    if (old := _OLD_PROCESSOR.search(flat)) is not None:
        layer = "to_out_0" if old[1] == "to_out" else old[1]
        flat = flat[: old.start()] + layer
    return flat


def table(own: Iterable[str] = (), **others: Iterable[str]) -> Leaves:
    """Names as `flatten` leaves them -> paths: diffusers' `own` for themselves, `others` for one path or several."""
    found: dict[str, tuple[str, ...]] = {flatten(path): (path,) for path in own}
    for name, paths in others.items():
        found[name] = (paths,) if isinstance(paths, str) else tuple(paths)
    return found
