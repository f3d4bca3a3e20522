from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fusedit import files
from fusedit.errors import OutputError


def test_check_folder_leaves_no_trace(tmp_path: Path) -> None:
    assert files.check_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/below", "file", "null\0byte"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError):
        files.check_folder(tmp_path / name)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", denied)  # root may write everywhere, so pretend
    with pytest.raises(OutputError, match="permission denied"):
        files.check_folder(tmp_path)


def test_check_file(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    assert files.check_file(tmp_path / "a.PNG", ".png").name == "a.PNG"
    for bad in ("a.jpg", "a", "folder.png"):
        with pytest.raises(OutputError):
            files.check_file(tmp_path / bad, ".png")


def test_files_appear_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    real = os.fsync
    calls = []

    def second_fails(number: int) -> None:
        calls.append(number)
        if len(calls) == 2:
            raise full
        real(number)

    monkeypatch.setattr(files.os, "fsync", second_fails)
    with pytest.raises(OutputError, match="no space left"):
        files.write_together({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_together({tmp_path / "a": b"1"})
    assert list(tmp_path.iterdir()) == []


def test_write_replaces_and_makes_folders(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.txt"
    files.write_together({target: b"1"})
    files.write_together({target: b"2"})
    assert target.read_bytes() == b"2"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]


def test_png_holds_the_settings_and_the_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((16, 32, 3), dtype=np.float32)
    settings = {"prompt": 'a "red" äpple\n🍎', "seed": 2**63 - 1, "psnr": float("inf"), "guidance": 0.0}
    path = tmp_path / "a.png"
    files.write_together({path: files.png_bytes(pixels, settings)})
    assert files.read_settings(path) == {**settings, "psnr": "inf"}
    from PIL import Image

    with Image.open(path) as image:
        assert image.size == (32, 16)
        assert np.abs(np.asarray(image) / 255 - pixels).max() <= 0.5 / 255 + 1e-6


def test_json_has_no_token_that_json_lacks() -> None:
    data = {"a": float("inf"), "b": -float("inf"), "c": float("nan"), "d": (1, None, True), 3: Path("x")}
    text = files.json_bytes(data).decode()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": "inf", "b": "-inf", "c": "nan", "d": [1, None, True], "3": "x",
    }  # fmt: skip
