"""The fused Z-Image forward against stock on tiny configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.pipes import relative, z_image_call
from support.z_image import lively_pipe

import fusedit
from fusedit.models._model import NO_RUN
from fusedit.models.z_image import ZImage
from fusedit.plan import Plan

CLOSE = 5e-6
Size = tuple[int, ...]


def inputs(
    config: Any, sizes: list[Size], captions: list[int], dtype: torch.dtype = torch.float32, seed: int = 5
) -> dict[str, Any]:
    """One image [C, 1, H, W] (or [C, F, H, W]) a size and one caption a length."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": [random(config.in_channels, *((1,) * (3 - len(size))), *size) for size in sizes],
        "t": torch.linspace(0.2, 0.8, len(sizes)).to(dtype),
        "cap_feats": [random(length, config.cap_feat_dim) for length in captions],
    }


@torch.no_grad()
def both(pipe: Any, plan: Plan | str = "exact", **arguments: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Fused and stock output for the same arguments; the fused one ran, and neither changed its inputs."""
    kept = copy.deepcopy(arguments)
    stock = pipe.transformer(**arguments)[0]
    handle = fusedit.accelerate(pipe, plan)
    fused = pipe.transformer(**arguments)[0]
    report = handle.report()
    handle.restore()
    sites = [site for site in report.rewritten if site.site.startswith("z_image.")]
    assert all(site.stock == 0 or set(site.reasons) == {NO_RUN} for site in sites), report
    assert any(site.fused for site in sites)
    for name in ("x", "cap_feats"):
        assert all(torch.equal(a, b) for a, b in zip(arguments[name], kept[name], strict=True)), f"{name} was changed"
    return fused, stock


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest relative difference of an item; shapes and dtypes must agree."""
    assert [(i.shape, i.dtype) for i in a] == [(i.shape, i.dtype) for i in b]
    return max(relative(i, j) for i, j in zip(a, b, strict=True))


BATCHES: dict[str, tuple[list[Size], list[int]]] = {
    "one": ([(8, 8)], [5]),
    "whole multiples of 32": ([(16, 16)], [32]),
    "one patch, one token": ([(2, 2)], [1]),
    "same bucket": ([(8, 8)] * 2, [5, 20]),
    "other bucket": ([(8, 8)] * 2, [5, 40]),
    "mixed sizes": ([(8, 8), (16, 12)], [7, 7]),
    "mixed sizes of one padded length": ([(8, 8), (4, 12)], [7, 40]),
    "all mixed": ([(8, 8), (16, 16), (6, 20)], [40, 5, 70]),
    "mixed parts, equal sums": ([(8, 8), (16, 12)], [37, 7]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_matches_stock_in_fp32(name: str) -> None:
    pipe = lively_pipe()
    fused, stock = both(pipe, **inputs(pipe.transformer.config, *BATCHES[name]))
    assert furthest(fused, stock) < CLOSE


@pytest.mark.parametrize(
    "changes",
    [
        {"n_refiner_layers": 0},
        {"n_layers": 0},
        {"n_layers": 0, "n_refiner_layers": 0},
        {"dim": 40, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 4, 8]},
        {"siglip_feat_dim": 12},
        {"norm_eps": 1e-2},
        {"rope_theta": 1000.0, "t_scale": 10.0},
    ],
    ids=str,
)
def test_other_configs_match_stock(changes: dict[str, Any]) -> None:
    pipe = lively_pipe(**changes)
    for name in ("other bucket", "mixed sizes"):
        fused, stock = both(pipe, **inputs(pipe.transformer.config, *BATCHES[name]))
        assert furthest(fused, stock) < CLOSE


def test_frames_and_other_patch_sizes_match_stock() -> None:
    pipe = lively_pipe(all_patch_size=(2, 4), all_f_patch_size=(1, 2))
    for sizes in ([(2, 8, 8)], [(2, 8, 8), (4, 4, 12)]):
        arguments = inputs(pipe.transformer.config, sizes, [5, 40][: len(sizes)])
        fused, stock = both(pipe, **arguments, patch_size=4, f_patch_size=2)
        assert furthest(fused, stock) < CLOSE
    fused, stock = both(pipe, **inputs(pipe.transformer.config, [(3, 8, 8)], [5]), patch_size=2, f_patch_size=1)
    assert furthest(fused, stock) < CLOSE


@pytest.mark.parametrize("name", ["one", "all mixed"])
def test_bf16_error_is_not_above_stock(name: str) -> None:
    """Error against stock in fp32 on the same weights, over several seeds: ours within 5 % of stock's own."""
    ours, stocks = 0.0, 0.0
    for seed in range(4):
        pipe = lively_pipe(seed).to(torch.bfloat16)
        arguments = inputs(pipe.transformer.config, *BATCHES[name], dtype=torch.bfloat16, seed=seed)
        fused, stock = both(pipe, **arguments)
        wide = {key: value.float() if key == "t" else [i.float() for i in value] for key, value in arguments.items()}
        exact = pipe.to(torch.float32).transformer(**wide)[0]
        ours += sum(relative(a, b) for a, b in zip(fused, exact, strict=True))
        stocks += sum(relative(a, b) for a, b in zip(stock, exact, strict=True))
    assert ours <= 1.05 * stocks


@pytest.mark.parametrize("large", [1.0, 40.0])
def test_float16_is_finite_where_stock_is(large: float) -> None:
    """NAN-01: stock may overflow in float16; the fused forward may not where stock does not."""
    pipe = lively_pipe()
    with torch.no_grad():
        for block in pipe.transformer.layers:
            block.feed_forward.w1.weight.mul_(large)
            block.feed_forward.w3.weight.mul_(large)
    pipe.transformer.to(torch.float16)
    fused, stock = both(pipe, **inputs(pipe.transformer.config, [(8, 8)], [5], dtype=torch.float16))
    assert torch.isfinite(fused[0]).all() >= torch.isfinite(stock[0]).all()
    if large == 1.0:
        assert relative(fused[0], stock[0]) < 2e-2


@pytest.mark.parametrize("name", ["other bucket", "mixed sizes", "all mixed"])
def test_batch_item_equals_its_solo_run(name: str) -> None:
    """BAT-01: also for mixed caption lengths and image sizes."""
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, *BATCHES[name])
    handle = fusedit.accelerate(pipe)
    with torch.no_grad():
        whole = pipe.transformer(**arguments)[0]
        solo = [
            pipe.transformer(**{key: value[i : i + 1] for key, value in arguments.items()})[0][0]
            for i in range(len(whole))
        ]
    assert furthest(whole, solo) < CLOSE
    assert all(site.fused for site in handle.report().rewritten if site.site == "z_image.attention")


@pytest.mark.parametrize("captions", [[5], [5, 20], [5, 40]])
def test_a_mask_is_passed_exactly_when_stock_passes_one(captions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """ATT-01: none for one prompt or one bucket, one for captions of different buckets."""
    seen: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        seen.append(attn_mask is not None)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, [(8, 8)] * len(captions), captions)
    with torch.no_grad():
        pipe.transformer(**arguments)
        stock, seen[:] = sorted(seen), []
        fusedit.accelerate(pipe)
        pipe.transformer(**arguments)
    assert sorted(seen) == stock
    assert any(seen) == (captions == [5, 40])


@pytest.mark.parametrize("length", [5, 31, 32, 33, 64, 70])
def test_every_caption_length_equals_stock_and_pads_are_attended(length: int) -> None:
    """CG-03: nothing rounds a caption up further than stock does."""
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, [(8, 8)], [length])
    fused, stock = both(pipe, **arguments)
    assert furthest(fused, stock) < CLOSE
    with torch.no_grad():
        pipe.transformer.cap_pad_token.add_(1.0)
    changed, _ = both(pipe, **arguments)
    assert (relative(changed[0], fused[0]) > 1e-3) == (length % 32 != 0)


