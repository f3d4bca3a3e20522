"""Scripts that tests run in a process of their own, since triton decides at its import whether it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

SOURCE = Path(__file__).parents[2] / "src"


def run_script(script: Path, **environment: str) -> dict[str, Any]:
    """Runs it and reads the JSON that it prints last."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What make() returns, made by the first of xdist's workers that asks and read by the others.

    A fixture of a session is made once a worker, and the tests that share one are dealt out to all of them.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    kept = folders.getbasetemp().parent / f"{name}.json"  # the folder of this run
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_text(json.dumps(make()))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found
