"""The slow work of the ops' tests, once a run: two processes of each kind, started when first asked for.

Some 370 CPU seconds for the machine code, of which LLVM and MLIR take 250 and ptxas 55, and 206 for the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripts import once

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


def run_shares(script: str, **environment: str) -> dict[str, Any]:
    """Runs a script of this folder in two shares side by side and joins their JSON."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    shares = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(share), "2"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(2)
    ]
    joined: dict[str, Any] = {}
    ended = [(share.communicate(), share.returncode) for share in shares]
    for (out, err), code in ended:
        assert code == 0, err[-4000:]
        joined |= json.loads(out.splitlines()[-1])
    return joined


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """op/case/dtype -> {wrong: [sentences], ran: {backend: calls}} of the Triton interpreter."""
    return once(tmp_path_factory, "interpreted", lambda: run_shares("run_interpreted.py", TRITON_INTERPRET="1"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """op/build/capability -> registers, stack, shared, accesses, layouts."""
    cache = str(tmp_path_factory.mktemp("triton"))
    return once(tmp_path_factory, "compiled", lambda: run_shares("run_compiled.py", TRITON_CACHE_DIR=cache))


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a piece of Python in a fresh process; returns what it printed."""

    def run(code: str, *first_on_path: Path, **environment: str) -> str:
        path = os.pathsep.join([*map(str, first_on_path), str(SOURCE)])
        env = {**os.environ, "PYTHONPATH": path, **environment}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