@pytest.mark.parametrize("rewrite", [rewrite.name for rewrite in ZImage.rewrites if rewrite.tier == "exact"])
def test_each_rewrite_can_be_switched_off(rewrite: str) -> None:
    pipe = lively_pipe()
    stock = z_image_call(pipe, lengths=(7, 40))
    handle = fusedit.accelerate(pipe, Plan(rewrites={rewrite: False}))
    assert relative(z_image_call(pipe, lengths=(7, 40)), stock) < 2e-5
    report = handle.report()
    assert rewrite not in [site.site for site in report.rewritten]
    assert (rewrite, "switched off by the plan") in [(r.site, r.reason) for r in report.refused]
    assert all(site.fused > 0 and site.stock == 0 for site in report.rewritten if site.site.startswith("z_image."))


def test_every_rewrite_alone_matches_stock() -> None:
    pipe = lively_pipe()
    stock = z_image_call(pipe)
    names = [rewrite.name for rewrite in ZImage.rewrites if rewrite.tier == "exact"]
    for name in names:
        handle = fusedit.accelerate(pipe, Plan().without(*(other for other in names if other != name)))
        assert relative(z_image_call(pipe), stock) < 2e-5, name
        assert [s.site for s in handle.report().rewritten if s.site.startswith("z_image.")] == [name]


