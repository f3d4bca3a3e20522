"""Dtype, device and offload: codes move as codes, whatever moves them, before and after accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import bits, converted
from support.pipes import relative
from support.runs import FLUX, Z_IMAGE, Kind, each_kind, fused, reasons

import fusedit
from fusedit.errors import RestoreError

CPU = torch.device("cpu")


def codes(pipe: Any) -> dict[str, torch.Tensor]:
    return {path: layer.weight.detach().clone().view(torch.uint8) for path, layer in converted(pipe).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@each_kind
def test_to_a_dtype_changes_the_compute_dtype_alone(kind: Kind) -> None:
    pipe = kind.pipe()
    fusedit.accelerate(pipe, "fp8")
    # From given noise: on a CPU, torch 2.11 draws other numbers in bf16 than in fp32 of the same seed.
    noise = torch.randn(kind.call(pipe).shape, generator=torch.Generator().manual_seed(3))
    drawn, before = kind.call(pipe, latents=noise), codes(pipe)
    for move, dtype in (
        (lambda: pipe.to(torch.bfloat16), torch.bfloat16),
        (lambda: pipe.transformer.half(), torch.float16),
        (lambda: pipe.transformer.float(), torch.float32),
        (lambda: pipe.transformer.to(torch.bfloat16), torch.bfloat16),
        (lambda: pipe.to(torch.float32), torch.float32),
    ):
        move()
        assert pipe.transformer.dtype is dtype
        assert same(codes(pipe), before)
        assert all(layer.weight_scale.dtype is torch.float32 for layer in converted(pipe).values())
        if dtype is torch.bfloat16:
            assert relative(kind.call(pipe, latents=noise).float(), drawn) < 0.1
    assert relative(kind.call(pipe, latents=noise), drawn) < 0.1, "biases and embedders went through bf16"


def test_moves_to_another_device_and_its_storages_are_freed() -> None:
    pipe = Z_IMAGE.pipe()
    fusedit.accelerate(pipe, "fp8", originals="drop")
    Z_IMAGE.call(pipe)
    shapes = {path: layer.weight.shape for path, layer in converted(pipe).items()}
    pipe.transformer.to("meta")
    for path, layer in converted(pipe).items():
        assert layer.weight.is_meta
        assert layer.weight_scale.is_meta
        assert layer.weight.dtype is torch.float8_e4m3fn
        assert layer.weight.shape == shapes[path]
    assert all(p.is_meta for p in pipe.transformer.parameters())


def test_restore_and_paused_are_refused_while_weights_are_elsewhere() -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    pipe.transformer.to("meta")
    for attempt in (handle.restore, lambda: handle.paused().__enter__(), lambda: fusedit.accelerate(pipe, "exact")):
        with pytest.raises(RestoreError, match=r"cannot be given back: they are moved layer by layer .*; nothing was"):
            attempt()
    assert handle.report().active
    assert len(converted(pipe)) > 0


def model_offload(pipe: Any) -> Callable[[], None]:
    pipe.enable_model_cpu_offload(device="cpu")
    return pipe.remove_all_hooks  # type: ignore[no-any-return]


def sequential_offload(pipe: Any) -> Callable[[], None]:
    """What enable_sequential_cpu_offload does, which wants a GPU."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    pipe.transformer.requires_grad_(False)
    cpu_offload(pipe.transformer, execution_device=CPU)
    return lambda: remove_hook_from_module(pipe.transformer, recurse=True)  # type: ignore[no-any-return]


def group_offload(pipe: Any, kind: str = "block_level") -> Callable[[], None]:
    from diffusers.hooks import HookRegistry

    blocks = 1 if kind == "block_level" else None
    pipe.transformer.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type=kind, num_blocks_per_group=blocks
    )
    return lambda: HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook(
        "group_offloading", recurse=True
    )


def leaf_offload(pipe: Any) -> Callable[[], None]:
    return group_offload(pipe, "leaf_level")


class Stream:
    """A stand-in for a stream of a GPU: group offload with one keeps copies of all weights, and puts them back."""

    def synchronize(self) -> None: ...


