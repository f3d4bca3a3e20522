"""What files have beside plain layers: alphas here and there, DoRA, biases, norms, one layer under two names."""

from __future__ import annotations

import json

import pytest
import torch
from support.lora_files import HIDDEN, MLP, assert_same, changes, dense, fill, flux_norms, lora_shapes, tiny
from torch import Tensor, nn

from fusedit.errors import LoraError
from fusedit.lora import check, inspect, parse

PEFT = (".lora_A.weight", ".lora_B.weight")
TO_Q, TO_K = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"


def pair(name: str, rank: int = 2, rows: int = HIDDEN, columns: int = HIDDEN, seed: int = 0) -> dict[str, Tensor]:
    return fill(lora_shapes({name: (rows, columns)}, rank, *PEFT), seed)


# -- alphas -----------------------------------------------------------------------------------------------------------


def test_without_alpha_the_scale_is_one_at_any_rank() -> None:
    """LF-04, with the two below."""
    layers = parse({**pair(TO_Q, 2), **pair(TO_K, 8)}).layers
    assert [(layers[path].rank, layers[path].scale) for path in (TO_Q, TO_K)] == [(2, 1.0), (8, 1.0)]


def test_alpha_over_rank_is_each_layers_own() -> None:
    """LF-04."""
    alphas = {f"{TO_Q}.alpha": torch.tensor(4.0), f"{TO_K}.alpha": torch.tensor(4.0)}
    layers = parse({**pair(TO_Q, 2), **pair(TO_K, 8), **alphas}).layers
    assert [layers[path].scale for path in (TO_Q, TO_K)] == [2.0, 0.5]
    assert_same(changes(layers), dense({**pair(TO_Q, 2), **pair(TO_K, 8), **alphas}))


def test_alphas_for_some_layers_only() -> None:
    """LF-04."""
    layers = parse({**pair(TO_Q, 2), **pair(TO_K, 8), f"{TO_K}.alpha": torch.tensor(2.0)}).layers
    assert [layers[path].scale for path in (TO_Q, TO_K)] == [1.0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_alphas_of_any_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layers = parse({**pair(TO_Q), f"{TO_Q}.alpha": torch.full(shape, 3, dtype=dtype)}).layers
    assert layers[TO_Q].scale == 1.5


def test_alphas_of_pefts_settings() -> None:
    settings = {"transformer": {"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn.to_k": 2}}}
    layers = parse({**pair(TO_Q, 4), **pair(TO_K, 4)}, settings=settings).layers
    assert [layers[path].scale for path in (TO_Q, TO_K)] == [2.0, 0.5]
    rooted = {"transformer": {**settings["transformer"], "use_rslora": True}}
    assert parse(pair(TO_Q, 4), settings=rooted).layers[TO_Q].scale == 4.0  # alpha / sqrt(rank)
    own = {**pair(TO_Q, 4), f"{TO_Q}.alpha": torch.tensor(1.0)}
    assert parse(own, settings=settings).layers[TO_Q].scale == 0.25  # an alpha in the file goes first


# -- DoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.default.weight"])
@pytest.mark.parametrize(
    ("shape", "kept", "axis"),
    [((128,), (128,), 1), ((128, 1), (128,), 1), ((128, 1, 1, 1), (128,), 1), ((1, 32), (1, 32), 0)],
)
def test_dora_by_outputs_and_by_inputs(key: str, shape: tuple[int, ...], kept: tuple[int, ...], axis: int) -> None:
    name = "single_transformer_blocks.0.proj_mlp"
    tensors = {**pair(name, 2, MLP), f"{name}.{key}": torch.rand(shape) + 0.5, f"{name}.alpha": torch.tensor(1.0)}
    layer = parse(tensors).layers[name]
    assert layer.magnitude is not None
    assert layer.magnitude.shape == kept
    weight = torch.randn(MLP, HIDDEN, dtype=torch.float64)
    new = weight + dense(tensors)[name]
    norms = new.pow(2).sum(axis, keepdim=True).sqrt()
    new = new / norms * tensors[f"{name}.{key}"].double().reshape(norms.shape)
    assert torch.allclose(layer.delta(weight).double(), new - weight, atol=1e-5)
    with pytest.raises(ValueError, match="pass weight="):
        layer.delta()


def test_dora_of_a_square_layer_is_read_by_its_shape() -> None:
    for shape, kept in (((HIDDEN, 1), (HIDDEN,)), ((1, HIDDEN), (1, HIDDEN))):
        layer = parse({**pair(TO_Q), f"{TO_Q}.dora_scale": torch.rand(shape)}).layers[TO_Q]
        assert layer.magnitude is not None
        assert layer.magnitude.shape == kept