@pytest.mark.parametrize("captions", [[7], [7, 40]])
@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2), (2,), ()])
def test_controlnet_residuals_are_added_after_their_layer(layers: tuple[int, ...], captions: list[int]) -> None:
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, [(8, 8)] * len(captions), captions)
    generator = torch.Generator().manual_seed(0)
    tokens = 32 + max(-length % 32 + length for length in captions)
    samples = {i: torch.randn(len(captions), tokens, 48, generator=generator) for i in layers}
    kept = {i: sample.clone() for i, sample in samples.items()}
    fused, stock = both(pipe, **arguments, controlnet_block_samples=samples)
    assert furthest(fused, stock) < CLOSE
    assert all(torch.equal(samples[i], kept[i]) for i in layers)
    plain, _ = both(pipe, **arguments)
    assert (relative(fused[0], plain[0]) > 1e-3) == bool(layers)


def test_return_dict_and_positional_arguments() -> None:
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, [(8, 8)], [5])
    with torch.no_grad():
        stock = pipe.transformer(*arguments.values())
        fusedit.accelerate(pipe)
        fused = pipe.transformer(*arguments.values())
        as_tuple = pipe.transformer(*arguments.values(), False)
    assert type(fused) is type(stock)
    assert type(fused.sample) is list
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == 1
    assert torch.equal(as_tuple[0][0], fused.sample[0])


def test_one_time_step_serves_a_batch_as_in_stock() -> None:
    pipe = lively_pipe()
    arguments = inputs(pipe.transformer.config, *BATCHES["all mixed"])
    fused, stock = both(pipe, **{**arguments, "t": torch.tensor([0.4])})
    assert furthest(fused, stock) < CLOSE


def test_every_argument_that_matters_to_stock_matters_to_us() -> None:
    """PIP-04: changing an argument changes the output exactly when it does in stock."""
    pipe = lively_pipe()
    base = inputs(pipe.transformer.config, [(8, 8)], [5])
    fused, stock = both(pipe, **base)
    for name, value in {
        "x": [base["x"][0] * 0.5],
        "t": base["t"] + 0.25,
        "cap_feats": [base["cap_feats"][0] - 0.5],
    }.items():
        changed_fused, changed_stock = both(pipe, **{**base, name: value})
        assert relative(changed_stock[0], stock[0]) > 1e-5, name
        assert furthest(changed_fused, changed_stock) < CLOSE, name
    same, _ = both(pipe, **base, joint_attention_kwargs={"something": 1})  # stock reads nothing but the scale
    assert torch.equal(same[0], fused[0])


def test_pipeline_draws_what_stock_draws() -> None:
    """BAT-03: three prompts of different lengths, two images each, prompt-major, all different."""
    pipe = lively_pipe()
    arguments = {"lengths": (5, 40, 9), "num_images_per_prompt": 2, "num_inference_steps": 1}
    stock = z_image_call(pipe, **arguments)
    fusedit.accelerate(pipe)
    fused = z_image_call(pipe, **arguments)
    assert fused.shape[0] == 6
    for i in range(6):
        assert relative(fused[i], stock[i]) < CLOSE
        assert all(relative(fused[i], fused[j]) > 1e-2 for j in range(i))


def test_guidance_with_a_negative_of_another_bucket() -> None:
    pipe = lively_pipe()
    negative = [torch.randn(40, pipe.transformer.config.cap_feat_dim, generator=torch.Generator().manual_seed(9))]
    arguments = {"guidance_scale": 3.0, "negative_prompt_embeds": negative, "num_inference_steps": 4}
    stock = z_image_call(pipe, **arguments)
    handle = fusedit.accelerate(pipe)
    assert relative(z_image_call(pipe, **arguments), stock) < 2e-5
    hoist = next(site for site in handle.report().rewritten if site.site == "z_image.hoist")
    assert hoist.fused == 2 * 3 - 1  # captions and layout in the steps after the first, which packed weights once


def test_restored_pipeline_is_bit_for_bit_stock() -> None:
    pipe = lively_pipe()
    parameters = dict(pipe.transformer.named_parameters())
    before = {name: (p.detach().clone(), p.untyped_storage().nbytes()) for name, p in parameters.items()}
    stock = z_image_call(pipe)
    handle = fusedit.accelerate(pipe)
    z_image_call(pipe)
    handle.restore()
    for name, p in parameters.items():
        assert torch.equal(p, before[name][0])
        assert p.untyped_storage().nbytes() == before[name][1], name
    assert torch.equal(z_image_call(pipe), stock)
