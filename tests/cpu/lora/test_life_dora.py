"""DoRA (LF-09): norms of rows by peft, norms of columns by our variant of it, against stock and the dense formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.loras import linear_layers, mixed_state
from support.pipes import lora_state, relative
from support.runs import FLUX, Kind, each_kind

import fusedit
from fusedit.lora.layers import LoraFile
from fusedit.lora.life import load_file
from fusedit.lora.parsing import parse

CLOSE = 2e-5


def with_row_norms(pipe: Any, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """In peft's layout: a magnitude of each output, 10 % around that of the weight."""
    state = lora_state(pipe, names=names)
    generator = torch.Generator().manual_seed(9)
    for path, layer in linear_layers(pipe.transformer).items():
        if f"transformer.{path}.lora_A.weight" in state:
            norm = layer.weight.detach().norm(dim=1)
            noise = 1 + 0.1 * torch.randn(norm.shape, generator=generator)
            state[f"transformer.{path}.lora_magnitude_vector"] = norm * noise
    return state


def with_column_norms(pipe: Any, seed: int = 0) -> LoraFile:
    """A LoraFile with a magnitude of each input, as OneTrainer writes."""
    file = parse(mixed_state(pipe, seed).tensors)
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for path, layer in file.layers.items():
        norm = linear_layers(pipe.transformer)[path].weight.detach().norm(dim=0, keepdim=True)
        magnitude = norm * (1 + 0.1 * torch.randn(norm.shape, generator=generator))
        layers[path] = layer._replace(magnitude=magnitude)
    return replace(file, layers=layers)


def add_dense(pipe: Any, file: Any, scale: float) -> None:
    """V diag(m / norm(V)), V = W + s B A, written out."""
    with torch.no_grad():
        for path, layer in file.layers.items():
            weight = pipe.transformer.get_parameter(f"{path}.weight")
            alpha = layer.rank if layer.alpha is None else layer.alpha
            new = weight.double() + scale * alpha / layer.rank * (layer.up.double() @ layer.down.double())
            weight.copy_(new * (layer.magnitude.double() / new.square().sum(0, keepdim=True).sqrt()))


@each_kind
def test_norms_of_rows_equal_eager_peft(kind: Kind) -> None:
    reference, pipe, plain = kind.pipe(), kind.pipe(), kind.pipe()
    state, without = with_row_norms(pipe), lora_state(pipe)
    reference.load_lora_weights(dict(state), adapter_name="a")
    handle = fusedit.accelerate(pipe)
    report = fusedit.load_lora(pipe, state, "a")
    assert report.matched == report.total
    fusedit.load_lora(plain, without, "a")
    stock = kind.call(reference)
    assert relative(kind.call(pipe), stock) < CLOSE
    assert relative(kind.call(plain), stock) > 1e-3, "magnitudes matter"
    for each in (reference, pipe):
        each.set_adapters(["a"], [0.4])
    assert relative(kind.call(pipe), kind.call(reference)) < CLOSE
    assert any(site.fused for site in handle.report().rewritten)


@each_kind
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_norms_of_columns_equal_the_dense_formula(kind: Kind, scale: float) -> None:
    pipe, dense = kind.pipe(), kind.pipe()
    plain = kind.call(pipe)
    fusedit.accelerate(pipe)
    file = with_column_norms(pipe)
    load_file(pipe, file, None, "a", scale)
    add_dense(dense, file, scale)
    assert relative(kind.call(dense), plain) > 1e-3
    assert relative(kind.call(pipe), kind.call(dense)) < CLOSE
    fusedit.unload_lora(pipe, "a")
    assert relative(kind.call(pipe), plain) < CLOSE


@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
def test_both_are_fused_and_unfused_bit_for_bit_beside_a_plain_one() -> None:
    pipe = FLUX.pipe()
    plain = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    fusedit.accelerate(pipe)
    files = [parse(mixed_state(pipe, 5).tensors), with_column_norms(pipe, 6), parse(with_row_norms(pipe))]
    for name, file in zip(("plain", "columns", "rows"), files, strict=True):
        load_file(pipe, file, None, name)
    for name in ("columns", "rows"):
        fusedit.set_loras(pipe, {name: 0.7})
        unfused = FLUX.call(pipe)
        pipe.fuse_lora(safe_fusing=name == "rows")
        assert relative(FLUX.call(pipe), unfused) < CLOSE
        pipe.unfuse_lora()
    fusedit.set_loras(pipe, {"plain": 1.0, "columns": 0.5, "rows": 0.5})
    pipe.fuse_lora(adapter_names=["plain"])
    pipe.fuse_lora(adapter_names=["columns", "rows"])
    pipe.unfuse_lora()
    for name in ("plain", "columns", "rows"):
        fusedit.unload_lora(pipe, name)
    now = pipe.transformer.state_dict()
    assert [name for name in plain if not torch.equal(now[name], plain[name])] == []


def test_a_merge_of_columns_can_be_subtracted_where_nothing_was_kept() -> None:
    """peft's own unmerge, on a pipeline that is not accelerated."""
    pipe = FLUX.pipe()
    plain = FLUX.call(pipe)
    load_file(pipe, with_column_norms(pipe), None, "a")
    unfused = FLUX.call(pipe)
    pipe.fuse_lora()
    assert relative(FLUX.call(pipe), unfused) < CLOSE
    pipe.unfuse_lora()
    assert relative(FLUX.call(pipe), unfused) < CLOSE
    fusedit.unload_lora(pipe, "a")
    assert relative(FLUX.call(pipe), plain) < CLOSE