def test_dora_of_a_fused_layer() -> None:
    name = "double_blocks.0.img_attn.qkv"
    scale = torch.rand(96, 1)
    layers = parse({**pair(name, 2, 96), f"{name}.dora_scale": scale}).layers
    norms = [layers[f"transformer_blocks.0.attn.to_{which}"].magnitude for which in "qkv"]
    assert torch.equal(torch.cat([norm for norm in norms if norm is not None]), scale[:, 0])
    with pytest.raises(LoraError, match="columns of a fused matrix"):
        parse({**pair(name, 2, 96), f"{name}.dora_scale": torch.rand(1, 32)})


def test_dora_of_a_wrong_shape() -> None:
    with pytest.raises(LoraError, match=r"has shape \(7,\), where DoRA has"):
        parse({**pair(TO_Q), f"{TO_Q}.dora_scale": torch.rand(7)})


# -- biases, norms, wider embedders -----------------------------------------------------------------------------------


def control() -> dict[str, Tensor]:
    """A control LoRA in the names of FLUX's authors: x_embedder twice as wide, norms, biases."""
    layers = {
        "img_in": (HIDDEN, 32),
        "double_blocks.1.img_attn.qkv": (96, HIDDEN),
        "single_blocks.2.linear1": (224, HIDDEN),
    }
    layers |= {"final_layer.adaLN_modulation.1": (64, HIDDEN)}
    tensors = fill(lora_shapes(layers, 3, *PEFT))
    return {
        **tensors,
        **fill({f"{name}.lora_B.bias": (rows,) for name, (rows, _) in layers.items()}, 1),
        **fill(flux_norms(), 2),
    }  # fmt: skip


def test_a_control_lora() -> None:
    tensors = control()
    file = parse(tensors)
    assert (file.format, file.family, file.unmatched) == ("bfl-control", "flux", ())
    module = tiny("flux")
    match = check(file, module)
    assert [path for path, _ in match.missing] == ["x_embedder"]
    assert match.wider == {"x_embedder": 32}
    assert "32 x 32 weights, the layer has 32 x 16" in match.sentence()
    module.get_submodule("x_embedder")
    module.x_embedder = nn.Linear(32, HIDDEN)
    assert check(file, module).missing == ()
    extra = file.extra
    for which in ("query", "key"):
        own = f"norm_{which[0]}"
        assert torch.equal(
            extra[f"transformer_blocks.1.attn.{own}.weight"],
            tensors[f"double_blocks.1.img_attn.norm.{which}_norm.scale"],
        )
        assert torch.equal(
            extra[f"transformer_blocks.0.attn.norm_added_{which[0]}.weight"],
            tensors[f"double_blocks.0.txt_attn.norm.{which}_norm.scale"],
        )
        assert torch.equal(
            extra[f"single_transformer_blocks.2.attn.{own}.weight"], tensors[f"single_blocks.2.norm.{which}_norm.scale"]
        )
    parts = [extra[f"single_transformer_blocks.2.{name}.bias.diff"] for name in ("attn.to_q", "attn.to_k", "attn.to_v")]
    parts.append(extra["single_transformer_blocks.2.proj_mlp.bias.diff"])
    assert torch.equal(torch.cat(parts), tensors["single_blocks.2.linear1.lora_B.bias"])
    shift, scale = tensors["final_layer.adaLN_modulation.1.lora_B.bias"].chunk(2)
    assert torch.equal(extra["norm_out.linear.bias.diff"], torch.cat([scale, shift]))


def test_biases_of_both_products() -> None:
    tensors = {**pair(TO_Q, 2), f"{TO_Q}.alpha": torch.tensor(1.0)}
    tensors |= {f"{TO_Q}.lora_A.bias": torch.randn(2), f"{TO_Q}.lora_B.bias": torch.randn(HIDDEN)}
    file = parse(tensors)
    x = torch.randn(5, HIDDEN)
    inner = x @ tensors[f"{TO_Q}.lora_A.weight"].T + tensors[f"{TO_Q}.lora_A.bias"]
    outer = 0.5 * (inner @ tensors[f"{TO_Q}.lora_B.weight"].T + tensors[f"{TO_Q}.lora_B.bias"])
    ours = x @ file.layers[TO_Q].delta().T + file.extra[f"{TO_Q}.bias.diff"]
    assert torch.allclose(ours, outer, atol=1e-5)


def test_changes_of_norms_and_biases() -> None:
    name = "diffusion_model.layers.1.attention_norm1"
    tensors = fill({f"{name}.diff": (48,), "diffusion_model.layers.1.attention.to_q.diff_b": (48,)})
    file = parse({**tensors, **pair("diffusion_model.layers.1.attention.to_q", 2, 48, 48)})
    assert torch.equal(file.extra["layers.1.attention_norm1.weight.diff"], tensors[f"{name}.diff"])
    assert "layers.1.attention.to_q.bias.diff" in file.extra
    assert check(file, tiny("z-image")).sentence() == "matched 2 of 2 modules"


