"""Wrong use: one sentence on standard error, exit code 2, before anything is measured or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import arguments, gpu
from benchmarks.__main__ import app
from benchmarks.plans import PLANS
from fusedit.errors import ArgumentError

COMMANDS = ("step", "launches", "cold-start", "image", "vae", "ops", "convolutions")


def refused(*line: str) -> str:
    result = CliRunner().invoke(app, list(line))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("benchmarks: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def arguments_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: pytest.fail("looked for a GPU first"))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: False)
    assert f"the {command} benchmark needs a CUDA GPU and none is visible" in refused(command)


@pytest.mark.parametrize("command", ["step", "launches", "cold-start", "image"])
def test_unknown_names(command: str) -> None:
    assert "unknown model 'flux.2'; known: flux.1-dev, z-image-turbo" in refused(command, "--model", "flux.2")
    assert "model is 'flux.1-dev,', with nothing before or after a comma" in refused(command, "--model", "flux.1-dev,")
    assert "plan is ' '; give at least one plan" in refused(command, "--plans", " ")
    said = f"unknown plan 'fast'; known: {', '.join(PLANS)}"
    assert said in refused(command, "--plans", "fast")
    assert "exact" in said


def test_unknown_op() -> None:
    assert "unknown op 'nope'; known: add_low_rank, attention" in refused("ops", "--op", "nope")
    assert "op is 'swiglu,', with nothing" in refused("ops", "--op", "swiglu,")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("1000x1000", "a side of 1000; sides are multiples of 16 up to 4096"),
        ("0x512", "a side of 0"),
        ("512x8192", "a side of 8192"),
        ("abc", "'abc' is not WIDTHxHEIGHT"),
        ("", "size is ''; give at least one size"),
        (" , ", "size is ' , '; give at least one size"),
        ("512 x512", "'512 x512' is not WIDTHxHEIGHT"),
        ("512", "'512' is not WIDTHxHEIGHT"),
        ("-512x512", "'-512x512' is not WIDTHxHEIGHT"),
        ("512x512,", "size is '512x512,', with nothing before or after a comma; give a size there, or drop it"),
        (",512x512", "size is ',512x512', with nothing before or after a comma"),
        ("512x512, ,768x768", "size is '512x512, ,768x768', with nothing before or after a comma"),
    ],
)
@pytest.mark.parametrize("command", ["step", "launches", "image", "vae", "convolutions"])
def test_sizes(command: str, size: str, said: str) -> None:
    assert said in refused(command, "--size", size)


@pytest.mark.parametrize("batch", ["0", "65", "x", "1.5", "-1", "٣"])
def test_batches(batch: str) -> None:
    assert f"batch {batch!r} is not a whole number from 1 to 64" in refused("step", "--batch", batch)
    assert "batch is '1,', with nothing before or after a comma" in refused("step", "--batch", "1,")
    assert "batch is ''; give at least one batch" in refused("step", "--batch", "")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "601"])
@pytest.mark.parametrize("command", ["step", "vae", "ops", "convolutions"])
def test_seconds(command: str, seconds: str) -> None:
    assert "give a number above 0 and up to 600" in refused(command, "--seconds", seconds)


def test_pictures() -> None:
    assert "pictures is 0" in refused("image", "--pictures", "0")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_found_first(command: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a folder" in refused(command, "--json", str(file / "rows.json"))
    assert "does not end in .json" in refused(command, "--json", str(tmp_path / "rows.txt"))
    (tmp_path / "folder.json").mkdir()
    assert "cannot write to '/proc/none'" in refused(command, "--json", "/proc/none/rows.json")
    assert "is a folder" in refused(command, "--json", str(tmp_path / "folder.json"))
    for content in ('{"schema": 1}', "[" * 100_000):
        (tmp_path / "other.json").write_text(content)
        assert "is not from fusedit" in refused(command, "--json", str(tmp_path / "other.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.json", "other.json"]


def test_what_is_right_is_read() -> None:
    assert arguments.sizes("1024x1024, 512x768,1024x1024 , 0512x768") == [(1024, 1024), (512, 768)]
    assert arguments.batches(" 1,4,1, 04") == [1, 4]
    assert arguments.names("b,a,b", ("a", "b"), "letter") == ["b", "a"]


def test_a_results_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert arguments.destination(path) == path
    assert not path.exists()
    path.write_text('{"device": "x", "rows": []}')
    assert arguments.destination(path) == path
    assert arguments.destination(None) is None


def test_a_defect_keeps_its_traceback() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        arguments.reporting(broken)()

    def wrong() -> None:
        raise ArgumentError("too  big\nby far")

    with pytest.raises(BaseException, match="2"):
        arguments.reporting(wrong)()
