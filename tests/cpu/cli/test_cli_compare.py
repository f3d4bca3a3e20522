from __future__ import annotations

import json
from typing import Any

import pytest
from support.broken_rewrites import nan_from, scaled

FAST = ("--size", "48x32", "--steps", "2", "--seed", "0")


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-z-image"])
def test_a_green_comparison(shell: Any, model: str) -> None:
    told = shell.json("compare", "-m", model, "-p", "red fox", "-p", "", "--out", "out/c", *FAST)
    assert told["model"] == model
    assert told["size"] == "48x32"
    assert [(pair["prompt"], pair["seed"]) for pair in told["pairs"]] == [("red fox", 0), ("", 0)]
    assert told["verdict"] == {"passed": True, "reasons": [], "checks": told["verdict"]["checks"]}
    assert told["speedup"] > 0
    assert all(pair["psnr_db"] == "inf" or pair["psnr_db"] > 80 for pair in told["pairs"])
    assert told["rewritten"]
    assert all(site["fused"] > 0 for site in told["rewritten"] if site["called"])
    assert {site["site"].partition(".")[0] for site in told["rewritten"] if not site["called"]} == {"vae_encoder"}
    assert json.loads((shell.folder / "out/c/result.json").read_text()) == told
    names = shell.files()
    assert "out/c/report.html" in names
    assert "out/c/01-seed0-stock.png" in names
    assert "out/c/02-seed0-fused.json" in names


def test_a_red_gate_exits_with_one_and_shows_no_speedup(shell: Any, broken: Any) -> None:
    broken.effects = {"stub.wrong": scaled(1.2), "stub.right": scaled(1.0)}
    result = shell("compare", "-p", "fox", *FAST)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "stub.wrong" in result.stdout
    told = shell.json("compare", "-p", "fox", *FAST, code=1)
    assert told["speedup"] is None
    assert told["guilt"]["rewrites"] == ["stub.wrong"]
    assert shell("compare", "-p", "fox", "--min-psnr", "5", "--min-ssim", "0.1", *FAST).exit_code == 0


def test_nan_exits_with_one_and_saves_no_black_picture(shell: Any, broken: Any) -> None:
    broken.effects = {"stub.nan": nan_from(0)}
    told = shell.json("compare", "-p", "fox", "--out", "c", *FAST, code=1)
    assert told["pairs"][0]["psnr_db"] is None
    assert told["pairs"][0]["failures"][0]["step"] == 0
    assert told["fused"]["step_ms"] is None
    assert told["guilt"]["rewrites"] == ["stub.nan"]
    assert not any("fused.png" in name for name in shell.files())


@pytest.mark.usefixtures("broken")
def test_median_gate(shell: Any) -> None:
    assert shell("compare", "-p", "fox", "--gate-on", "median", *FAST).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--size", "250x256"), "240"),
        (("--steps", "0"), "steps"),
        (("--seed", "-1"), "seed"),
        (("--seed", "3", "--seed", "3"), "twice"),
        (("--min-psnr", "-1"), "min_psnr"),
        (("--min-ssim", "1.5"), "min_ssim"),
        (("--gate-on", "mean"), "mean"),
        (("--reference", "fp64"), "fp64"),
        (("--plan", "none.json"), "none.json"),
        (("--model", "nope"), "nope"),
        (("--out", "taken/below"), "taken"),
        (("--dtype", "fp16"), "bf16"),
    ],
)
def test_wrong_use(shell: Any, arguments: tuple[str, ...], word: str) -> None:
    (shell.folder / "taken").write_text("a file in the way")
    assert word in shell.refused("compare", "-p", "fox", *arguments)


def test_a_result_file_of_someone_elses_is_not_overwritten(shell: Any) -> None:
    (shell.folder / "result.json").write_text("[1, 2]")
    result = shell("compare", "-p", "a", "--out", ".", "--size", "48x32", "--steps", "1")
    assert result.exit_code == 2
    assert "is there and is not from fusedit" in result.output
    assert (shell.folder / "result.json").read_text() == "[1, 2]"


def test_no_prompt_is_wrong_use(shell: Any) -> None:
    assert shell("compare").exit_code == 2


def test_a_prompt_that_is_no_unicode_text(shell: Any) -> None:
    assert "valid Unicode text; its character 1 is '\\udcff'" in shell.refused("compare", "-p", "fox", "-p", "\udcff")


def test_a_plan_nested_too_deep(shell: Any) -> None:
    (shell.folder / "deep.json").write_text("[" * 100_000)
    assert "'deep.json' is nested too deep" in shell.refused("compare", "-p", "fox", "--plan", "deep.json")


def test_a_plan_of_a_newer_version(shell: Any) -> None:
    (shell.folder / "new.json").write_text('{"schema": 99, "base": "turbo", "more": 1}')
    assert "99" in shell.refused("compare", "-p", "fox", "--plan", "new.json")


def test_an_unknown_rewrite(shell: Any) -> None:
    (shell.folder / "plan.json").write_text('{"schema": 1, "rewrites": {"flux.nothing": false}}')
    assert "flux.nothing" in shell.refused("compare", "-p", "fox", "--plan", "plan.json", *FAST)
