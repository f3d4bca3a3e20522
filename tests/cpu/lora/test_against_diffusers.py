"""Where diffusers reads a format rightly, its layers are ours; where it does not, what it does is written down here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, ZImagePipeline
from safetensors.torch import save_file
from support.lora_files import (
    HIDDEN,
    fill,
    flux_native,
    flux_norms,
    linear_layers,
    lora_shapes,
    real_shapes,
    tiny,
    z_image_native,
)
from support.pipes import flux_pipe, z_image_pipe
from torch import Tensor

from fusedit.lora import LoraFile, parse, read

PEFT = (".lora_A.weight", ".lora_B.weight")
KOHYA = (".lora_down.weight", ".lora_up.weight")


def stock_layers(pipeline: Any, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Path -> down and up, alphas folded in, as diffusers converts them."""
    state = pipeline.lora_state_dict(dict(tensors))
    ends = (
        PEFT,
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    )
    return {
        key.removesuffix(down): (state[key], state[key.removesuffix(down) + up])
        for key in state
        for down, up in ends
        if key.endswith(down)
    }


def assert_as_stock(file: LoraFile, stock: dict[str, tuple[Tensor, Tensor]]) -> None:
    """By what they do to random inputs, so that the real sizes need no dense matrices."""
    ours = {f"transformer.{path}": layer for path, layer in file.layers.items()}
    assert set(ours) == {path for path in stock if path.startswith("transformer.")}
    for path, layer in ours.items():
        down, up = stock[path]
        x = torch.randn(4, down.shape[1], generator=torch.Generator().manual_seed(1))
        theirs, own = x @ down.T @ up.T, layer.scale * (x @ layer.down.T @ layer.up.T)
        assert torch.allclose(own, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max())), path


def first_blocks(name: str) -> dict[str, tuple[int, ...]]:
    """The first double and single block of a published file at its real sizes, for stock divides at those alone."""
    return {
        key: shape for key, shape in real_shapes(name).items() if not key.startswith("lora_te") and "blocks_0_" in key
    }


@pytest.mark.parametrize("name", ["flux_lora_kohya_format", "flux_lora_kohya_with_te1_format"])
def test_kohya_at_real_sizes(name: str) -> None:
    tensors = fill(first_blocks(name))
    assert len(tensors) == 39
    assert_as_stock(parse(tensors), stock_layers(FluxPipeline, tensors))


def test_kohya_outside_of_the_blocks() -> None:
    names = {name: shape for name, shape in flux_native(tiny("flux")).items() if "blocks" not in name}
    shapes = lora_shapes({f"lora_unet_{n.replace('.', '_')}": s for n, s in names.items()}, 2, *KOHYA)
    tensors = fill(shapes)
    stock = stock_layers(FluxPipeline, tensors)
    assert_as_stock(parse(tensors), {f"transformer.{path}": pair for path, pair in stock.items()})


def test_stock_loses_the_alpha_of_the_final_layer() -> None:
    """So ours is checked against the definition in test_round_trips; when stock keeps it, this fails and can go."""
    shapes = lora_shapes({"lora_unet_final_layer_linear": (16, HIDDEN)}, 2, *KOHYA, alpha=True)
    tensors = fill(shapes)
    (pair,) = stock_layers(FluxPipeline, tensors).values()
    assert torch.equal(pair[1], tensors["lora_unet_final_layer_linear.lora_up.weight"])
    assert parse(tensors).layers["proj_out"].scale == pytest.approx(
        float(tensors["lora_unet_final_layer_linear.alpha"]) / 2
    )


def test_xlabs() -> None:
    names = {"double_blocks.1.processor.qkv_lora1": (96, 32), "double_blocks.1.processor.qkv_lora2": (96, 32)}
    names |= {"double_blocks.1.processor.proj_lora1": (32, 32), "double_blocks.1.processor.proj_lora2": (32, 32)}
    names |= {"single_blocks.2.processor.qkv_lora": (96, 32), "single_blocks.2.processor.proj_lora": (32, 160)}
    tensors = fill(lora_shapes(names, 4, ".down.weight", ".up.weight"))
    file = parse(tensors)
    assert (file.format, len(file.layers)) == ("xlabs", 12)
    assert_as_stock(file, stock_layers(FluxPipeline, tensors))


