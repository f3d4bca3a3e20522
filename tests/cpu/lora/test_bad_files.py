"""Files that are no LoRA for FLUX.1 or Z-Image: one sentence each, and nothing else ever."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.lora_files import HIDDEN, fill, lora_shapes, tiny
from torch import Tensor

from fusedit.errors import ArgumentError, FuseditError, LoraError
from fusedit.lora import check, parse, read, read_tensors

TO_Q = "transformer_blocks.0.attn.to_q"
DOWN, UP = f"{TO_Q}.lora_A.weight", f"{TO_Q}.lora_B.weight"
GOOD = fill(lora_shapes({TO_Q: (HIDDEN, HIDDEN)}, 2, ".lora_A.weight", ".lora_B.weight"))


def refused(call: Callable[[], object]) -> str:
    """The message: one sentence, without a full stop or line break."""
    with pytest.raises(LoraError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message
    assert not message.endswith(".")
    return message


class Trap:
    """Unpickling one of these fails the test."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (pytest.fail, ("the pickle was loaded",))


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist; give the path" in refused(lambda: read(tmp_path / "no.safetensors"))
    assert "does not exist" in refused(lambda: read("bad\0name"))


def test_a_folder(tmp_path: Path) -> None:
    assert "holds 0 .safetensors files" in refused(lambda: read(tmp_path))
    save_file(GOOD, tmp_path / "a.safetensors")
    assert len(read(tmp_path).layers) == 1
    save_file(GOOD, tmp_path / "b.safetensors")
    message = refused(lambda: read(tmp_path))
    assert message == f"folder {str(tmp_path)!r} holds 2 .safetensors files; name the LoRA file itself"


def test_neither_a_file_nor_a_folder() -> None:
    assert "'/dev/null' is neither a file nor a folder" in refused(lambda: read("/dev/null"))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [({1: torch.ones(2)}, "not int 1 and a Tensor"), ({"a": [1.0]}, "not str 'a' and a list")],
)
def test_something_else_than_tensors_by_key(tensors: Any, words: str) -> None:
    assert f"a LoRA is tensors by key, {words}" in refused(lambda: parse(tensors))


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"")
    assert "is empty" in refused(lambda: read(path))


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({}, path)
    assert f"{str(path)!r}: the file holds no tensors" in refused(lambda: read(path))


@pytest.mark.parametrize("left", [4, 8, 60, 0.5, -1])
def test_a_truncated_file(tmp_path: Path, left: float) -> None:
    path = tmp_path / "a.safetensors"
    save_file(GOOD, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * left) if left == 0.5 else int(left)])
    message = refused(lambda: read(path))
    told = (
        f"is truncated: {path.stat().st_size} bytes of {len(whole)}" if left in (0.5, -1) else "is no safetensors file"
    )
    assert told in message


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"<html>not found</html>" * 40)
    assert "is no safetensors file" in refused(lambda: read_tensors(path))


@pytest.mark.parametrize("name", ["lora.pt", "lora.bin", "lora.ckpt", "lora.pth", "lora.safetensors"])
@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    if how == "plain":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save(Trap(), path, _use_new_zipfile_serialization=how == "zip")
    message = refused(lambda: read(path))
    assert (
        "is a pickle, which can run any code when loaded, so it was not opened; safetensors.torch.save_file" in message
    )


def test_safetensors_under_a_pickles_name_are_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "lora.bin"
    save_file(GOOD, path)
    assert "has the name of a pickle, which runs code where others load it, so" in refused(lambda: read(path))


