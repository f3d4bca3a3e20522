"""The fused encoder and decoder on a GPU with the real configuration, random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.gpu import peak_bytes
from support.pipes import relative

import fusedit
from benchmarks.compilations import held, kernels
from benchmarks.gpu import free
from benchmarks.workloads import Workload, z_image_turbo
from fusedit.plan import Plan


@pytest.fixture(scope="module")
def workload() -> Iterator[Workload]:
    torch.manual_seed(0)
    yield z_image_turbo(n_layers=1)
    torch.cuda.empty_cache()


def latents(height: int, width: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(2)
    return torch.randn(batch, 16, height, width, device="cuda", generator=generator).to(dtype)


def pictures(height: int, width: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(3)
    return (2 * torch.rand(batch, 3, height, width, device="cuda", generator=generator) - 1).to(dtype)


def encode(vae: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        moments: torch.Tensor = vae.encode(x).latent_dist.parameters
    return moments


def decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        picture: torch.Tensor = vae.decode(z, return_dict=False)[0]
    return picture


@pytest.mark.parametrize(("height", "width", "batch"), [(64, 64, 1), (128, 128, 1), (33, 61, 3)])
def test_bf16_error_is_not_above_stock(workload: Workload, height: int, width: int, batch: int) -> None:
    vae, z = workload.pipe.vae, latents(height, width, batch)
    stock = decode(vae, z)
    handle = fusedit.accelerate(workload.pipe)
    fused = decode(vae, z)
    sites = {site.site: site for site in handle.report().rewritten}
    handle.restore()
    exact = decode(copy.deepcopy(vae).float(), z.float())
    assert sum(sites[f"vae.{name}"].fused for name in ("group_norm_silu", "residual_norm", "conv_out")) == 30
    assert fused.is_contiguous()
    assert relative(fused, exact) <= 1.05 * relative(stock, exact)


def test_fp32_matches_stock(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 off on both sides, so that only the order of sums differs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe = copy.copy(workload.pipe)
    pipe.vae = copy.deepcopy(workload.pipe.vae).float()
    z = latents(32, 48, dtype=torch.float32)
    stock = decode(pipe.vae, z)
    handle = fusedit.accelerate(pipe)
    fused = decode(pipe.vae, z)
    handle.restore()
    assert relative(fused, stock) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_no_memory_above_stock(workload: Workload, dtype: torch.dtype) -> None:
    pipe = copy.copy(workload.pipe)
    pipe.vae = copy.deepcopy(workload.pipe.vae).to(dtype)
    calls = [
        partial(decode, pipe.vae, latents(128, 128, dtype=dtype)),
        partial(encode, pipe.vae, pictures(1024, 1024, dtype=dtype)),
    ]
    for call in calls:
        call()
    stock = [peak_bytes(call) for call in calls]
    fusedit.accelerate(pipe)
    for call, allowed in zip(calls, stock, strict=True):
        call()
        assert peak_bytes(call) <= allowed


@pytest.mark.parametrize("first", [128, 4], ids=["large-first", "small-first"])
def test_no_compilation_for_new_sizes(workload: Workload, first: int) -> None:
    """Which convolutions are ours depends on the size; here on an H200 from nearly all to none."""
    pipe = copy.copy(workload.pipe)
    vae = pipe.vae = copy.deepcopy(workload.pipe.vae)
    for kernel in kernels():  # as in a new process
        kernel.device_caches.clear()
    fusedit.accelerate(pipe)
    decode(vae, latents(first, first))
    encode(vae, pictures(8 * first, 8 * first))
    before = held()
    assert sum(before.values()) > 10
    for height, width, batch in ((64, 64, 1), (96, 96, 1), (40, 72, 2), (33, 61, 1), (4, 4, 1), (128, 128, 1)):
        decode(vae, latents(height, width, batch))
        encode(vae, pictures(8 * height, 8 * width, batch))
        assert held() == before, (height, width)


def test_tiled_decode_is_accelerated(workload: Workload) -> None:
    vae, z = workload.pipe.vae, latents(96, 160)
    vae.tile_sample_min_size, vae.tile_latent_min_size = 512, 64
    vae.enable_tiling()
    stock = decode(vae, z)
    handle = fusedit.accelerate(workload.pipe)
    fused = decode(vae, z)
    sites = {site.site: site for site in handle.report().rewritten}
    handle.restore()
    vae.disable_tiling()
    assert sites["vae.channels_last"].fused == 2 * 4
    assert relative(fused, stock) < 0.05


@pytest.mark.parametrize(("height", "width", "batch"), [(512, 512, 1), (1024, 1024, 1), (264, 488, 3)])
def test_encode_error_is_not_above_stock(workload: Workload, height: int, width: int, batch: int) -> None:
    vae, x = workload.pipe.vae, pictures(height, width, batch)
    stock = encode(vae, x)
    handle = fusedit.accelerate(workload.pipe)
    fused = encode(vae, x)
    sites = {site.site: site for site in handle.report().rewritten}
    handle.restore()
    exact = encode(copy.deepcopy(vae).float(), x.float())
    assert sites["vae_encoder.group_norm_silu"].fused + sites["vae_encoder.residual_norm"].fused == 22
    assert fused.is_contiguous()
    assert relative(fused, exact) <= 1.05 * relative(stock, exact)


def test_float16_is_computed_in_float32(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe = copy.copy(workload.pipe)
    pipe.vae = copy.deepcopy(workload.pipe.vae).half()
    z, x = latents(32, 48, dtype=torch.float16), pictures(256, 384, dtype=torch.float16)
    handle = fusedit.accelerate(pipe)
    decoded, encoded = decode(pipe.vae, z), encode(pipe.vae, x)
    notes = [note for note in handle.report().notes if "float16" in note]
    handle.restore()
    exact = copy.deepcopy(pipe.vae).float()
    assert decoded.dtype == encoded.dtype == torch.float16
    assert relative(decoded.float(), decode(exact, z.float())) < 1e-3  # the rounding of the result
    assert relative(encoded.float(), encode(exact, x.float())) < 1e-3
    assert len(notes) == 2


def test_a_small_picture_becomes_a_graph(workload: Workload) -> None:
    vae, z = workload.pipe.vae, latents(32, 32)
    handle = fusedit.accelerate(workload.pipe)
    first, *others = [decode(vae, z) for _ in range(4)]
    (graphs,) = (cache for cache in handle.report().caches if cache.name == "vae.decoder graphs")
    with torch.no_grad():
        vae.decoder.conv_in.weight.mul_(1.5)
        changed = decode(vae, z)
        vae.decoder.conv_in.weight.div_(1.5)
    handle.restore()
    assert graphs.hits == 2
    assert all(torch.equal(other, first) for other in others)
    assert not torch.equal(changed, first)


@pytest.mark.parametrize("graphs", [False, True])
def test_4096x4096_tiled_fits_where_stock_does(workload: Workload, graphs: bool) -> None:
    """The same tiles and the same blending; and what is computed in one piece has more than 2^31 elements.

    Without graphs no more memory is needed than for stock. With them 1 GiB more may be: the four shapes of tiles share
    one pool, which holds the 1.3 GiB that the largest needs besides the weights, and the allocator may keep as much
    from the eager calls before; stock needs 2.5 for that tile.
    """
    vae, z = workload.pipe.vae, latents(512, 512)
    vae.enable_tiling()
    stock = decode(vae, z)
    needed = peak_bytes(lambda: decode(vae, z))
    free()
    handle = fusedit.accelerate(workload.pipe, Plan(cache={"graphs": graphs}))
    fused = decode(vae, z)
    for _ in range(2):  # the corner comes once a picture, so only now is everything captured that will be
        decode(vae, z)
    assert peak_bytes(lambda: decode(vae, z)) <= needed + (2**30 if graphs else 0)
    if graphs:
        assert torch.cuda.max_memory_reserved() <= needed + 2**30
    sites = {site.site: site for site in handle.report().rewritten}
    handle.restore()
    vae.disable_tiling()
    step = int(vae.tile_latent_min_size * (1 - vae.tile_overlap_factor))
    assert sites["vae.channels_last"].fused == 4 * len(range(0, 512, step)) ** 2
    assert relative(fused, stock) < 0.05
