"""LoRA files as trainers write them, made from random tensors, and what they do to each weight, computed densely.

Nothing here goes through fusedit.lora: names of the models' authors become those of diffusers by diffusers' own
converters of whole checkpoints, to which the dense changes are handed as if they were weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedit.models import registry

Shapes = dict[str, tuple[int, ...]]
LISTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "lora_keys" / "real_file_keys.json"
HIDDEN, MLP = 32, 128
"""Of the tiny FLUX; real: 3072, 12288."""
BLOCKS = {"double_blocks": 2, "transformer_blocks": 2, "single_blocks": 3, "single_transformer_blocks": 3}
_FLUX = {3072: 32, 9216: 96, 12288: 128, 15360: 160, 18432: 192, 21504: 224}
_TEXT = {768: 16, 3072: 24, 4096: 20, 10240: 28}
_RANKS = {4: 2, 16: 3, 32: 5}


def tiny(family: str, **changes: Any) -> nn.Module:
    """A transformer with random weights: FLUX.1 with 2 and 3 blocks, Z-Image with 3 layers and 2 refiners of a kind."""
    torch.manual_seed(0)
    module: nn.Module = registry()[family.replace("-", "_")].tiny(**changes)
    return module


def real_shapes(name: str) -> Shapes:
    """Keys and shapes of a published file; skips the test where they are not at hand."""
    if not LISTS.is_file():
        pytest.skip("key lists of published LoRAs are not part of the repository")
    return {key: tuple(shape) for key, shape in json.loads(LISTS.read_text())[name].items()}


def small_shapes(name: str) -> Shapes:
    """The same for the tiny FLUX and tiny text encoders: sizes and ranks scaled down, the first blocks only."""
    found = {}
    for key, shape in real_shapes(name).items():
        sizes = _TEXT if key.startswith("lora_te") else _FLUX
        if _is_kept(key):
            found[key] = tuple(_RANKS.get(n, sizes.get(n, n)) for n in shape)
    return found


def _is_kept(key: str) -> bool:
    flat = key.replace(".", "_")
    for block, count in sorted(BLOCKS.items(), key=lambda item: -len(item[0])):
        if f"{block}_" in flat:
            return int(flat.split(f"{block}_")[1].split("_")[0]) < count
    return True


def fill(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors; alphas are random too, and all different."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.randn(shape, generator=generator).abs() + 0.1).to(dtype)
        if not shape or "dora" in key
        else torch.randn(shape, generator=generator).to(dtype)
        for key, shape in shapes.items()
    }


def dense(tensors: Mapping[str, Tensor], down: str = ".lora_A.weight", up: str = ".lora_B.weight") -> dict[str, Tensor]:
    """Name of the layer, as in the file -> alpha / rank * up @ down in fp64."""
    found = {}
    for key, a in tensors.items():
        if key.endswith(down):
            name = key.removesuffix(down)
            alpha = tensors.get(f"{name}.alpha")
            scale = 1.0 if alpha is None else float(alpha) / a.shape[0]
            found[name] = scale * (tensors[f"{name}{up}"].double() @ a.double())
    return found


def changes(layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same of parsed layers, from their public fields."""
    return {
        path: (1.0 if x.alpha is None else x.alpha / len(x.down)) * (x.up.double() @ x.down.double())
        for path, x in layers.items()
    }


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert set(found) == set(expected)
    assert expected
    for path, value in expected.items():
        assert found[path].shape == value.shape, path
        error = float((found[path] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert error < tolerance, (path, error)


def linear_layers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Path -> (outputs, inputs)."""
    return {n: (m.out_features, m.in_features) for n, m in module.named_modules() if isinstance(m, nn.Linear)}


def by_underscores(names: Iterable[str]) -> dict[str, str]:
    """`a_b_0_c` -> `a.b.0.c`, for the files that write a layer's path so."""
    return {name.replace(".", "_"): name for name in names}


# -- FLUX in the names of Black Forest Labs ---------------------------------------------------------------------------


def flux_native(module: nn.Module) -> Shapes:
    """Weights of the linear layers of this very FLUX, in its authors' names -> shape."""
    own = {path: tuple(shape) for path, shape in linear_layers(module).items()}
    h = own["x_embedder"][0]
    shapes: Shapes = {
        "img_in": own["x_embedder"],
        "txt_in": own["context_embedder"],
        "final_layer.linear": own["proj_out"],
        "final_layer.adaLN_modulation.1": (2 * h, h),
    }
    for ours, theirs in (("timestep", "time"), ("text", "vector"), ("guidance", "guidance")):
        shapes[f"{theirs}_in.in_layer"] = own[f"time_text_embed.{ours}_embedder.linear_1"]
        shapes[f"{theirs}_in.out_layer"] = own[f"time_text_embed.{ours}_embedder.linear_2"]
    for i in range(BLOCKS["double_blocks"]):
        for side in ("img", "txt"):
            shapes |= {
                f"double_blocks.{i}.{side}_attn.qkv": (3 * h, h),
                f"double_blocks.{i}.{side}_attn.proj": (h, h),
                f"double_blocks.{i}.{side}_mlp.0": (4 * h, h),
                f"double_blocks.{i}.{side}_mlp.2": (h, 4 * h),
                f"double_blocks.{i}.{side}_mod.lin": (6 * h, h),
            }
    for i in range(BLOCKS["single_blocks"]):
        shapes |= {
            f"single_blocks.{i}.linear1": (7 * h, h),
            f"single_blocks.{i}.linear2": (h, 5 * h),
            f"single_blocks.{i}.modulation.lin": (3 * h, h),
        }
    return shapes


def flux_norms(head: int = 16) -> Shapes:
    """Scales of the norms of queries and keys, in its authors' names -> shape."""
    sides = [f"double_blocks.{i}.{side}_attn" for i in range(BLOCKS["double_blocks"]) for side in ("img", "txt")]
    blocks = [*sides, *(f"single_blocks.{i}" for i in range(BLOCKS["single_blocks"]))]
    return {f"{block}.norm.{which}_norm.scale": (head,) for block in blocks for which in ("query", "key")}


def flux_to_diffusers(module: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer in its authors' names -> matrix, to path in diffusers -> matrix, for the layers given.

    The converter divides the single blocks' `linear1` at the sizes of the real model, so the rows are moved there.
    """
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    marked: dict[str, Tensor] = {}
    for name, (rows, columns) in flux_native(module).items():
        value = given.get(name, torch.full((rows, columns), torch.nan, dtype=torch.float64))
        if name.endswith("linear1"):
            value = _moved_to_real_rows(value)
        marked[f"{name}.weight"] = value
        marked[f"{name}.bias"] = torch.zeros(value.shape[0])
    marked |= {name: torch.zeros(shape) for name, shape in flux_norms().items()}
    converted = convert_flux_transformer_checkpoint_to_diffusers(marked)
    found = {}
    for path, (rows, _) in linear_layers(module).items():
        value = converted[f"{path}.weight"][:rows]
        if not value.isnan().any():
            found[path] = value
    return found


def _moved_to_real_rows(value: Tensor) -> Tensor:
    moved = torch.zeros(3 * 3072 + 12288, value.shape[1], dtype=value.dtype)
    for part in range(3):
        moved[part * 3072 : part * 3072 + HIDDEN] = value[part * HIDDEN : (part + 1) * HIDDEN]
    moved[3 * 3072 : 3 * 3072 + MLP] = value[3 * HIDDEN :]
    return moved


# -- Z-Image in its authors' names ------------------------------------------------------------------------------------


def z_image_native(module: nn.Module) -> Shapes:
    """Linear layers of this very Z-Image in its authors' names -> shape."""
    shapes: Shapes = {}
    for path, (rows, columns) in linear_layers(module).items():
        name = path.replace("all_x_embedder.2-1", "x_embedder").replace("all_final_layer.2-1", "final_layer")
        name = name.replace("attention.to_out.0", "attention.out")
        if name.endswith("attention.to_q"):
            shapes[name.replace("to_q", "qkv")] = (3 * rows, columns)
        elif not name.endswith(("attention.to_k", "attention.to_v")):
            shapes[name] = (rows, columns)
    return shapes


def z_image_to_diffusers(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer in its authors' names -> matrix, to path in diffusers -> matrix."""
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

    converted = convert_z_image_transformer_checkpoint_to_diffusers({f"{name}.weight": x for name, x in given.items()})
    return {name.removesuffix(".weight"): value for name, value in converted.items()}


def lora_shapes(layers: Mapping[str, tuple[int, ...]], rank: int, down: str, up: str, *, alpha: bool = False) -> Shapes:
    """Keys of a plain LoRA of these layers: names with the given ends, and `.alpha` where asked for."""
    shapes: Shapes = {}
    for name, (rows, columns) in layers.items():
        shapes |= {f"{name}{down}": (rank, columns), f"{name}{up}": (rows, rank)}
        if alpha:
            shapes[f"{name}.alpha"] = ()
    return shapes