def test_a_1x1_convolution_is_a_matrix() -> None:
    flat = pair(TO_Q)
    tensors = {key: value[:, :, None, None] for key, value in flat.items()}
    assert_same(changes(parse(tensors).layers), dense(flat))


def test_float8_matrices() -> None:
    tensors = {key: value.to(torch.float8_e4m3fn) for key, value in pair(TO_Q).items()}
    assert_same(changes(parse(tensors).layers), dense({key: value.float() for key, value in tensors.items()}))


# -- one layer given twice --------------------------------------------------------------------------------------------


def twice(seed: int) -> dict[str, Tensor]:
    """q, k, v and the output under two names each, as one published Z-Image file has them."""
    old = (".lora.down.weight", ".lora.up.weight")
    block = "layers.0.attention."
    split = fill(lora_shapes({f"{block}to.{which}": (48, 48) for which in "qkv"}, 2, *old))
    out = fill(lora_shapes({f"{block}to_out.0": (48, 48)}, 2, *old), 1)
    tensors = {**split, **out}
    tensors |= {f"{block}to_{which}.alpha": torch.tensor(1.0) for which in "qkv"}
    tensors |= {f"{block}to_out.0.alpha": torch.tensor(1.0), f"{block}qkv.alpha": torch.tensor(3.0)}
    tensors[f"{block}qkv.lora.down.weight"] = torch.cat([split[f"{block}to.{which}{old[0]}"] for which in "qkv"])
    tensors[f"{block}qkv.lora.up.weight"] = torch.block_diag(*(split[f"{block}to.{which}{old[1]}"] for which in "qkv"))
    tensors |= {key.replace("to_out.0", "out"): value.clone() for key, value in out.items()}
    generator = torch.Generator().manual_seed(seed)
    return {key: tensors[key] for key in sorted(tensors, key=lambda _: float(torch.rand(1, generator=generator)))}


@pytest.mark.parametrize("seed", range(4))
def test_the_same_layer_under_two_names_counts_once(seed: int) -> None:
    tensors = twice(seed)  # in any order
    file = parse(tensors)
    assert (file.unmatched, file.notes, len(file.layers)) == ((), (), 4)
    for which in "qkv":
        name = f"layers.0.attention.to.{which}"
        expected = 0.5 * tensors[f"{name}.lora.up.weight"] @ tensors[f"{name}.lora.down.weight"]
        layer = file.layers[f"layers.0.attention.to_{which}"]
        assert torch.allclose(layer.delta(), expected, atol=1e-6)
        assert layer.rank == 2  # the split ones, not the fused one


@pytest.mark.parametrize("seed", range(4))
def test_two_names_that_do_not_agree_are_told(seed: int) -> None:
    tensors = twice(seed)
    tensors["layers.0.attention.out.lora.up.weight"] *= 3
    file = parse(tensors)
    (note,) = file.notes
    assert (
        "layers.0.attention.to_out.0 is given as 'layers.0.attention.to_out.0' and as 'layers.0.attention.out'" in note
    )
    assert "differ by 67%" in note
    up, down = (tensors[f"layers.0.attention.to_out.0.lora.{side}.weight"] for side in ("up", "down"))
    assert torch.allclose(file.layers["layers.0.attention.to_out.0"].delta(), 0.5 * up @ down, atol=1e-6)
    assert inspect(file)["notes"] == [note]


def test_an_alpha_under_the_other_name() -> None:
    tensors = fill(lora_shapes({"layers.0.attention.out": (48, 48)}, 2, ".lora.down.weight", ".lora.up.weight"))
    file = parse({**tensors, "layers.0.attention.to_out.0.alpha": torch.tensor(1.0)})
    assert file.layers["layers.0.attention.to_out.0"].scale == 0.5
    assert file.unmatched == ()


# -- text encoders ----------------------------------------------------------------------------------------------------

