"""LoKr and LoHa: exactly the change that LyCORIS defines, whatever pair of matrices stands for it."""

from __future__ import annotations

import pytest
import torch
from support.lora_files import fill, tiny
from torch import Tensor

from fusedit.errors import LoraError
from fusedit.lora import LoraLayer, check, inspect, parse, reader

QKV = "diffusion_model.layers.0.attention.qkv"
TO_Q = "diffusion_model.layers.0.attention.to_q"
W1 = "diffusion_model.layers.0.feed_forward.w1"
SIDES = {
    "w1": {"whole": {"lokr_w1": (8, 4)}, "factored": {"lokr_w1_a": (8, 2), "lokr_w1_b": (2, 4)}},
    "w2": {
        "whole": {"lokr_w2": (16, 12)},
        "factored": {"lokr_w2_a": (16, 2), "lokr_w2_b": (2, 12)},
        "core": {"lokr_t2": (2, 2, 1, 1), "lokr_w2_a": (2, 16), "lokr_w2_b": (2, 12)},
    },
}


def one(tensors: dict[str, Tensor], path: str = "layers.0.feed_forward.w1") -> LoraLayer:
    return parse(tensors).layers[path]


def side(tensors: dict[str, Tensor], name: str, which: str) -> Tensor:
    get = {key.split(f".lokr_{which}")[-1]: value.double() for key, value in tensors.items() if f".lokr_{which}" in key}
    if "" in get:
        return get[""]
    core = tensors.get(f"{name}.lokr_t2")
    if which == "w2" and core is not None:
        return get["_a"].T @ core.double()[:, :, 0, 0] @ get["_b"]
    return get["_a"] @ get["_b"]


@pytest.mark.parametrize("alpha", [None, 1.0, 6.0])
@pytest.mark.parametrize("w2", SIDES["w2"])
@pytest.mark.parametrize("w1", SIDES["w1"])
def test_lokr(w1: str, w2: str, alpha: float | None) -> None:
    tensors = fill({f"{W1}.{key}": shape for key, shape in {**SIDES["w1"][w1], **SIDES["w2"][w2]}.items()})
    kron = torch.kron(side(tensors, W1, "w1"), side(tensors, W1, "w2"))
    if alpha is not None:
        tensors[f"{W1}.alpha"] = torch.tensor(alpha)
    whole = w1 == w2 == "whole"
    scale = 1.0 if alpha is None or whole else alpha / 2  # without a factored side there is no rank to divide by
    layer = one(tensors)
    assert torch.allclose(layer.delta().double(), scale * kron, rtol=1e-5, atol=1e-5)
    sides = (4 if w1 == "whole" else 2) * (12 if w2 == "whole" else 2)
    assert layer.rank == min(sides, 48)
    assert layer.down.dtype == layer.up.dtype == torch.float32
    assert parse(tensors).format == "lokr"


def test_lokr_of_a_fused_matrix_is_split_exactly() -> None:
    tensors = fill({f"{QKV}.lokr_w1": (12, 4), f"{QKV}.lokr_w2_a": (12, 2), f"{QKV}.lokr_w2_b": (2, 12)})
    w2 = tensors[f"{QKV}.lokr_w2_a"] @ tensors[f"{QKV}.lokr_w2_b"]
    whole = torch.kron(tensors[f"{QKV}.lokr_w1"], w2)
    layers = parse(tensors).layers
    parts = [layers[f"layers.0.attention.to_{which}"].delta() for which in "qkv"]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    assert check(parse(tensors), tiny("z-image")).sentence() == "matched 3 of 3 modules"


@pytest.mark.parametrize(("rank", "kept"), [(2, 4), (3, 9), (7, 48)])
@pytest.mark.parametrize("alpha", [None, 3.0])
def test_loha(rank: int, kept: int, alpha: float | None) -> None:
    ends = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    tensors = fill({f"{TO_Q}.{end}": (48, rank) if end.endswith("a") else (rank, 48) for end in ends})
    a, b, c, d = (tensors[f"{TO_Q}.{end}"].double() for end in ends)
    if alpha is not None:
        tensors[f"{TO_Q}.alpha"] = torch.tensor(alpha)
    layer = one(tensors, "layers.0.attention.to_q")
    expected = (a @ b) * (c @ d) * (1.0 if alpha is None else alpha / rank)
    assert torch.allclose(layer.delta().double(), expected, rtol=1e-5, atol=1e-5)
    assert layer.rank == kept  # rank^2, or the whole matrix where that is smaller
    assert parse(tensors).format == "loha"