def bfl_control() -> dict[str, Tensor]:
    """All of FLUX's layers at their real sizes and rank 2, as Black Forest Labs' control LoRAs have them."""
    h = 3072
    shapes = {"img_in": (h, 128), "txt_in": (h, 4096), "final_layer.linear": (64, h)}
    shapes |= {"final_layer.adaLN_modulation.1": (2 * h, h)}
    for name, columns in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        shapes |= {f"{name}.in_layer": (h, columns), f"{name}.out_layer": (h, h)}
    for i in range(19):
        for side in ("img", "txt"):
            block = f"double_blocks.{i}.{side}"
            shapes |= {f"{block}_attn.qkv": (3 * h, h), f"{block}_attn.proj": (h, h), f"{block}_mod.lin": (6 * h, h)}
            shapes |= {f"{block}_mlp.0": (4 * h, h), f"{block}_mlp.2": (h, 4 * h)}
    for i in range(38):
        block = f"single_blocks.{i}"
        shapes |= {
            f"{block}.linear1": (7 * h, h),
            f"{block}.linear2": (h, 5 * h),
            f"{block}.modulation.lin": (3 * h, h),
        }
    tensors = fill(lora_shapes(shapes, 2, *PEFT))
    norms = [f"double_blocks.{i}.{side}_attn" for i in range(19) for side in ("img", "txt")]
    norms += [f"single_blocks.{i}" for i in range(38)]
    return tensors | fill({f"{n}.norm.{which}_norm.scale": (128,) for n in norms for which in ("query", "key")}, 1)


def test_bfl_control_with_norms() -> None:
    tensors = bfl_control()
    file = parse(tensors)
    assert (file.format, file.unmatched, len(file.layers)) == ("bfl-control", (), 504)
    stock = stock_layers(FluxPipeline, tensors)
    down, up = stock["transformer.norm_out.linear"]
    assert torch.equal(up, file.layers["norm_out.linear"].up)
    assert torch.equal(down.flip(0), file.layers["norm_out.linear"].down)  # stock swaps halves of the rank, too: wrong
    stock["transformer.norm_out.linear"] = (down.flip(0), up)
    assert_as_stock(file, stock)
    state = FluxPipeline.lora_state_dict(dict(tensors))
    norms = {
        key.removeprefix("transformer."): value for key, value in state.items() if "norm_" in key and "lora" not in key
    }
    assert set(norms) == set(file.extra)
    assert len(norms) == 2 * (19 * 2 + 38)
    assert all(torch.equal(norms[key], file.extra[key]) for key in norms)
    assert len(flux_norms()) == 14  # the tiny one has them all, too


@pytest.mark.parametrize("form", ["ai-toolkit", "kohya", "dots"])
def test_z_image(form: str) -> None:
    """LF-02."""
    own = linear_layers(tiny("z-image"))
    prefix, ends, flat = {
        "ai-toolkit": ("diffusion_model.", PEFT, False),
        "kohya": ("lora_unet_", KOHYA, True),
        "dots": ("", (".lora.down.weight", ".lora.up.weight"), False),
    }[form]
    blocks = {path: shape for path, shape in own.items() if "attention" in path or "feed_forward" in path}
    named = {prefix + (path.replace(".", "_") if flat else path): shape for path, shape in blocks.items()}
    tensors = fill(lora_shapes(named, 2, *ends, alpha=True))
    if flat:  # stock leaves the number of to_out with an underscore
        tensors = {key: value for key, value in tensors.items() if "to_out" not in key}
    assert_as_stock(parse(tensors), stock_layers(ZImagePipeline, tensors))