@pytest.mark.parametrize("padding", range(0, 160, 8))
def test_no_length_of_a_header_looks_like_a_pickle(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "a.safetensors"
    save_file(GOOD, path, metadata={"x": "y" * (20000 + padding)})
    assert len(read(path).layers) == 1


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_names_the_key(value: float, dtype: torch.dtype) -> None:
    bad = {key: tensor.to(dtype, copy=True) for key, tensor in GOOD.items()}
    bad[UP][3, 1] = value
    assert f"key {UP!r} holds NaN or infinity" in refused(lambda: parse(bad))


def test_fp64_beyond_fp32_names_the_key() -> None:
    bad = {key: tensor.double() * 1e300 if key == UP else tensor for key, tensor in GOOD.items()}
    assert f"key {UP!r} holds numbers beyond fp32" in refused(lambda: parse(bad))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({UP: torch.ones(HIDDEN, 3)}, f"layer {TO_Q!r} has a down matrix of rank 2 and an up matrix of rank 3"),
        ({UP: None}, f"layer {TO_Q!r} has no up beside its down"),
        ({DOWN: None}, f"layer {TO_Q!r} has no down beside its up"),
        ({f"{TO_Q}.alpha": torch.ones(2)}, "is no single number but float32 of shape (2,)"),
        ({f"{TO_Q}.alpha": torch.tensor(float("nan"))}, "holds nan; an alpha is a finite number"),
        ({UP: torch.ones(HIDDEN, 2, 3, 3)}, f"layer {TO_Q!r} holds a tensor of shape (32, 2, 3, 3)"),
        ({DOWN: torch.ones(2, HIDDEN, 1)}, "of shape (2, 32, 1)"),
        ({DOWN: torch.ones(0, HIDDEN), UP: torch.ones(HIDDEN, 0)}, "of shape (0, 32)"),
        ({DOWN: torch.ones(2, HIDDEN, dtype=torch.int8)}, f"key {DOWN!r} holds int8"),
        ({DOWN: torch.ones(2, HIDDEN, dtype=torch.complex64)}, f"key {DOWN!r} holds complex64"),
        ({f"{TO_Q}.lora_A.second.weight": torch.ones(2, HIDDEN)}, "are the same part of one layer"),
        ({"double_blocks.0.img_attn.qkv.lora_A.weight": torch.ones(2, HIDDEN),
          "double_blocks.0.img_attn.qkv.lora_B.weight": torch.ones(95, 2)}, "has 95 outputs, which are no q, k and v"),
        ({"single_blocks.0.linear1.lora_A.weight": torch.ones(2, HIDDEN),
          "single_blocks.0.linear1.lora_B.weight": torch.ones(96, 2)}, "has 96 outputs and 32 inputs"),
        ({"final_layer.adaLN_modulation.1.lora_A.weight": torch.ones(2, HIDDEN),
          "final_layer.adaLN_modulation.1.lora_B.weight": torch.ones(63, 2)}, "no shift and scale of one size"),
    ],
)  # fmt: skip
def test_tensors_that_make_no_layer(changes: dict[str, Tensor | None], told: str) -> None:
    bad = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    assert told in refused(lambda: parse(bad))


def test_an_alpha_alone_is_told_as_unmatched() -> None:
    file = parse({**GOOD, "transformer_blocks.1.attn.to_q.alpha": torch.tensor(1.0)})
    assert file.unmatched == ("transformer_blocks.1.attn.to_q.alpha",)


# -- other models -----------------------------------------------------------------------------------------------------

FOREIGN = {
    "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": "Stable Diffusion 1, 2 or XL",
    "lora_unet_input_blocks_4_1_proj_in.lora_down.weight": "Stable Diffusion 1, 2 or XL",
    "unet.mid_block.attentions.0.proj_in.lora_A.weight": "Stable Diffusion 1, 2 or XL",
    "transformer.transformer_blocks.3.img_mlp.net.0.proj.lora_A.weight": "Qwen-Image",
    "diffusion_model.transformer_blocks.3.txt_mod.1.lora_A.weight": "Qwen-Image",
    "lora_unet_joint_blocks_3_x_block_attn_qkv.lora_down.weight": "Stable Diffusion 3",
    "transformer.transformer_blocks.3.attn1.to_q.lora_A.weight": "PixArt, LTX-Video",
    "diffusion_model.blocks.3.self_attn.q.lora_A.weight": "Wan or Cosmos",
    "lora_unet_blocks_3_cross_attn_k.lora_down.weight": "Wan or Cosmos",
    "diffusion_model.double_blocks.0.img_attn_qkv.lora_A.weight": "HunyuanVideo",
    "lora_unet_double_blocks_0_img_mlp_fc1.lora_down.weight": "HunyuanVideo",
    "diffusion_model.double_stream_modulation_img.lin.lora_A.weight": "FLUX.2",
    "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight": "FLUX.2",
    "transformer.transformer_blocks.0.ff.linear_in.lora_A.weight": "FLUX.2",
    "diffusion_model.double_stream_blocks.0.block.attn1.to_q.lora_A.weight": "HiDream",
    "diffusion_model.distilled_guidance_layer.in_proj.lora_A.weight": "Chroma",
    "transformer.joint_transformer_blocks.0.attn.to_q.lora_A.weight": "AuraFlow",
    f"{TO_Q}.oft_blocks": "OFT",
    f"{TO_Q}.boft_R": "BOFT",
    f"{TO_Q}.a1.weight": "GLoRA",
    f"{TO_Q}.ia3_l": "IA3",
    f"{TO_Q}.vera_lambda_b": "VeRA",
    f"{TO_Q}.lora_mid.weight": "a LoRA of convolutions with a core tensor",
}


