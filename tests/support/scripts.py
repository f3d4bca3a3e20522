"""Scripts that tests run in a process of their own, since triton decides at its import whether it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


def run_script(script: Path, **environment: str) -> dict[str, Any]:
    """Runs it and reads the JSON that it prints last."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