def test_loha_with_cores() -> None:
    shapes = {"hada_t1": (2, 2, 1, 1), "hada_w1_a": (2, 48), "hada_w1_b": (2, 48)}
    shapes |= {"hada_t2": (2, 2, 1, 1), "hada_w2_a": (2, 48), "hada_w2_b": (2, 48)}
    tensors = fill({f"{TO_Q}.{key}": shape for key, shape in shapes.items()})
    t1, a, b, t2, c, d = (value.double() for value in tensors.values())
    expected = (a.T @ t1[:, :, 0, 0] @ b) * (c.T @ t2[:, :, 0, 0] @ d)
    assert torch.allclose(one(tensors, "layers.0.attention.to_q").delta().double(), expected, rtol=1e-5, atol=1e-5)


def test_factors_in_bf16_are_multiplied_in_fp32() -> None:
    tensors = fill({f"{W1}.lokr_w1": (8, 4), f"{W1}.lokr_w2": (16, 12)}, dtype=torch.bfloat16)
    exact = torch.kron(tensors[f"{W1}.lokr_w1"].float(), tensors[f"{W1}.lokr_w2"].float())
    assert torch.equal(one(tensors).delta(), exact)
    stock = torch.kron(tensors[f"{W1}.lokr_w1"], tensors[f"{W1}.lokr_w2"])
    assert not torch.equal(stock.float(), exact)


@pytest.mark.parametrize("shape", [(10, 6), (6, 10)])
def test_a_whole_change(shape: tuple[int, int]) -> None:
    """LyCORIS calls its training of whole matrices full: `.diff`."""
    tensors = fill({f"{W1}.diff": shape})
    file = parse({**tensors, **fill({f"{TO_Q}.lora_A.weight": (2, 48), f"{TO_Q}.lora_B.weight": (48, 2)})})
    layer = file.layers["layers.0.feed_forward.w1"]
    assert torch.equal(layer.delta(), tensors[f"{W1}.diff"])
    assert layer.rank == 6
    assert inspect(file)["parts"]["transformer"]["dense"] == 1


def test_too_much_memory_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = fill({f"{W1}.lokr_w1": (8, 4), f"{W1}.lokr_w2": (16, 12)})  # 128 x 48 of rank 48
    monkeypatch.setattr(reader, "MOST_BYTES", 4 * 48 * (128 + 48))
    assert parse(tensors).layers["layers.0.feed_forward.w1"].rank == 48
    monkeypatch.setattr(reader, "MOST_BYTES", 4 * 48 * (128 + 48) - 1)
    with pytest.raises(LoraError, match=r"rank that they would take .* GiB as pairs of matrices"):
        parse(tensors)


def test_the_real_flux_of_whole_factors_is_refused_at_once() -> None:
    blocks = [f"diffusion_model.double_blocks.{i}.img_mlp.0" for i in range(19)]
    factor = {"lokr_w1": torch.ones(8, 8), "lokr_w2": torch.ones(1536, 384)}
    tensors = {f"{block}.{key}": value for block in blocks for key, value in factor.items()}
    tensors |= {key.replace("img", "txt"): value for key, value in tensors.items()}
    with pytest.raises(LoraError, match=r"would take 6\.7 GiB"):
        parse(tensors)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"lokr_w1": (8, 4)}, "no lokr_w2_a"),
        ({"lokr_w1": (8, 4), "lokr_w2_a": (16, 2)}, "no lokr_w2_b"),
        ({"lokr_w1": (8, 4), "lokr_w2_a": (16, 2), "lokr_w2_b": (3, 12)}, "do not multiply"),
        ({"lokr_w1": (8, 4), "lokr_w2_a": (3, 16), "lokr_w2_b": (2, 12), "lokr_t2": (2, 2, 1, 1)}, "do not multiply"),
        ({"lokr_w1": (8, 4), "lokr_w2": (16, 12, 3, 3)}, "linear layers"),
        ({"hada_w1_a": (48, 2), "hada_w1_b": (2, 48)}, "no hada_w2_a"),
        ({"hada_w1_a": (8, 2), "hada_w1_b": (2, 4), "hada_w2_a": (8, 2), "hada_w2_b": (2, 5)}, r"and \(8, 5\)"),
    ],
)  # fmt: skip
def test_damaged_factors(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    with pytest.raises(LoraError, match=told):
        parse(fill({f"{TO_Q}.{key}": shape for key, shape in shapes.items()}))
