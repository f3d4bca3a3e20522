"""Captures that fail, and captures beside other threads: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_captures.py")
ROOT = SCRIPT.parents[3]
SCENARIOS = (
    "synchronises",
    "reads_a_value",
    "fails_beside_a_graph",
    "out_of_memory",
    "another_thread",
    "two_pipelines_in_two_threads",
    "a_thread_that_computes",
    "a_thread_that_synchronises",
    "a_thread_that_draws_random_numbers",
    "the_caller_captures",
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whatever_happens_to_a_capture_the_picture_is_right(scenario: str) -> None:
    own = [str(path) for path in (ROOT / "tests", ROOT, ROOT / "src")]
    paths = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.rstrip().endswith(f"{scenario}: right")
