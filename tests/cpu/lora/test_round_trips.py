"""From layers in diffusers' names to each other format, by an inverse written here, and back by the parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from support.lora_files import assert_same, changes, fill, linear_layers, lora_shapes, tiny
from torch import Tensor

from fusedit.lora import check, parse

Layers = dict[str, tuple[Tensor, Tensor, float]]
"""Path in diffusers -> down, up, alpha."""

_FLUX_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
}
_FLUX_SINGLE = {"proj_out": "linear2", "norm.linear": "modulation.lin"}
_FLUX_OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}


def random_layers(family: str) -> Layers:
    """Every linear layer, of ranks 1 to 4 and alphas of their own; layers that share an input have one alpha/rank."""
    made: Layers = {}
    for number, (path, (rows, columns)) in enumerate(linear_layers(tiny(family)).items()):
        rank = 1 + number % 4
        pair = fill({"a": (rank, columns), "b": (rows, rank)}, seed=number)
        made[path] = (
            pair["a"],
            pair["b"],
            rank * (0.5 if path.split(".")[-1].startswith(("to_", "add_", "proj_mlp")) else 1.0 + number % 3),
        )
    return made


def expected(layers: Layers) -> dict[str, Tensor]:
    return {path: alpha / len(a) * (b.double() @ a.double()) for path, (a, b, alpha) in layers.items()}


def fused(layers: Layers, paths: list[str]) -> tuple[Tensor, Tensor, float]:
    """Several layers of one input as one: their downs below each other, their ups on a diagonal of blocks."""
    downs, ups, alphas = zip(*(layers.pop(path) for path in paths), strict=True)
    ranks = [len(down) for down in downs]
    return torch.cat(downs), torch.block_diag(*ups), sum(ranks) * alphas[0] / ranks[0]


def flux_native(layers: Layers) -> Layers:
    """To the names of FLUX's authors: fused, and the last modulation's halves the other way round."""
    left, made = dict(layers), {}
    for i in range(2):
        root = f"transformer_blocks.{i}"
        for side, names in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"))):
            made[f"double_blocks.{i}.{side}_attn.qkv"] = fused(left, [f"{root}.attn.{name}" for name in names])
        made |= {f"double_blocks.{i}.{new}": left.pop(f"{root}.{old}") for old, new in _FLUX_DOUBLE.items()}
    for i in range(3):
        root = f"single_transformer_blocks.{i}"
        joined = [f"{root}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
        made[f"single_blocks.{i}.linear1"] = fused(left, joined)
        made |= {f"single_blocks.{i}.{new}": left.pop(f"{root}.{old}") for old, new in _FLUX_SINGLE.items()}
    made |= {new: left.pop(old) for old, new in _FLUX_OUTSIDE.items()}
    assert left == {}
    down, up, alpha = made["final_layer.adaLN_modulation.1"]
    scale, shift = up.chunk(2)
    made["final_layer.adaLN_modulation.1"] = (down, torch.cat([shift, scale]), alpha)
    return made


def z_image_native(layers: Layers) -> Layers:
    left, made = dict(layers), {}
    for path in [path for path in layers if path.endswith("attention.to_q")]:
        block = path.removesuffix("to_q")
        made[f"{block}qkv"] = fused(left, [f"{block}to_{which}" for which in "qkv"])
    for path, layer in left.items():
        name = path.replace("all_x_embedder.2-1", "x_embedder").replace("all_final_layer.2-1", "final_layer")
        made[name.replace("to_out.0", "out")] = layer
    return made


def written(layers: Layers, prefix: str, down: str, up: str, name: Callable[[str], str] = str) -> dict[str, Tensor]:
    """A file with alphas."""
    made = {}
    for path, (a, b, alpha) in layers.items():
        stem = prefix + name(path)
        made |= {f"{stem}.{down}": a, f"{stem}.{up}": b, f"{stem}.alpha": torch.tensor(alpha)}
    return made


def underscores(path: str) -> str:
    return path.replace(".", "_")


PEFT = ("lora_A.weight", "lora_B.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")
OLD = ("lora.down.weight", "lora.up.weight")
NAMED = ("lora_A.default.weight", "lora_B.default.weight")
LINEAR = ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
OWN = {
    "bare": ("", PEFT, str, "diffusers"),
    "transformer.": ("transformer.", PEFT, str, "diffusers"),
    "peft": ("base_model.model.", PEFT, str, "diffusers"),
    "both": ("base_model.model.transformer.", PEFT, str, "diffusers"),
    "adapter name": ("transformer.", NAMED, str, "diffusers"),
    "adapter name, peft": ("base_model.model.", NAMED, str, "diffusers"),
    "old": ("transformer.", OLD, str, "diffusers"),
    "older": ("transformer.", LINEAR, str, "diffusers"),
    "kohya": ("lora_unet_", KOHYA, underscores, "kohya"),
    "kohya, two": ("lora_unet__", KOHYA, underscores, "kohya"),
    "lycoris": ("lycoris_", KOHYA, underscores, "kohya"),
    "onetrainer": ("lora_transformer_", KOHYA, underscores, "onetrainer"),
    "ai-toolkit": ("diffusion_model.", PEFT, str, "ai-toolkit"),
}
NATIVE = {
    "ai-toolkit": ("diffusion_model.", PEFT, str, "ai-toolkit"),
    "comfy": ("model.diffusion_model.", KOHYA, str, "ai-toolkit"),
    "kohya": ("lora_unet_", KOHYA, underscores, "kohya"),
    "kohya, two": ("lora_unet__", KOHYA, underscores, "kohya"),
    "dots": ("", OLD, str, None),
    "peft": ("base_model.model.", PEFT, str, None),
}


def round_trip(family: str, layers: Layers, tensors: Mapping[str, Tensor], expected_format: str) -> None:
    kept = {key: value.clone() for key, value in tensors.items()}
    file = parse(tensors)
    assert (file.format, file.family, file.keys) == (expected_format, family, len(tensors))
    assert (file.unmatched, file.notes, file.extra, file.text) == ((), (), {}, {})
    assert_same(changes(file.layers), expected(layers), 2e-6)
    match = check(file, tiny(family))
    assert (match.missing, match.matched) == ((), len(layers))
    assert all(torch.equal(kept[key], tensors[key]) for key in kept)


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("family", ["flux", "z-image"])
def test_diffusers_names(family: str, form: str) -> None:
    prefix, ends, name, kind = OWN[form]
    layers = random_layers(family)
    round_trip(family, layers, written(layers, prefix, *ends, name), kind)


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("family", ["flux", "z-image"])
def test_the_authors_names(family: str, form: str) -> None:
    prefix, ends, name, kind = NATIVE[form]
    layers = random_layers(family)
    native = flux_native(layers) if family == "flux" else z_image_native(layers)
    bare = "bfl" if family == "flux" else "diffusers"
    round_trip(family, layers, written(native, prefix, *ends, name), kind or bare)


def test_xlabs() -> None:
    names = {
        "transformer_blocks.{}.attn.to_out.0": "double_blocks.{}.processor.proj_lora1",
        "transformer_blocks.{}.attn.to_add_out": "double_blocks.{}.processor.proj_lora2",
        "single_transformer_blocks.{}.proj_out": "single_blocks.{}.processor.proj_lora",
    }
    groups = {
        "double_blocks.{}.processor.qkv_lora1": ("transformer_blocks.{}.attn.", ("to_q", "to_k", "to_v")),
        "double_blocks.{}.processor.qkv_lora2": (
            "transformer_blocks.{}.attn.",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
        ),
        "single_blocks.{}.processor.qkv_lora": ("single_transformer_blocks.{}.attn.", ("to_q", "to_k", "to_v")),
    }
    layers = {path: (a, b, float(len(a))) for path, (a, b, _) in random_layers("flux").items()}  # XLabs knows no alpha
    left, made, used = dict(layers), {}, set()
    for i in range(2):
        for old, new in names.items():
            used.add(old.format(i))
            made[new.format(i)] = left.pop(old.format(i))
        for new, (root, parts) in groups.items():
            paths = [root.format(i) + part for part in parts]
            used |= set(paths)
            made[new.format(i)] = fused(left, paths)
    tensors = {k: v for k, v in written(made, "", "down.weight", "up.weight").items() if not k.endswith("alpha")}
    round_trip("flux", {path: layers[path] for path in used}, tensors, "xlabs")


def test_former_attention_processors() -> None:
    ends = ("down.weight", "up.weight")
    layers = {p: (a, b, float(len(a))) for p, (a, b, _) in random_layers("flux").items() if ".attn.to_" in p}
    layers = {path: layer for path, layer in layers.items() if "to_add_out" not in path}
    tensors = {}
    for path, (a, b, _) in layers.items():
        stem = path.replace("to_out.0", "to_out").replace(".attn.", ".attn.processor.") + "_lora"
        tensors |= {f"transformer.{stem}.{ends[0]}": a, f"transformer.{stem}.{ends[1]}": b}
    file = parse(tensors)
    assert_same(changes(file.layers), expected(layers))


@pytest.mark.parametrize("rank", [3, 4, 16, 64])
def test_a_shared_down_matrix_is_never_divided(rank: int) -> None:
    """LF-03."""
    shapes = {"double_blocks.0.img_attn.qkv": (96, 32), "single_blocks.0.linear1": (224, 32)}
    tensors = fill(lora_shapes(shapes, rank, ".lora_A.weight", ".lora_B.weight"))
    layers = parse(tensors).layers
    assert {layer.down.shape for layer in layers.values()} == {(rank, 32)}
    whole = {name: tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"] for name in shapes}
    q, k, v = (layers[f"transformer_blocks.0.attn.to_{which}"].delta() for which in "qkv")
    assert torch.allclose(torch.cat([q, k, v]), whole["double_blocks.0.img_attn.qkv"], atol=1e-5)
    names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    parts = [layers[f"single_transformer_blocks.0.{name}"].delta() for name in names]
    assert [len(part) for part in parts] == [32, 32, 32, 128]
    assert torch.allclose(torch.cat(parts), whole["single_blocks.0.linear1"], atol=1e-4)
    assert layers["transformer_blocks.0.attn.to_q"].down is layers["transformer_blocks.0.attn.to_v"].down