def streamed_offload(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    from contextlib import nullcontext

    from diffusers.hooks import group_offloading

    class Backend:
        def __init__(self, *_: Any) -> None: ...

        def stream(self, *_: Any) -> Any:
            return nullcontext()

        def current_stream(self) -> Stream:
            return Stream()

    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Backend)
    right = group_offloading.ModuleGroup.__init__

    def with_stream(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **{**kwargs, "stream": Stream(), "low_cpu_mem_usage": True})

    monkeypatch.setattr(group_offloading.ModuleGroup, "__init__", with_stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t.clone())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    return group_offload(pipe)


def called(pipe: Any) -> torch.Tensor:
    """The transformer alone: under sequential offload the pipeline would take meta for the device to compute on."""
    with torch.no_grad():
        return pipe.transformer(  # type: ignore[no-any-return]
            hidden_states=torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0)),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([3.5]),
            img_ids=torch.zeros(12, 3),
            txt_ids=torch.zeros(7, 3),
            encoder_hidden_states=torch.ones(1, 7, 24),
            pooled_projections=torch.ones(1, 20),
        )[0]


@pytest.mark.parametrize("offload", [model_offload, sequential_offload, group_offload, leaf_offload])
@pytest.mark.parametrize("order", ["on off restore", "on restore off", "before"])
def test_offload_in_every_order(offload: Callable[[Any], Callable[[], None]], order: str) -> None:
    """Whoever moves the weights, the picture is the tier's; and none of them brings codes back behind restore()."""
    pipe = FLUX.pipe()
    pipe.transformer.requires_grad_(False)
    stock, before = called(pipe), bits(pipe)
    if order == "before":
        off = offload(pipe)
        handle = fusedit.accelerate(pipe, "fp8")
        refused = {r.reason for r in handle.report().refused}
        if offload is sequential_offload:
            assert any("accelerate the pipeline before enabling it" in reason for reason in refused)
            assert torch.equal(called(pipe), stock)
        else:
            assert 0 < relative(called(pipe), stock) < 0.05
        handle.restore()
        assert torch.equal(called(pipe), stock)
        off()
    else:
        handle = fusedit.accelerate(pipe, "fp8")
        drawn = called(pipe)
        off = offload(pipe)
        count = fused(handle)
        moved = called(pipe)
        assert relative(moved, drawn) < 0.02
        assert fused(handle) > count or reasons(handle)
        if order == "on off restore":
            off()
            assert (
                relative(called(pipe), drawn) < 0.02
            )  # diffusers leaves wrappers behind: stock's forward on our layers
            handle.restore()
        elif offload is sequential_offload:
            with pytest.raises(RestoreError, match=r"by layer \(sequential offload\); call pipe.remove_all"):
                handle.restore()
            off()
            handle.restore()
        else:
            handle.restore()
            assert torch.equal(called(pipe), stock)
            off()
    assert torch.equal(called(pipe), stock)
    if offload is not sequential_offload:  # which makes other parameters of them
        assert [name for name in before.differing(bits(pipe)) if name != "attributes"] == []


def test_group_offload_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies would come back behind a restore(), so that is refused until it is off."""
    pipe = Z_IMAGE.pipe()
    stock = Z_IMAGE.call(pipe)
    handle = fusedit.accelerate(pipe, "fp8")
    drawn = Z_IMAGE.call(pipe)
    off = streamed_offload(pipe, monkeypatch)
    assert relative(Z_IMAGE.call(pipe), drawn) < 0.05
    for attempt in (handle.restore, lambda: handle.paused().__enter__()):
        with pytest.raises(RestoreError, match="group offload holds copies of them; take it off the transformer first"):
            attempt()
    off()
    assert relative(Z_IMAGE.call(pipe), drawn) < 0.05
    handle.restore()
    assert torch.equal(Z_IMAGE.call(pipe), stock)
    streamed_offload(pipe, monkeypatch)
    report = fusedit.accelerate(pipe, "fp8").report()
    assert "group offload holds copies of the weights; accelerate the pipeline before enabling it" in {
        r.reason for r in report.refused
    }
    assert not converted(pipe)


def test_group_offload_to_disk(tmp_path: Any) -> None:
    pipe = FLUX.pipe()
    handle = fusedit.accelerate(pipe, "fp8")
    drawn = FLUX.call(pipe)
    pipe.transformer.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
    )
    assert relative(FLUX.call(pipe), drawn) < 0.02
    with pytest.raises(RestoreError, match="holds copies"):
        handle.restore()
