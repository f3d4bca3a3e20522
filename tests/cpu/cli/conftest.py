from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import broken_rewrites, whole_pipes
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines with random weights, saved under the names of the embedded models."""
    folder = tmp_path_factory.mktemp("models")
    made = {"tiny-flux": whole_pipes.flux_pipe(), "tiny-z-image": whole_pipes.z_image_pipe()}
    for name, pipe in made.items():
        pipe.save_pretrained(folder / name)
    return {name: folder / name for name in made}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[broken_rewrites.Rewrites]:
    return broken_rewrites.install(monkeypatch)


class Shell:
    """Runs `fusedit ...` in this process, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str) -> Result:
        from fusedit.cli import app

        return CliRunner().invoke(app, list(arguments))

    def json(self, *arguments: str, code: int = 0) -> Any:
        result = self(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout, parse_constant=pytest.fail)

    def refused(self, *arguments: str) -> str:
        """Wrong use: exit code 2, one sentence on standard error, nothing on standard output, nothing written."""
        before = self.files()
        result = self(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("fusedit: ")
        assert result.stderr.count("\n") == 1
        assert self.files() == before
        return result.stderr

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]) -> Shell:
    from fusedit import loading, progress

    monkeypatch.setattr(progress, "QUIET", float("inf"))  # on a slow machine a short run is a long one
    monkeypatch.setattr(loading, "embedded_models", lambda: dict(models))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Shell(tmp_path)
