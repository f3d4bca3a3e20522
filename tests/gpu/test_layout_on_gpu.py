"""fusedit layout on a GPU: FLUX.1-dev's VAE with random weights, its conversions counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fusedit.cli import app

pytestmark = pytest.mark.gpu
DECODE = ["conv_in", "mid_block", "up_blocks.0", "up_blocks.1", "up_blocks.2", "up_blocks.3", "conv_out"]
ENCODE = ["conv_in", "down_blocks.0", "down_blocks.1", "down_blocks.2", "down_blocks.3", "mid_block", "conv_out"]


def layout(*arguments: str) -> Any:
    command = ["layout", "-m", "random-flux", "--size", "256x256", "--seconds", "0.1", *arguments]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_stage_is_timed_and_right(dtype: str) -> None:
    told = layout("--dtype", dtype)
    assert (told["device"], told["dtype"], told["random_weights"]) == ("cuda", dtype, True)
    assert told["environment"]["gpu"]
    decode, encode = told["passes"]
    for one, stages in ((decode, DECODE), (encode, ENCODE)):
        assert [part["name"] for part in one["parts"] if part["kind"] == "stage"] == stages
        assert one["check"]["passed"] is True, one["check"]
        for variant in ("nchw", "nhwc", "fused"):
            figures = [part[variant] for part in one["parts"] if part[variant] is not None]
            assert all(0 < figure["low_ms"] <= figure["ms"] <= figure["high_ms"] for figure in figures)
            assert one["sum_ms"][variant] == pytest.approx(sum(figure["ms"] for figure in figures))


def test_conversions_are_counted() -> None:
    for one in layout("--dtype", "bf16")["passes"]:
        assert one["conversions_unmeasured"] is None
        found = {variant: {row["kind"]: row["number"] for row in rows} for variant, rows in one["conversions"].items()}
        stock = found["nchw"]
        assert sum(stock[kind] for kind in stock if kind.startswith("cuDNN")) > 0  # tensor cores want NHWC
        assert found["nhwc"]["copies in GroupNorm"] > 0  # torch's GroupNorm computes in NCHW
        assert sum(found["fused"][kind] for kind in ("copies in GroupNorm", "copies in convolutions")) == 0
        for rows in one["conversions"].values():
            assert all((row["ms"] > 0) == (row["number"] > 0) for row in rows)


def test_the_table_on_a_gpu() -> None:
    result = CliRunner().invoke(
        app, ["layout", "-m", "random-flux", "--size", "128x128", "--seconds", "0.05", "--what", "decode"]
    )
    assert result.exit_code == 0, result.output
    assert "copies in GroupNorm" in result.stdout
    assert "accelerate() runs" in result.stdout