def test_lokr_as_peft_applies_it() -> None:
    module = tiny("z-image")
    name = "diffusion_model.layers.0.feed_forward.w1"
    tensors = fill(
        {f"{name}.lokr_w1": (8, 8), f"{name}.lokr_w2_a": (16, 2), f"{name}.lokr_w2_b": (2, 6), f"{name}.alpha": ()}
    )
    layer = parse(tensors).layers["layers.0.feed_forward.w1"]
    pipe = z_image_pipe()
    weight = pipe.transformer.layers[0].feed_forward.w1.weight
    assert weight.shape == module.get_submodule("layers.0.feed_forward.w1").weight.shape
    x = torch.randn(3, 48)
    plain = pipe.transformer.layers[0].feed_forward.w1(x)
    pipe.load_lora_weights(tensors)
    changed = pipe.transformer.layers[0].feed_forward.w1(x)
    assert torch.allclose(changed - plain, x @ layer.delta().T, rtol=1e-4, atol=1e-4)


# -- what stock does not do, so that it is known when it does ---------------------------------------------------------


def test_stock_leaves_fused_qkv_of_z_image_fused() -> None:
    native = {n: s for n, s in z_image_native(tiny("z-image")).items() if n.endswith("layers.0.attention.qkv")}
    tensors = fill(lora_shapes({f"diffusion_model.{n}": s for n, s in native.items()}, 2, *PEFT))
    assert list(stock_layers(ZImagePipeline, tensors)) == ["transformer.layers.0.attention.qkv"]
    assert list(parse(tensors).layers) == [f"layers.0.attention.to_{which}" for which in "qkv"]


def test_stock_fails_on_two_underscores() -> None:
    tensors = fill(lora_shapes({"lora_unet__layers_0_attention_to_q": (48, 48)}, 2, *KOHYA))
    assert list(stock_layers(ZImagePipeline, tensors)) == ["transformer..layers.0.attention.to_q"]
    assert list(parse(tensors).layers) == ["layers.0.attention.to_q"]


def test_stock_drops_onetrainers_dora() -> None:
    name = "lora_transformer_transformer_blocks_0_attn_to_q"
    tensors = fill(lora_shapes({name: (HIDDEN, HIDDEN)}, 2, *KOHYA, alpha=True))
    tensors |= fill({f"{name}.dora_scale": (1, HIDDEN)})
    state = FluxPipeline.lora_state_dict(dict(tensors))
    assert {key.rpartition(".lora_")[2] for key in state} == {"A.weight", "B.weight"}
    layer = parse(tensors).layers["transformer_blocks.0.attn.to_q"]
    assert layer.magnitude is not None
    assert torch.equal(layer.magnitude, tensors[f"{name}.dora_scale"])


# -- alphas in metadata -----------------------------------------------------------------------------------------------


def test_what_save_lora_weights_writes(tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "proj_out"], rank_pattern={"proj_out": 2},
        alpha_pattern={"single_transformer_blocks.1.proj_out": 7}, init_lora_weights=False,
    )  # fmt: skip
    pipe = flux_pipe()
    pipe.transformer.add_adapter(config, "default")
    pipe.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(pipe.transformer),
        transformer_lora_adapter_metadata=pipe.transformer.peft_config["default"].to_dict(),
    )
    file = read(tmp_path)
    scales = {
        name: module.scaling["default"]
        for name, module in pipe.transformer.named_modules()
        if hasattr(module, "scaling")
    }
    assert {path: layer.scale for path, layer in file.layers.items()} == scales
    assert set(scales.values()) == {1.5, 3.0, 3.5}


@pytest.mark.parametrize("rooted", [False, True])
def test_what_peft_saves(tmp_path: Path, rooted: bool) -> None:
    tensors = fill(lora_shapes({"base_model.model.transformer_blocks.0.attn.to_q": (HIDDEN, HIDDEN)}, 4, *PEFT))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_rslora": rooted}))
    assert read(tmp_path).layers["transformer_blocks.0.attn.to_q"].scale == (4.0 if rooted else 2.0)
    (tmp_path / "adapter_config.json").write_text("no JSON")
    assert read(tmp_path).layers["transformer_blocks.0.attn.to_q"].scale == 1.0