@pytest.mark.parametrize("key", FOREIGN)
def test_another_model_or_method_is_named(key: str) -> None:
    message = refused(lambda: parse({key: torch.ones(2, 2), **GOOD}))
    assert FOREIGN[key] in message
    assert repr(key) in message


def test_keys_that_nothing_knows() -> None:
    message = refused(lambda: parse({"a.lora_A.weight": torch.ones(2, 2), "b": torch.ones(1)}))
    assert message.startswith("none of its 2 keys (first 'a.lora_A.weight') names a layer of FLUX.1, Z-Image")


def test_a_whole_model() -> None:
    message = refused(
        lambda: parse({"layers.0.attention.qkv.weight": torch.ones(6, 2), "x_embedder.bias": torch.ones(2)})
    )
    assert "holds whole weights (first key 'layers.0.attention.qkv.weight'), not a LoRA" in message


def test_the_other_family() -> None:
    message = refused(lambda: check(parse(GOOD), tiny("z-image")))
    assert message == "the LoRA is for flux and the transformer is ZImageTransformer2DModel; load one made for z-image"


def test_an_unknown_family() -> None:
    with pytest.raises(ArgumentError, match="give flux or z-image"):
        parse(GOOD, family="sdxl")


# -- anything ---------------------------------------------------------------------------------------------------------

_PREFIXES = "transformer. lora_unet_ diffusion_model. base_model.model. lora_te1_ text_encoder. default."
_BLOCKS = "transformer_blocks double_blocks single_blocks layers encoder.layers x_embedder final_layer .0 _1 .99 norm"
_LAYERS = (
    ".attn.to_q _img_attn_qkv .linear1 .linear .attention.qkv .adaLN_modulation.1 .processor.qkv_lora1 .query_norm"
)
_ROLES = (
    "_lora .lora_A .lora_B .lora_down .lora_up .lora .down .up .weight .bias .scale .alpha .dora_scale .diff .diff_b"
)
_FACTORS = ".lokr_w1 .lokr_w2_a .lokr_t2 .hada_w1_a .hada_t1 .. _ . é"
PIECES = " ".join((_PREFIXES, _BLOCKS, _LAYERS, _ROLES, _FACTORS)).split()


def garbage(seed: int) -> dict[str, Tensor]:
    draw = random.Random(seed)
    tensors = {}
    for _ in range(draw.randint(1, 12)):
        key = "".join(draw.choices(PIECES, k=draw.randint(0, 6)))
        shape = [draw.choice((0, 1, 2, 3, 4, 6)) for _ in range(draw.randint(0, 5))]
        tensors[key] = torch.zeros(shape, dtype=draw.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool)))
    return tensors


@pytest.mark.parametrize("start", range(0, 4000, 1000))
def test_no_keys_and_shapes_raise_anything_else(start: int) -> None:
    refusals = []
    for seed in range(start, start + 1000):
        try:
            parse(garbage(seed))
        except FuseditError as error:
            refusals.append(str(error))
    assert len(refusals) > 500
    assert not any("\n" in message for message in refusals)


@pytest.mark.parametrize("start", range(0, 2000, 500))
def test_damaged_keys_of_a_good_file_raise_nothing_else(start: int) -> None:
    names = {
        "double_blocks.0.img_attn.qkv": (96, 32),
        "single_blocks.0.linear1": (224, 32),
        "final_layer.linear": (16, 32),
    }
    good = fill(lora_shapes(names, 2, ".lora_A.weight", ".lora_B.weight", alpha=True))
    refusals = 0
    for seed in range(start, start + 500):
        draw = random.Random(seed)
        tensors = dict(good)
        for _ in range(draw.randint(1, 3)):
            key = draw.choice(list(tensors))
            value = tensors.pop(key)
            place = draw.randrange(len(key) or 1)
            key = draw.choice(
                (key, key[:place], key[:place] + key[place + 1 :], key[:place] + draw.choice("._0xA") + key[place:])
            )
            tensors[key] = value if draw.random() < 0.5 else value.reshape(-1)[: draw.randrange(9)]
        try:
            parse(tensors)
        except FuseditError:
            refusals += 1
    assert 0 < refusals < 500


def test_damaged_bytes_raise_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(GOOD, path, metadata={"lora_adapter_metadata": '{"transformer.lora_alpha": 3}'})
    whole = path.read_bytes()
    refusals = []
    for seed in range(300):
        draw = random.Random(seed)
        bytes_ = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randint(1, 4)):
            if bytes_:
                bytes_[draw.randrange(min(len(bytes_), 400))] = draw.randrange(256)
        path.write_bytes(bytes_)
        try:
            read(path)
        except FuseditError as error:
            refusals.append(str(error))
    assert len(refusals) > 200
    assert not any("\n" in message for message in refusals)
