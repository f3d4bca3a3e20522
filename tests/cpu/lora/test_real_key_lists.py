"""Every published file whose keys are known, scaled down: each layer at the right place with the right scale."""

from __future__ import annotations

import pytest
import torch
from support.lora_files import (
    assert_same,
    by_underscores,
    changes,
    dense,
    fill,
    flux_native,
    flux_to_diffusers,
    linear_layers,
    lora_shapes,
    real_shapes,
    small_shapes,
    tiny,
    z_image_to_diffusers,
)
from torch import Tensor, nn

from fusedit.lora import LoraFile, check, parse

KOHYA = (".lora_down.weight", ".lora_up.weight")


def parsed(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], LoraFile]:
    tensors = fill(small_shapes(name), dtype=dtype)
    return tensors, parse(tensors)


def all_matched(file: LoraFile, module: nn.Module) -> None:
    match = check(file, module)
    assert match.missing == ()
    assert match.matched == match.total == len(file.layers) > 0
    assert file.unmatched == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["flux_lora_kohya_format", "flux_lora_kohya_with_te1_format"])
def test_kohya(name: str, dtype: torch.dtype) -> None:
    module = tiny("flux")
    tensors, file = parsed(name, dtype)
    assert (file.format, file.family) == ("kohya", "flux")
    all_matched(file, module)
    names = by_underscores(flux_native(module))
    raw = {stem: value for stem, value in dense(tensors, *KOHYA).items() if stem.startswith("lora_unet_")}
    native = {names[stem.removeprefix("lora_unet_")]: value for stem, value in raw.items()}
    assert_same(changes(file.layers), flux_to_diffusers(module, native))


def test_the_text_encoder_of_a_kohya_file() -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    tensors, file = parsed("flux_lora_kohya_with_te1_format")
    assert list(file.text) == ["text_encoder"]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 2}
    encoder = CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=10, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    assert check(file, encoder, "text_encoder").sentence() == "matched 72 of 72 modules"
    names = by_underscores(linear_layers(encoder))
    expected = {
        names[stem.removeprefix("lora_te1_text_model_")]: value
        for stem, value in dense(tensors, *KOHYA).items()
        if stem.startswith("lora_te1_")
    }
    assert_same(changes(file.text["text_encoder"]), expected)


@pytest.mark.parametrize("name", ["flux_lora_diffusers_format", "flux_lora_diffusers_no_proj_mlp_format"])
def test_diffusers(name: str) -> None:
    tensors, file = parsed(name)
    assert (file.format, file.family) == ("diffusers", "flux")
    all_matched(file, tiny("flux"))
    assert_same(changes(file.layers), {k.removeprefix("transformer."): v for k, v in dense(tensors).items()})
    assert {layer.alpha for layer in file.layers.values()} == {None}


def test_ai_toolkit() -> None:
    module = tiny("flux")
    tensors, file = parsed("flux_lora_aitoolkit_format")
    assert (file.format, file.family) == ("ai-toolkit", "flux")
    all_matched(file, module)
    native = {stem.removeprefix("diffusion_model."): value for stem, value in dense(tensors).items()}
    assert_same(changes(file.layers), flux_to_diffusers(module, native))


def test_onetrainer_with_dora() -> None:
    module = tiny("flux")
    tensors, file = parsed("flux_dora_onetrainer_format")
    assert (file.format, file.family) == ("onetrainer", "flux")
    all_matched(file, module)
    weights = dict(module.named_parameters())
    names = by_underscores(linear_layers(module))
    for stem, change in dense(tensors, *KOHYA).items():
        if stem.startswith("lora_transformer_"):
            path = names[stem.removeprefix("lora_transformer_")]
            base = weights[f"{path}.weight"].double()
            new = base + change
            new = new * tensors[f"{stem}.dora_scale"].double() / new.pow(2).sum(0, keepdim=True).sqrt()
            assert torch.allclose(file.layers[path].delta(base).double(), new - base, rtol=1e-4, atol=1e-5), path


def test_the_text_encoders_of_a_onetrainer_file() -> None:
    from transformers import T5Config, T5EncoderModel

    tensors, file = parsed("flux_dora_onetrainer_format")
    assert {part: len(layers) for part, layers in file.text.items()} == {"text_encoder": 72, "text_encoder_2": 168}
    sizes = {"d_model": 20, "d_ff": 28, "d_kv": 10, "num_heads": 2, "num_layers": 24}
    encoder = T5EncoderModel(T5Config(**sizes, vocab_size=10, feed_forward_proj="gated-gelu"))
    assert check(file, encoder, "text_encoder_2").sentence() == "matched 168 of 168 modules"
    names = by_underscores(linear_layers(encoder))
    expected = {
        names[stem.removeprefix("lora_te2_")]: value
        for stem, value in dense(tensors, *KOHYA).items()
        if stem.startswith("lora_te2_")
    }
    assert_same(changes(file.text["text_encoder_2"]), expected)
    for layer in file.text["text_encoder_2"].values():
        assert layer.magnitude is not None
        assert layer.magnitude.shape == (1, layer.down.shape[1])


def z_image_keys() -> dict[str, tuple[int, ...]]:
    shapes = real_shapes("z_image_transformer_comfyui_keys")
    matrices = {k.removesuffix(".weight"): s for k, s in shapes.items() if len(s) == 2 and k.endswith(".weight")}
    return lora_shapes({f"diffusion_model.{n}": s for n, s in matrices.items()}, 1, ".lora_A.weight", ".lora_B.weight")


def test_every_matrix_of_a_z_image_checkpoint_has_a_place() -> None:
    """LF-02, LF-07: fused qkv, context refiner, final layer and adaLN among them."""
    tensors = fill({key: tuple(-(-n // 80) * 3 if n > 1 else 1 for n in s) for key, s in z_image_keys().items()})
    file = parse(tensors)
    assert (file.format, file.family, file.unmatched) == ("ai-toolkit", "z-image", ())
    native = {stem.removeprefix("diffusion_model."): value for stem, value in dense(tensors).items()}
    assert_same(changes(file.layers), z_image_to_diffusers(native))


def test_the_sizes_of_the_real_z_image_fit() -> None:
    from diffusers import ZImageTransformer2DModel

    with torch.device("meta"):
        real = ZImageTransformer2DModel()
    match = check(parse(fill(z_image_keys())), real)
    assert match.missing == ()
    assert match.matched == 29