CLIP_Q, T5_Q = "encoder.layers.3.self_attn.q_proj", "encoder.block.3.layer.0.SelfAttention.q"
QWEN_Q = "layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "path"),
    [
        ("lora_te_text_model_encoder_layers_3_self_attn_q_proj", "text_encoder", CLIP_Q),
        ("lora_te1_text_model_encoder_layers_3_self_attn_q_proj", "text_encoder", CLIP_Q),
        ("text_encoder.text_model.encoder.layers.3.self_attn.q_proj", "text_encoder", CLIP_Q),
        ("text_encoder.text_model.encoder.layers.3.self_attn.to_q_lora", "text_encoder", CLIP_Q),
        ("text_encoder.encoder.layers.3.self_attn.q_proj", "text_encoder", CLIP_Q),
        ("text_encoders.clip_l.transformer.text_model.encoder.layers.3.self_attn.q_proj", "text_encoder", CLIP_Q),
        ("lora_te2_encoder_block_3_layer_0_SelfAttention_q", "text_encoder_2", T5_Q),
        ("lora_te3_encoder_block_3_layer_0_SelfAttention_q", "text_encoder_2", T5_Q),
        ("text_encoder_2.encoder.block.3.layer.0.SelfAttention.q", "text_encoder_2", T5_Q),
        ("text_encoders.t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q", "text_encoder_2", T5_Q),
        ("text_encoder.layers.3.self_attn.q_proj", "text_encoder", QWEN_Q),
        ("lora_te_model_layers_3_self_attn_q_proj", "text_encoder", QWEN_Q),
        ("text_encoders.qwen3_4b.transformer.model.layers.3.self_attn.q_proj", "text_encoder", QWEN_Q),
    ],
)
@pytest.mark.parametrize("ends", [(".lora_down.weight", ".lora_up.weight"), (".lora.down.weight", ".lora.up.weight")])
def test_text_encoders(name: str, part: str, path: str, ends: tuple[str, str]) -> None:
    if name.endswith("_lora"):
        ends = (".down.weight", ".up.weight")
    tensors = {**fill(lora_shapes({name: (8, 6)}, 2, *ends, alpha=True)), **pair(TO_Q)}
    file = parse(tensors)
    assert list(file.layers) == [TO_Q]
    assert {part: list(layers) for part, layers in file.text.items()} == {part: [path]}
    assert_same(changes(file.text[part]), {path: dense(tensors, *ends)[name]})
    assert file.unmatched == ()


def test_a_text_encoders_layer_that_none_of_them_has() -> None:
    file = parse({**pair("lora_te2_text_model_encoder_layers_3_odd"), **pair(TO_Q)})
    assert file.text == {}
    assert len(file.unmatched) == 2


# -- what is told -----------------------------------------------------------------------------------------------------


def test_half_a_lora_is_told() -> None:
    attention = pair("diffusion_model.layers.0.attention.to_qq", 2, 48, 48)
    file = parse({**attention, **pair("diffusion_model.layers.0.feed_forward.w1", 2, 128, 48)})
    assert file.unmatched == tuple(sorted(attention))
    match = check(file, tiny("z-image"))
    assert (match.matched, match.total) == (1, 2)
    assert match.sentence() == (
        "matched 1 of 2 modules, not layers.0.attention.to_qq: no layer of FLUX or Z-Image has this name"
    )


def test_a_layer_that_the_model_lacks_is_told() -> None:
    tensors = {**pair(TO_Q), **pair("transformer_blocks.7.attn.to_q"), **pair(TO_K, 2, 48)}
    match = check(parse(tensors), tiny("flux"))
    assert match.paths == (TO_Q,)
    assert dict(match.missing) == {
        "transformer_blocks.7.attn.to_q": "FluxTransformer2DModel has no linear layer of this name",
        TO_K: "the LoRA changes 48 x 32 weights, the layer has 32 x 32",
    }


def test_check_sees_through_adapters() -> None:
    from peft import LoraConfig

    module = tiny("flux")
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "first")
    assert check(parse(pair(TO_Q)), module).missing == ()


@pytest.mark.parametrize("family", ["flux", "z-image"])
def test_names_that_both_models_have_are_read_as_told(family: str) -> None:
    tensors = pair("x_embedder", 2, 48, 16)
    file = parse(tensors, family=family)
    assert list(file.layers) == ["x_embedder" if family == "flux" else "all_x_embedder.2-1"]
    assert parse(tensors).family is None


def test_inspect_is_json() -> None:
    tensors = {
        **pair(TO_Q, 2),
        **pair(TO_K, 8),
        f"{TO_K}.alpha": torch.tensor(2.0),
        f"{TO_Q}.dora_scale": torch.rand(32, 1),
    }
    told = inspect(parse({**tensors, "odd": torch.zeros(1)}))
    assert json.loads(json.dumps(told)) == told
    assert told == {
        "format": "diffusers",
        "family": "flux",
        "keys": 7,
        "parts": {
            "transformer": {
                "layers": 2,
                "ranks": {"2": 1, "8": 1},
                "alphas": {"none": 1, "2": 1},
                "scales": [0.25, 1.0],
                "dora": 1,
                "dense": 0,
                "modules": {"transformer_blocks.*.attn.to_q": 1, "transformer_blocks.*.attn.to_k": 1},
                "bytes": 4 * (2 * 64 + 8 * 64 + 32),
            }
        },
        "extra": {},
        "unmatched": ["odd"],
        "notes": [],
    }
